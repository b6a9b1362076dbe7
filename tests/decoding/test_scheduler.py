"""The scheduler alone: a state machine that plays the engine's part, and plain examples."""

import dataclasses
import itertools
import math
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specax.decoding.buckets import Buckets
from specax.decoding.policies import POLICIES, Policy, PolicyContext, make_policy
from specax.decoding.request import Request, Sequence, Status
from specax.decoding.sampling_params import SamplingParams
from specax.decoding.scheduler import Plan, Scheduler, Work, forking
from specax.paged import KVMemory
from specax.paged.host_tier import HostTier, PageSave
from specax.paged.namespaces import private_namespace
from specax.paged.page_table import PageCopy


class Clock:
    """A second per step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """What the engine does around a scheduler, without a device: `memory` maps each slot to its token.

    Prompts are over a small alphabet, so that they share prefixes; a sampled token is a new number every time. A
    slot that was lost, shared by mistake or overwritten shows when a context is read back.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_rows: int, max_tokens: int, prefill_rows: int,
        policy: str = "fcfs", prefix_cache: bool = True, host_pages: int = 0, age_bound: float = math.inf,
    ):  # fmt: skip
        host = HostTier(host_pages, (1,)) if host_pages else None
        self.kv = KVMemory((num_pages,), page_size, prefix_cache=prefix_cache, host=host)
        self.pool, self.page_size = self.kv.pools[0], page_size
        self.clock = Clock()

        def make(scheduler: Scheduler) -> Policy:
            prefilling = scheduler.prefilling if prefix_cache else tuple
            return make_policy(policy, PolicyContext(self.clock, age_bound, scheduler.cached_tokens, prefilling))

        self.scheduler = Scheduler(self.kv, make, max_rows, max_tokens, prefill_rows, max_pages=64)
        self.requests: list[Request] = []
        self.memory: dict[int, int] = {}
        self.names = itertools.count(1000)

    def submit(
        self, prompt_len: int, max_tokens: int, n: int = 1, prompt: list[int] | None = None, **origin: Any
    ) -> Request:
        """A request that fits the pool when it is alone; its prompt is like no other's unless given."""
        params = SamplingParams(n=n, max_tokens=max_tokens)
        prompt = prompt or [next(self.names) for _ in range(prompt_len)]
        number = len(self.requests)
        request = Request(f"r{number}", prompt, params, max_tokens, frozenset(), (), (), number, **origin)
        request.metrics.arrival = self.clock.now
        for index in range(n):
            request.sequences.append(Sequence(request, index, self.kv.new_table(), seed=index))
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self, stop_early: frozenset[int] = frozenset()) -> Plan:
        """One iteration; the sampled sequences at the places `stop_early` end there."""
        self.clock.now += 1
        plan = self.scheduler.schedule()
        self.check(plan)
        self.run(plan)
        sampled: list[Sequence] = []
        self.scheduler.advance(plan)
        for work in plan.work:
            if work.samples:
                children = self.scheduler.fork(work.sequence) if forking(work.sequence) else []
                sampled += [work.sequence, *children]
        for at, sequence in enumerate(sampled):
            sequence.tokens.append(next(self.names))
            if at in stop_early or sequence.output_len >= sequence.request.max_tokens:
                self.scheduler.finish(sequence, "length")
        return plan

    def page(self, page: int) -> dict[int, int]:
        slots = ((offset, page * self.page_size + offset) for offset in range(self.page_size))
        return {offset: self.memory[slot] for offset, slot in slots if slot in self.memory}

    def fill(self, page: int, content: dict[int, int]) -> None:
        self.memory.update({page * self.page_size + offset: token for offset, token in content.items()})

    def run(self, plan: Plan) -> None:
        """As on the device: page work in order, then all writes, then every whole context must read back."""
        for op in plan.ops:
            if isinstance(op, PageCopy):
                self.fill(op.target, self.page(op.source))
            elif isinstance(op, PageSave):
                op.target.content = self.page(op.page)
            else:
                self.fill(op.page, op.source.resolve())
        for work in plan.work:
            for position, slot in enumerate(work.sequence.table.slots(work.start, work.stop)[0].tolist(), work.start):
                self.memory[slot] = work.sequence.tokens[position]
        for work in plan.work:
            context = [self.memory[slot] for slot in work.sequence.table.slots(0, work.stop)[0].tolist()]
            assert context == list(work.sequence.tokens[: work.stop])

    def check(self, plan: Plan) -> None:
        """What holds of every plan before it runs."""
        s = self.scheduler
        assert plan.num_tokens <= s.max_tokens
        assert len(plan.decodes) <= s.max_rows and len(plan.prefills) <= s.prefill_rows
        assert len(s.running) <= s.rows_used <= s.max_rows
        slots = [w.sequence.slot for w in plan.work]
        assert None not in slots and len(set(slots)) == len(slots)
        assert len({id(w.sequence) for w in plan.work}) == len(plan.work)
        written: Counter[int] = Counter()
        for work in plan.work:
            sequence = work.sequence
            assert sequence.status is Status.RUNNING
            assert work.start == sequence.computed < work.stop <= len(sequence.tokens)
            assert len(sequence.table) * self.page_size >= work.stop
            assert sequence.slot is not None
            assert (s.tables[sequence.slot, :, : len(sequence.table)] == sequence.table.pages).all()
            for slot in sequence.table.slots(work.start, work.stop)[0].tolist():
                written[slot] += 1
                assert slot >= self.page_size  # not in the trash page
                assert self.pool.references(slot // self.page_size) == 1
        assert all(count == 1 for count in written.values())
        assert all(w.stop - w.start == 1 and w.samples for w in plan.decodes)

    def drain(self) -> None:
        """Runs until nothing is left; something always advances, so steps are bounded."""
        live = [s for request in self.requests for s in request.live]
        bound = 2 * sum(len(s.request.prompt) + s.request.max_tokens for s in live)
        for _ in range(bound + 1):
            if not any(request.live for request in self.requests):
                break
            assert self.step().work
        assert not any(request.live for request in self.requests), f"not done after {bound} steps"

    def check_at_rest(self) -> None:
        assert not self.scheduler.running and not self.scheduler.waiting
        tree = self.kv.tree
        assert self.pool.num_free + tree.evictable[0] == self.pool.num_pages - 1
        assert all(node.locks == 0 for node in tree.nodes())
        tree.reclaim(0, tree.evictable[0])
        assert self.pool.num_free == self.pool.num_pages - 1
        assert all(self.pool.references(page) == 0 for page in range(self.pool.num_pages))
        assert sorted(self.scheduler._slots) == list(range(self.scheduler.max_rows))


class Scheduling(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(2, 10), page_size=st.integers(1, 4), max_rows=st.integers(1, 4),
        more_tokens=st.integers(0, 12), prefill_rows=st.integers(1, 3), policy=st.sampled_from(sorted(POLICIES)),
        prefix_cache=st.booleans(), host_pages=st.sampled_from([0, 4, 50]), age_bound=st.sampled_from([0, 5, math.inf]),
    )  # fmt: skip
    def start(
        self, pages: int, page_size: int, max_rows: int, more_tokens: int, prefill_rows: int, policy: str,
        prefix_cache: bool, host_pages: int, age_bound: float,
    ) -> None:  # fmt: skip
        rows = min(prefill_rows, max_rows)
        self.loop = Loop(
            1 + pages, page_size, max_rows, max_rows + more_tokens, rows, policy, prefix_cache, host_pages, age_bound
        )
        self.scheduler = self.loop.scheduler

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), output=st.integers(1, 12), n=st.integers(1, 4),
        priority=st.integers(0, 2), tenant=st.sampled_from([None, "a", "b"]),
    )  # fmt: skip
    def submit(self, prompt: list[int], output: int, n: int, priority: int, tenant: str | None) -> None:
        room = (self.loop.pool.num_pages - 1) * self.loop.page_size
        prompt = prompt[:room]
        output = min(output, room - len(prompt) + 1)
        n = min(n, self.scheduler.max_rows)
        self.loop.submit(len(prompt), output, n, prompt, priority=priority, tenant=tenant)

    @precondition(lambda self: any(request.live for request in self.loop.requests))
    @rule(stop_early=st.frozensets(st.integers(0, 9), max_size=1), times=st.integers(1, 4))
    def step(self, stop_early: frozenset[int], times: int) -> None:
        for _ in range(times):
            self.one_step(stop_early)

    def one_step(self, stop_early: frozenset[int]) -> None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), scheduler.waiting
        # What the scheduler plans is looked at inside `Loop.step`; here, what a step changes.
        plan = self.loop.step(stop_early)
        if running or waiting:
            assert plan.work
        if running:
            oldest = min(running, key=lambda s: (s.request.metrics.arrival, s.request.number, s.index))
            assert oldest not in plan.preempted
        for victim in plan.preempted:
            assert victim.status is Status.WAITING and victim.computed == 0
            assert len(victim.table) == 0 and victim.slot is None and victim.node is None
        if plan.short_of_pages:
            assert not plan.admitted

    @precondition(lambda self: any(request.live for request in self.loop.requests))
    @rule(pick=st.integers(0, 99), reason=st.sampled_from(["abort", "error"]))
    def abort(self, pick: int, reason: str) -> None:
        requests = [request for request in self.loop.requests if request.live]
        request = requests[pick % len(requests)]
        for sequence in request.live:
            self.scheduler.finish(sequence, reason)
            self.scheduler.finish(sequence, reason)  # harmless twice
        assert request.finished

    @precondition(lambda self: hasattr(self, "loop"))
    @rule()
    def change_weights(self) -> None:
        for sequence in list(self.scheduler.running):
            self.scheduler.restart(sequence)
        self.loop.kv.reset(None, keep_files=False)
        self.scheduler.renew([s for request in self.loop.requests for s in request.live])
        self.loop.pool = self.loop.kv.pools[0]
        assert self.loop.pool.num_free == self.loop.pool.num_pages - 1 and not self.loop.kv.tiers.ops
        self.loop.memory.clear()

    @invariant()
    def pages_have_owners(self) -> None:
        pool, owners = self.loop.pool, Counter[int]()
        for request in self.loop.requests:
            for sequence in request.sequences:
                owners.update(sequence.table.pages[0].tolist())
                if sequence.status is not Status.RUNNING:
                    assert len(sequence.table) == 0 and sequence.slot is None and sequence.node is None
        for node in self.loop.kv.tree.nodes():
            if node.pages is not None:
                owners.update(node.pages[0].tolist())
        assert all(pool.references(page) == owners[page] for page in range(pool.num_pages))
        used = [s.slot for s in self.scheduler.running if s.slot is not None]
        assert len(used) == len(self.scheduler.running)
        free = self.scheduler._slots
        assert sorted([*used, *free]) == list(range(self.scheduler.max_rows))
        if not self.loop.kv.prefix_cache:  # only requests that are not done keep anything
            live = {private_namespace(request.id) for request in self.loop.requests if request.live}
            assert {node.root.namespace for node in self.loop.kv.tree.nodes()} <= live

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.drain()
            self.loop.check_at_rest()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)


