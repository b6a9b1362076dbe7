"""The scheduler alone: a state machine that plays the engine's part, and plain examples."""

import dataclasses
import itertools
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specax.decoding.buckets import Buckets
from specax.decoding.request import Request, Sequence, Status
from specax.decoding.sampling_params import SamplingParams
from specax.decoding.scheduler import Plan, Scheduler, Work, forking
from specax.paged import PagePool, PageTable


class Loop:
    """What the engine does around a scheduler, without a device: `memory` maps each slot to its token.

    A sampled token is a new number every time, so a slot that was lost, shared or overwritten shows.
    """

    def __init__(self, num_pages: int, page_size: int, max_rows: int, max_tokens: int, prefill_rows: int):
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(self.pool, page_size, max_rows, max_tokens, prefill_rows)
        self.requests: list[Request] = []
        self.memory: dict[int, int] = {}
        self.names = itertools.count()

    def submit(self, prompt_len: int, max_tokens: int, n: int = 1) -> Request:
        """A request that fits the pool when it is alone."""
        params = SamplingParams(n=n, max_tokens=max_tokens)
        prompt = [next(self.names) for _ in range(prompt_len)]
        request = Request(f"r{len(self.requests)}", prompt, params, max_tokens, frozenset(), (), ())
        for index in range(n):
            table = PageTable(self.pool, self.scheduler.page_size)
            request.sequences.append(Sequence(request, index, table, seed=index))
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self, stop_early: frozenset[int] = frozenset()) -> Plan:
        """One iteration; the sampled sequences at the places `stop_early` end there."""
        plan = self.scheduler.schedule()
        self.check(plan)
        self.run(plan)
        sampled: list[Sequence] = []
        for work in plan.work:
            work.sequence.computed = work.stop
            if work.samples:
                children = self.scheduler.fork(work.sequence) if forking(work.sequence) else []
                sampled += [work.sequence, *children]
        for at, sequence in enumerate(sampled):
            sequence.tokens.append(next(self.names))
            if at in stop_early or sequence.output_len >= sequence.request.max_tokens:
                self.scheduler.finish(sequence)
        return plan

    def run(self, plan: Plan) -> None:
        """As on the device: page copies in order, then all writes, then every whole context must read back."""
        size = self.scheduler.page_size
        for source, target in (copy for work in plan.work for copy in work.copies):
            for offset in range(size):
                if source * size + offset in self.memory:
                    self.memory[target * size + offset] = self.memory[source * size + offset]
        for work in plan.work:
            for position in range(work.start, work.stop):
                self.memory[work.sequence.table.slot(position)] = work.sequence.tokens[position]
        for work in plan.work:
            context = [self.memory[slot] for slot in work.sequence.table.slots(0, work.stop).tolist()]
            assert context == work.sequence.tokens[: work.stop]

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
            assert len(sequence.table) * s.page_size >= work.stop
            for slot in sequence.table.slots(work.start, work.stop).tolist():
                written[slot] += 1
                assert slot >= s.page_size  # not in the trash page
                assert self.pool.references(slot // s.page_size) == 1
        assert all(count == 1 for count in written.values())
        assert all(w.stop - w.start == 1 and w.samples for w in plan.decodes)

    def drain(self) -> None:
        """Runs until nothing is left; the first running sequence always advances, so steps are bounded."""
        live = [s for request in self.requests for s in request.live]
        bound = sum(len(s.request.prompt) + s.request.max_tokens for s in live)
        for _ in range(bound + 1):
            if not any(request.live for request in self.requests):
                break
            assert self.step().work
        assert not any(request.live for request in self.requests), f"not done after {bound} steps"

    def check_at_rest(self) -> None:
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.pool.num_free == self.pool.num_pages - 1
        assert all(self.pool.references(page) == 0 for page in range(self.pool.num_pages))
        assert sorted(self.scheduler._slots) == list(range(self.scheduler.max_rows))


class Scheduling(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(2, 10), page_size=st.integers(1, 4), max_rows=st.integers(1, 4),
        more_tokens=st.integers(0, 12), prefill_rows=st.integers(1, 3),
    )  # fmt: skip
    def start(self, pages: int, page_size: int, max_rows: int, more_tokens: int, prefill_rows: int) -> None:
        rows = min(prefill_rows, max_rows)
        self.loop = Loop(1 + pages, page_size, max_rows, max_rows + more_tokens, rows)
        self.scheduler = self.loop.scheduler

    @rule(prompt=st.integers(1, 20), output=st.integers(1, 12), n=st.integers(1, 4))
    def submit(self, prompt: int, output: int, n: int) -> None:
        room = (self.loop.pool.num_pages - 1) * self.scheduler.page_size
        prompt = min(prompt, room)
        self.loop.submit(prompt, min(output, room - prompt + 1), min(n, self.scheduler.max_rows))

    @precondition(lambda self: any(request.live for request in self.loop.requests))
    @rule(stop_early=st.frozensets(st.integers(0, 9), max_size=1), times=st.integers(1, 4))
    def step(self, stop_early: frozenset[int], times: int) -> None:
        for _ in range(times):
            self.one_step(stop_early)

    def one_step(self, stop_early: frozenset[int]) -> None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        computed = {id(s): s.computed for s in running}
        # What the scheduler plans is looked at inside `Loop.step`; here, what a step changes.
        plan = self.loop.step(stop_early)
        if running or waiting:
            assert plan.work
        if running:
            assert running[0].computed > computed[id(running[0])]  # the oldest always advances
        victims = plan.preempted
        assert victims == running[::-1][: len(victims)]  # newest first
        for victim in victims:
            assert victim.status is Status.WAITING and victim.computed == 0
            assert len(victim.table) == 0 and victim.slot is None
        if victims:
            assert list(scheduler.waiting) == victims[::-1] + waiting  # ahead of newcomers; none was admitted
        else:
            assert list(scheduler.waiting) == waiting[len(waiting) - len(scheduler.waiting) :]

    @precondition(lambda self: any(request.live for request in self.loop.requests))
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        requests = [request for request in self.loop.requests if request.live]
        request = requests[pick % len(requests)]
        for sequence in request.live:
            self.scheduler.finish(sequence)
            self.scheduler.finish(sequence)  # harmless twice
        assert request.finished

    @invariant()
    def pages_have_owners(self) -> None:
        pool, owners = self.loop.pool, Counter[int]()
        for request in self.loop.requests:
            for sequence in request.sequences:
                owners.update(sequence.table.pages.tolist())
                if sequence.status is not Status.RUNNING:
                    assert len(sequence.table) == 0 and sequence.slot is None
        assert all(pool.references(page) == owners[page] for page in range(pool.num_pages))
        used = [s.slot for s in self.scheduler.running if s.slot is not None]
        assert len(used) == len(self.scheduler.running)
        free = self.scheduler._slots
        assert sorted([*used, *free]) == list(range(self.scheduler.max_rows))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.drain()
            self.loop.check_at_rest()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


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
    assert list(loop.scheduler.waiting) == [victim] and victim.computed == 0
    assert victim.output_len > 0  # what it generated is kept, and computed again later
    known = list(victim.tokens)
    while victim.status is Status.WAITING:
        plan = loop.step()
    (work,) = plan.prefills
    assert work.sequence is victim and (work.start, work.stop) == (0, len(known))
    assert victim.tokens[: len(known)] == known
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
    assert [len(w.copies) for w in plan.decodes] == [1, 1, 0]
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
    assert [len(w.copies) for w in plan.decodes] == [1, 1, 0]  # the last owner needs no copy
    assert loop.pool.num_used == 5
    loop.drain()
    loop.check_at_rest()


def test_abort_while_forks_wait() -> None:
    loop = Loop(num_pages=40, page_size=4, max_rows=3, max_tokens=4, prefill_rows=2)
    request = loop.submit(prompt_len=10, max_tokens=4, n=3)
    loop.step()
    for sequence in request.live:
        loop.scheduler.finish(sequence)
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
