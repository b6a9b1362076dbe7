"""HostTier beside a dictionary; promises are kept once, late, and one at a time."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specax.paged.host_tier import HostTier


class HostMemory(RuleBasedStateMachine):
    """A tier beside slot → content (None: allocated and empty), with a count of the calls of each promise."""

    @initialize(capacity=st.integers(0, 6))
    def start(self, capacity: int) -> None:
        self.tier: HostTier[int] = HostTier(capacity)
        self.capacity = capacity
        self.model: dict[int, int | None] = {}
        self.calls: list[int] = []
        self.read: set[int] = set()

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        slots = self.tier.allocate(count)
        if count > self.capacity - len(self.model):
            assert slots is None
            return
        assert slots is not None and len(set(slots)) == count
        assert all(1 <= slot <= self.capacity and slot not in self.model for slot in slots)
        self.model.update(dict.fromkeys(slots))

    def pick(self, number: int) -> int:
        return sorted(self.model)[number % len(self.model)]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), late=st.booleans())
    def put(self, number: int, late: bool) -> None:
        slot, value = self.pick(number), len(self.calls)
        self.calls.append(0)

        def promise() -> int:
            self.calls[value] += 1
            return value

        self.tier.put(slot, promise if late else value)
        self.model[slot] = value
        if not late:
            self.calls[value] = 1

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def get(self, number: int) -> None:
        slot = self.pick(number)
        value = self.model[slot]
        if value is None:
            with pytest.raises(ValueError, match=f"slot {slot} is empty"):
                self.tier.get(slot)
            return
        unresolved = self.calls.count(0)
        assert self.tier.get(slot) == self.tier.get(slot) == value
        assert self.calls[value] == 1 and unresolved - self.calls.count(0) <= 1  # no other promise was called

    @precondition(lambda self: self.model)
    @rule(numbers=st.lists(st.integers(0, 99), max_size=3))
    def release(self, numbers: list[int]) -> None:
        slots = list({self.pick(number) for number in numbers})
        self.tier.release(slots)
        for slot in slots:
            del self.model[slot]
            with pytest.raises(ValueError, match=f"slot {slot} is free"):
                self.tier.release([slot])
            with pytest.raises(ValueError, match=f"slot {slot} is free"):
                self.tier.get(slot)
            with pytest.raises(ValueError, match=f"slot {slot} is free"):
                self.tier.put(slot, 0)

    @invariant()
    def counts(self) -> None:
        assert self.tier.num_used == len(self.model)
        assert self.tier.num_free == self.capacity - len(self.model)


TestHostMemory = HostMemory.TestCase
TestHostMemory.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)


def test_a_handle_outlives_its_slot_and_the_copy_is_waited_for_on_another_thread() -> None:
    tier: HostTier[tuple[np.ndarray, ...]] = HostTier(1)
    (slot,) = tier.allocate(1) or []
    arrived = threading.Event()

    def copy() -> tuple[np.ndarray, ...]:
        assert arrived.wait(10)
        return (np.arange(3),)

    tier.put(slot, copy)
    handle = tier.handle(slot)  # does not wait
    tier.release([slot])
    assert tier.allocate(1) == [slot]
    with pytest.raises(ValueError, match="empty"):
        tier.get(slot)
    tier.put(slot, (np.zeros(1),))
    results: list[tuple[np.ndarray, ...]] = []
    thread = threading.Thread(target=lambda: results.append(handle()))
    thread.start()
    arrived.set()
    thread.join(10)
    np.testing.assert_array_equal(results[0][0], [0, 1, 2])
    assert handle() is results[0]


def test_a_promise_that_fails_may_be_tried_again() -> None:
    tier: HostTier[int] = HostTier(1)
    (slot,) = tier.allocate(1) or []
    answers: Iterator[int | Exception] = iter([RuntimeError("device lost"), 5])

    def promise() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    tier.put(slot, promise)
    with pytest.raises(RuntimeError, match="device lost"):
        tier.get(slot)
    assert tier.get(slot) == tier.get(slot) == 5


def test_wrong_use_is_an_error() -> None:
    with pytest.raises(ValueError, match="capacity is -1"):
        HostTier(-1)
    tier: HostTier[int] = HostTier(2)
    with pytest.raises(ValueError, match="-1 slots"):
        tier.allocate(-1)
    for slot in (0, 3, -1):
        with pytest.raises(ValueError, match=f"no host slot {slot}: they are 1 … 2"):
            tier.release([slot])