def pieces(works: list[Work], names: dict[Request, str]) -> list[tuple[str, int, int]]:
    return [(names[w.sequence.request], w.start, w.stop) for w in works]


def test_decodes_come_first_and_prefill_is_chunked_under_the_budget() -> None:
    loop = Loop(num_pages=40, page_size=4, max_rows=4, max_tokens=8, prefill_rows=4)
    a = loop.submit(prompt_len=3, max_tokens=9)
    loop.step()  # a's prompt: it decodes from now on
    b, c = loop.submit(prompt_len=12, max_tokens=3), loop.submit(prompt_len=5, max_tokens=3)
    names = {a: "a", b: "b", c: "c"}
    plan = loop.step()
    assert pieces(plan.decodes, names) == [("a", 3, 4)]
    assert pieces(plan.prefills, names) == [("b", 0, 7)]  # what the budget leaves
    assert not plan.prefills[0].samples and b.sequences[0].output_len == 0
    plan = loop.step()
    assert pieces(plan.decodes, names) == [("a", 4, 5)]
    assert pieces(plan.prefills, names) == [("b", 7, 12), ("c", 0, 2)]  # running ones before new ones
    assert plan.num_tokens == 8
    plan = loop.step()
    assert pieces(plan.decodes, names) == [("a", 5, 6), ("b", 12, 13)]
    assert pieces(plan.prefills, names) == [("c", 2, 5)]
    loop.drain()
    loop.check_at_rest()
    assert loop.scheduler.preemptions == 0


