"""Scheduling policies: each beside a brute-force one, the fairness bound, what a step costs."""

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies import POLICIES, Policy, PolicyContext, lpm, make_policy
from specax.decoding.policies.base import DECODE_COST, PREFILL_COST
from specax.decoding.policies.fair import KEEP, FairPolicy
from specax.decoding.policies.heap import SLACK, Heap
from specax.decoding.policies.predicted import PredictedPolicy
from specax.decoding.request import Sequence
from tests.decoding.policy_sequences import TABLE, context, drain, sequence


def when(s: Sequence) -> tuple[float, int, int]:
    return s.request.metrics.arrival, s.request.number, s.index


def age(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=when)


class Machine(RuleBasedStateMachine):
    """Plays the scheduler and the engine around a policy; `choose` and `worst` say naively what it should do."""

    name = "fcfs"
    bound = 20.0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.cached: dict[int, int] = {}
        weights = {"a": 2.0, "b": 0.5}  # powers of two: sums in any order are equal
        self.policy = make_policy(
            self.name, PolicyContext(lambda: self.now, self.bound, self.hit, self.prefilling, weights)
        )

    def hit(self, s: Sequence) -> int:
        return self.cached[s.request.number]

    def prefilling(self) -> list[Sequence]:
        return [s for s in self.running if s.computed < len(s.request.prompt)]

    def choose(self) -> Sequence | None:
        return age(self.waiting)[0]

    def worst(self) -> Sequence:
        return age(self.running)[-1]

    # What a reference with a memory is told.
    def arrived(self, s: Sequence) -> None: ...
    def popped(self, s: Sequence) -> None: ...
    def left(self, s: Sequence) -> None: ...
    def worked(self, s: Sequence, prefill: int) -> None: ...
    def ended(self, s: Sequence) -> None: ...

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 6),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from([None, "a", "b", "c"]),
        promise=st.sampled_from([None, 0.5, 1.0, 5.0]),
        cached=st.integers(0, 7),
        wait=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        tenant: str | None,
        promise: float | None,
        cached: int,
        wait: float,
    ) -> None:
        self.now += wait
        s = sequence(self.now, prompt, max_tokens, priority, tenant, promise)
        self.cached[s.request.number] = min(cached, len(prompt) - 1)
        self.arrived(s)
        self.waiting.append(s)
        self.policy.add(s)
        with pytest.raises(ValueError, match="waits already"):
            self.policy.add(s)

    @rule(by=st.sampled_from([1.0, 10.0]))
    def tick(self, by: float) -> None:
        self.now += by

    @precondition(lambda self: self.waiting)
    @rule(count=st.integers(1, 4), back=st.integers(0, 4))
    def admit(self, count: int, back: int) -> None:
        """Pops `count`; the last `back` of them cannot be admitted, and leave no trace."""
        admitted: list[Sequence] = []
        rejected: list[Sequence] = []
        for at in range(count):
            expected = None
            if self.waiting:
                oldest = age(self.waiting)[0]
                overdue = self.now - oldest.request.metrics.arrival >= self.bound
                expected = oldest if overdue else self.choose()
            s = self.policy.pop()
            assert s is expected
            if s is None:
                break
            if at < count - back:
                self.waiting.remove(s)
                self.running.append(s)
                self.popped(s)
                admitted.append(s)
            else:
                rejected.append(s)
                break
        for s in rejected:
            self.policy.add(s)

    @precondition(lambda self: len(self.waiting) > 1)
    @rule(count=st.integers(2, 5), reverse=st.booleans())
    def put_all_back(self, count: int, reverse: bool) -> None:
        """Several pops in a row, all undone, in either order."""
        popped = [s for _ in range(count) if (s := self.policy.pop()) is not None]
        for s in reversed(popped) if reverse else popped:
            self.policy.add(s)

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        s = self.waiting.pop(pick % len(self.waiting))
        self.left(s)
        self.policy.remove(s)
        with pytest.raises(ValueError, match="does not wait"):
            self.policy.remove(s)

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        s = self.policy.victim(list(self.running))
        assert s is self.worst()
        self.running.remove(s)
        s.computed = 0
        s.request.metrics.preemptions += 1
        self.ended(s)  # (what it was charged and did not compute is given back)
        self.waiting.append(s)
        self.policy.add(s)

    @precondition(lambda self: self.running)
    @rule(chunk=st.integers(1, 6), stop=st.booleans())
    def step(self, chunk: int, stop: bool) -> None:
        """Everybody computes; whoever reaches max_tokens ends, and the first one perhaps sooner."""
        prefilled, decoded = [], []
        for s in self.running:
            if s.pending > 1 or s.output_len == 0:
                count = min(chunk, s.pending)
                prefilled.append((s, count))
                self.worked(s, count)
            else:
                count = 1
                decoded.append(s)
                self.worked(s, 0)
            s.computed += count
            if not s.pending:
                s.tokens.append(7)
        self.policy.served(prefilled, decoded)
        for s in list(self.running):
            if s.output_len >= s.request.max_tokens or (stop and s is self.running[0]):
                self.running.remove(s)
                self.ended(s)
                self.policy.finished(s, "length")

    @precondition(lambda self: any(s.output_len > 0 for s in self.running))
    @rule()
    def fork(self) -> None:
        """A further sample of a running request; it was never in the queue. It decodes at once."""
        s = next(s for s in self.running if s.output_len > 0)
        child = Sequence(s.request, len(s.request.sequences), TABLE, seed=1)
        s.request.sequences.append(child)
        child.tokens, child.computed = s.tokens[:], s.computed
        self.running.append(child)
        self.worked(child, 0)
        self.policy.served([], [child])

    @invariant()
    def holds_those_who_wait(self) -> None:
        assert len(self.policy) == len(self.waiting)
        assert list(self.policy) == age(self.waiting)
        assert all(s in self.policy for s in self.waiting) and not any(s in self.policy for s in self.running)