def test_prefill_rows_and_rows_are_limits() -> None:
    loop = Loop(num_pages=40, page_size=4, max_rows=3, max_tokens=16, prefill_rows=2)
    requests = [loop.submit(prompt_len=2, max_tokens=4) for _ in range(5)]
    names = dict(zip(requests, "abcde"))
    assert pieces(loop.step().prefills, names) == [("a", 0, 2), ("b", 0, 2)]
    assert pieces(loop.step().prefills, names) == [("c", 0, 2)]
    assert loop.step().prefills == []  # three rows run
    loop.drain()
    loop.check_at_rest()


def test_preemption_takes_the_newest_and_the_oldest_runs_on() -> None:
    # Eight pages of two tokens: enough for two of three sequences.
    loop = Loop(num_pages=1 + 8, page_size=2, max_rows=3, max_tokens=8, prefill_rows=3)
    a, b, c = (loop.submit(prompt_len=2, max_tokens=7) for _ in range(3))
    while not (plan := loop.step()).preempted:
        assert loop.scheduler.running
    assert [s.request for s in plan.preempted] == [c]
    assert loop.scheduler.running == [a.sequences[0], b.sequences[0]]
    victim = c.sequences[0]
    assert loop.scheduler.waiting == [victim] and victim.computed == 0
    assert victim.output_len > 0  # what it generated is kept, and computed again later
    known = list(victim.tokens)
    while victim.status is Status.WAITING:
        plan = loop.step()
    (work,) = plan.prefills
    assert work.sequence is victim and (work.start, work.stop) == (0, len(known))  # others needed its pages
    assert list(victim.tokens[: len(known)]) == known
    assert c.metrics.preemptions == loop.scheduler.preemptions == 1
    loop.drain()
    loop.check_at_rest()


def test_who_preempts_still_runs_and_its_page_copies_are_not_lost() -> None:
    # Three samples of `a` share a page. The first to write it copies it to the last free page, the second to
    # one that `b` has to give back.
    loop = Loop(num_pages=1 + 7, page_size=4, max_rows=4, max_tokens=8, prefill_rows=2)
    a, b = loop.submit(prompt_len=2, max_tokens=3, n=3), loop.submit(prompt_len=5, max_tokens=3)
    loop.step()
    held = loop.pool.allocate(loop.pool.num_free - 1)
    assert held is not None and len(loop.scheduler.running) == 4
    plan = loop.step()
    loop.pool.release(held)
    assert [s.request for s in plan.preempted] == [b]
    assert [w.sequence for w in plan.decodes] == a.sequences
    assert sum(isinstance(op, PageCopy) for op in plan.ops) == 2
    loop.drain()
    loop.check_at_rest()


def test_admission_waits_for_a_page_margin() -> None:
    loop = Loop(num_pages=1 + 4, page_size=4, max_rows=3, max_tokens=16, prefill_rows=3)
    a = loop.submit(prompt_len=5, max_tokens=3)  # two pages
    b = loop.submit(prompt_len=5, max_tokens=3)  # two pages are free, but a may want one of them
    loop.step()
    assert [s.request for s in loop.scheduler.running] == [a]
    while a.live:
        assert b.sequences[0].status is Status.WAITING
        loop.step()
    loop.step()
    assert b.sequences[0].status is Status.RUNNING and loop.scheduler.preemptions == 0
    # Nobody overtakes the head of the queue, however small.
    loop.submit(prompt_len=13, max_tokens=1)
    d = loop.submit(prompt_len=1, max_tokens=1)
    loop.step()
    assert d.sequences[0].status is Status.WAITING
    loop.drain()
    loop.check_at_rest()


def test_forks_share_the_prompt_and_keep_rows_for_themselves() -> None:
    loop = Loop(num_pages=40, page_size=4, max_rows=3, max_tokens=8, prefill_rows=2)
    a = loop.submit(prompt_len=10, max_tokens=4, n=3)
    b = loop.submit(prompt_len=2, max_tokens=4)
    loop.step()
    assert loop.scheduler.rows_used == 3 and b.sequences[0].status is Status.WAITING
    assert [s.status for s in a.sequences] == [Status.RUNNING, Status.FORKING, Status.FORKING]
    loop.step()
    assert loop.scheduler.running == a.sequences and [s.slot for s in a.sequences] == [0, 1, 2]
    assert loop.pool.num_used == 3  # one prompt
    plan = loop.step()
    assert len(plan.ops) == 2  # the last owner needs no copy
    assert loop.pool.num_used == 5
    loop.drain()
    loop.check_at_rest()


def test_abort_while_forks_wait() -> None:
    loop = Loop(num_pages=40, page_size=4, max_rows=3, max_tokens=4, prefill_rows=2)
    request = loop.submit(prompt_len=10, max_tokens=4, n=3)
    loop.step()
    for sequence in request.live:
        loop.scheduler.finish(sequence, "abort")
    loop.check_at_rest()
    assert not loop.step().work


def test_every_plan_fits_a_bucket() -> None:
    """Shapes of random plans are among those that warm-up compiles."""
    buckets = Buckets(max_rows=6, max_tokens=80, max_pages=12)
    shapes = set(buckets.shapes())
    loop = Loop(60, 4, 6, 80, buckets.max_prefill_rows)
    for length in (40, 3, 17, 1, 30, 9, 44, 2, 5, 40, 8):
        loop.submit(length, 1 + length % 4, n=1 + length % 3)
        plan = loop.step()
        pages = max(len(w.sequence.table) for w in plan.work)
        shape = buckets.shape(
            len(plan.decodes), sum(w.stop - w.start for w in plan.prefills), len(plan.prefills), pages
        )
        assert shape in shapes
        assert shape.logit_rows >= sum(w.samples for w in plan.work)
        assert dataclasses.astuple(shape) <= (6, 80, 6, 12, 6)
    loop.drain()
    loop.check_at_rest()