class PriorityMachine(Machine):
    name = "priority"

    def order(self, sequences: list[Sequence]) -> list[Sequence]:
        """Stable sorts, the least important key first. The slack is taken now."""
        ordered = age(sequences)
        slack = {
            s: math.inf if (target := s.request.ttft_target) is None else s.request.metrics.arrival + target - self.now
            for s in ordered
        }
        return sorted(sorted(ordered, key=slack.__getitem__), key=lambda s: s.request.priority, reverse=True)

    def choose(self) -> Sequence | None:
        return self.order(self.waiting)[0]

    def worst(self) -> Sequence:
        return self.order(self.running)[-1]


class SJFMachine(Machine):
    name = "sjf"

    def left_to_do(self, s: Sequence) -> float:
        cached = self.hit(s) if s in self.waiting else s.computed
        uncomputed = len(s.tokens) - cached
        return PREFILL_COST * uncomputed + DECODE_COST * (self.outputs(s) - (len(s.tokens) - len(s.request.prompt)))

    def outputs(self, s: Sequence) -> float:
        return s.request.max_tokens

    def choose(self) -> Sequence | None:
        return sorted(age(self.waiting), key=self.left_to_do)[0]

    def worst(self) -> Sequence:
        return sorted(age(self.running), key=self.left_to_do)[-1]


class PredictedMachine(SJFMachine):
    """Ranks by a predictor that knows (half of what is allowed); trust comes and goes."""

    name = "predicted"

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self.policy, PredictedPolicy)
        self.predictor = mock.Mock(trusted=False, predict=lambda request: request.max_tokens / 2)
        self.policy.predictor = self.predictor

    def outputs(self, s: Sequence) -> float:
        half = s.request.max_tokens / 2
        return half if s.output_len < half else min(2 * s.output_len, s.request.max_tokens)

    def choose(self) -> Sequence | None:
        return super().choose() if self.predictor.trusted else age(self.waiting)[0]

    def worst(self) -> Sequence:
        return super().worst() if self.predictor.trusted else age(self.running)[-1]

    @rule()
    def flip(self) -> None:
        self.predictor.trusted = not self.predictor.trusted


class LPMMachine(Machine):
    name = "lpm"

    def __init__(self) -> None:
        super().__init__()
        self.patches = [mock.patch.object(lpm, "WINDOW", 4), mock.patch.object(lpm, "HOLD_BACK", 2)]
        for patch in self.patches:
            patch.start()

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    def choose(self) -> Sequence | None:
        def held_back(s: Sequence) -> bool:
            for other in self.prefilling():
                pairs = zip(s.request.prompt, other.request.prompt, strict=False)
                if len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))) >= self.hit(s) + 2:
                    return True
            return False

        free = [s for s in age(self.waiting)[:4] if not held_back(s)]
        return max(free, key=self.hit, default=None)

    def worst(self) -> Sequence:
        return min(reversed(age(self.running)), key=lambda s: len(s.output))


class FairMachine(Machine):
    """The paper's algorithm 2, with minima over all tenants taken anew each time."""

    name = "fair"

    def __init__(self) -> None:
        super().__init__()
        self.counters: dict[str | None, float] = defaultdict(float)
        self.charged: dict[Sequence, int] = defaultdict(int)
        self.last: str | None = "nobody"

    def charge(self, s: Sequence, work: int) -> None:
        self.counters[s.request.tenant] += work / {"a": 2.0, "b": 0.5}.get(s.request.tenant or "", 1.0)

    def arrived(self, s: Sequence) -> None:
        tenant, tenants = s.request.tenant, {other.request.tenant for other in self.waiting}
        if tenant not in tenants:
            floor = min((self.counters[t] for t in tenants), default=self.counters[self.last])
            self.counters[tenant] = max(self.counters[tenant], floor)

    def left(self, s: Sequence) -> None:
        if all(other.request.tenant != s.request.tenant for other in self.waiting):
            self.last = s.request.tenant

    def popped(self, s: Sequence) -> None:
        self.left(s)
        self.charged[s] = max(0, len(s.tokens) - self.hit(s)) * PREFILL_COST
        self.charge(s, self.charged[s])

    def worked(self, s: Sequence, prefill: int) -> None:
        paid = min(self.charged[s], prefill * PREFILL_COST)
        self.charged[s] -= paid
        if prefill:
            self.charge(s, prefill * PREFILL_COST - paid)
        else:
            self.ended(s)
            self.charge(s, DECODE_COST)

    def ended(self, s: Sequence) -> None:
        self.charge(s, -self.charged.pop(s, 0))

    def choose(self) -> Sequence | None:
        return min(age(self.waiting), key=lambda s: self.counters[s.request.tenant])

    def worst(self) -> Sequence:
        return max(reversed(age(self.running)), key=lambda s: self.counters[s.request.tenant])

    @invariant()
    def counts(self) -> None:
        assert isinstance(self.policy, FairPolicy)
        assert all(self.policy.counter(t) == counter for t, counter in self.counters.items() if t != "nobody")


FEW = settings(max_examples=20, stateful_step_count=40, deadline=None)
for machine in (Machine, PriorityMachine, SJFMachine, PredictedMachine, LPMMachine, FairMachine):
    case = machine.TestCase
    case.settings = FEW
    globals()[f"Test{machine.__name__}"] = case
del case, machine


def test_unknown_names_and_bad_settings():
    with pytest.raises(InvalidRequestError, match="unknown scheduling policy 'lifo'; there are fcfs, priority, sjf"):
        make_policy("lifo", context())
    with pytest.raises(InvalidRequestError, match="age_bound must be at least 0 seconds, or infinite, not nan"):
        context(age_bound=math.nan)
    with pytest.raises(InvalidRequestError, match="weight of tenant 'a' must be positive and finite, not 0"):
        context(weights={"a": 0})


@pytest.mark.parametrize("name", POLICIES)
def test_who_waited_longest_goes_first_after_the_bound(name: str):
    now = 0.0
    policy = make_policy(name, PolicyContext(lambda: now, age_bound=10.0, cached_tokens=lambda s: s.request.priority))
    if isinstance(policy, PredictedPolicy):
        policy.predictor = mock.Mock(trusted=True, predict=lambda request: request.max_tokens)
    old = sequence(0.0, range(100), max_tokens=100, tenant="greedy")
    policy.add(old)
    for at in range(1, 4):
        policy.add(sequence(at, max_tokens=1, tenant="modest", priority=1))
    policy.served([(sequence(tenant="greedy"), 1000)], [])  # (to `fair`, it has had more than the others)
    now = 9.0
    assert (policy.pop() is old) == (name == "fcfs")
    now = 10.0
    if name != "fcfs":
        assert policy.pop() is old
        policy.add(old)
        assert policy.pop() is old


def test_heap_stays_small_when_its_items_come_and_go():
    heap: Heap[int] = Heap()
    for item in range(1000):
        heap.put(item, (item,))
    for turn in range(20_000):
        first = heap.first()
        heap.remove(first)
        heap.put(first, (first,))  # as a candidate that is put back in each step
        heap.put(turn % 1000, (turn % 1000,))
        assert len(heap._entries) <= 2 * len(heap) + SLACK
    assert list(heap) == list(range(1000))


# Fairness.


def serve(policy: Policy, refill: Callable[[int], None], steps: int, memory: int) -> list[dict[str | None, float]]:
    """An engine in which prompts take one step, and running sequences fit `memory` tokens whole.

    Returns after each step the cost of the tokens that each tenant was served so far.
    """
    running: list[Sequence] = []
    total: dict[str | None, float] = defaultdict(float)
    history = []
    for step in range(steps):
        refill(step)
        prefilled = []
        decoded = list(running)
        while (s := policy.pop()) is not None:
            used = sum(len(r.request.prompt) + r.request.max_tokens for r in running)
            if used + len(s.request.prompt) + s.request.max_tokens > memory:
                policy.add(s)
                break
            running.append(s)
            prefilled.append((s, len(s.tokens)))
            total[s.request.tenant] += PREFILL_COST * len(s.tokens)
        for s in decoded:
            total[s.request.tenant] += DECODE_COST
        for s in running:
            s.computed = len(s.tokens)
            s.tokens.append(0)
        policy.served(prefilled, decoded)
        for s in [s for s in running if s.output_len >= s.request.max_tokens]:
            running.remove(s)
            policy.finished(s, "length")
        history.append(dict(total))
    return history


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 2.0, "c": 0.5}])
def test_backlogged_tenants_get_their_weighted_shares(weights: dict[str | None, float], rng: np.random.Generator):
    policy = make_policy("fair", context(weights=weights))
    longest, memory = 40, 200
    shapes = {"a": (40, 4), "b": (5, 30), "c": (20, 20)}  # prompt and output lengths at most

    def refill(step: int) -> None:
        for tenant, (prompt, output) in shapes.items():
            for _ in range(5 - sum(s.request.tenant == tenant for s in policy)):
                tokens = range(rng.integers(1, prompt + 1))
                policy.add(sequence(step, tokens, int(rng.integers(1, output + 1)), tenant=tenant))

    history = serve(policy, refill, 1500, memory)
    bound = 2 * max(PREFILL_COST * longest, DECODE_COST * memory) / min([1.0, *weights.values()])
    for one, other in itertools.combinations(shapes, 2):
        gaps = [h.get(one, 0) / weights.get(one, 1.0) - h.get(other, 0) / weights.get(other, 1.0) for h in history]
        assert max(gaps) - min(gaps) <= bound  # over every interval
    assert min(history[-1].values()) > 2 * bound  # which is not a little


@pytest.mark.parametrize("name", ["fair", "fcfs"])
def test_a_greedy_tenant_takes_no_more_than_its_share(name: str):
    policy = make_policy(name, context())

    def refill(step: int) -> None:
        for _ in range(10):
            policy.add(sequence(step, range(10), 10, tenant="greedy"))
        policy.add(sequence(step, range(10), 10, tenant="modest"))

    last = serve(policy, refill, 400, memory=200)[-1]
    share = last["greedy"] / (last["greedy"] + last["modest"])
    assert (0.45 < share < 0.55) if name == "fair" else share > 0.85


def test_idle_time_earns_nothing():
    policy = make_policy("fair", context())

    def refill(step: int) -> None:
        policy.add(sequence(step, range(10), 10, tenant="busy"))
        if step >= 300:
            policy.add(sequence(step, range(10), 10, tenant="late"))

    history = serve(policy, refill, 500, memory=60)
    busy, late = (history[-1][t] - history[299].get(t, 0) for t in ("busy", "late"))
    assert history[299]["busy"] > 4000 and abs(busy - late) <= 2 * DECODE_COST * 60


def test_many_tenants():
    policy = FairPolicy(context())
    waiting = [sequence(at, tenant=f"t{at}") for at in range(10_000)]
    for s in waiting:
        policy.add(s)
    assert drain(policy) == waiting
    for s in waiting:
        policy.finished(s, "length")
    policy = FairPolicy(context())
    for at in range(5 * KEEP):  # one after the other, never to be seen again
        s = sequence(at, range(at % 7), tenant=f"t{at}")
        policy.add(s)
        assert policy.pop() is s
        policy.served([(s, len(s.tokens))], [])
        policy.finished(s, "length")
    assert len(policy._accounts) <= 2 * KEEP


# Cost.


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_costs_the_same_however_many_wait(name: str, rng: np.random.Generator):
    def cost(waiting: int) -> float:
        """Seconds for one step: a few arrive, a few are admitted, one is put back, one is aborted."""
        policy = make_policy(name, context())
        if isinstance(policy, PredictedPolicy):
            policy.predictor.trusted = True
        draws = rng.integers(1, 10_000, (waiting + 2000, 2)).tolist()
        fresh = [sequence(at, [a] * (b % 20 + 1), a, tenant=f"t{b}") for at, (a, b) in enumerate(draws)]
        for s in fresh[:waiting]:
            policy.add(s)
        times = []
        for step in range(400):
            start = time.perf_counter()
            for s in fresh[waiting + 5 * step : waiting + 5 * step + 5]:
                policy.add(s)
            popped = [policy.pop() for _ in range(4)]
            candidate = policy.pop()
            assert candidate is not None
            policy.add(candidate)
            policy.served([(s, 5) for s in popped if s], [])
            if (aborted := fresh[waiting + 5 * step + 4]) in policy:
                policy.remove(aborted)
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    few, many = cost(1_000), cost(100_000)
    assert many < 5 * few + 1e-4, f"{few * 1e6:.0f} µs with 1,000 waiting, {many * 1e6:.0f} µs with 100,000"
