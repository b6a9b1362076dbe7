"""What every scheduling policy does: a queue with a bound on waiting, in which subclasses choose."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies.heap import Heap, Key
from specax.decoding.request import Sequence

# What a token costs, in units of one prefill token. A decode token takes a row of a step that reads all the
# weights for a few hundred tokens at most, where prefill fills the same step with thousands; hosted models are
# priced accordingly, output at about four times input. (Sheng et al., OSDI 2024, take 1 and 2.) Integers, so that
# sums of them are exact.
PREFILL_COST = 1
DECODE_COST = 4


@dataclasses.dataclass(frozen=True)
class PolicyContext:
    """What a policy may know of the engine around it. InvalidRequestError for a bound or weight that is not one."""

    clock: Callable[[], float]  # seconds, monotonic; virtual in the simulator
    age_bound: float = 60.0  # seconds: who waited longer goes first, whatever the policy says
    cached_tokens: Callable[[Sequence], int] = lambda sequence: 0  # longest cached prefix now; cheap to call again
    prefilling: Callable[[], Iterable[Sequence]] = lambda: ()  # running sequences that still compute their prompt
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)  # share per tenant; 1 if not named

    def __post_init__(self) -> None:
        if not self.age_bound >= 0:
            raise InvalidRequestError(f"age_bound must be at least 0 seconds, or infinite, not {self.age_bound}")
        for tenant, weight in self.weights.items():
            if not 0 < weight < math.inf:
                raise InvalidRequestError(f"weight of tenant {tenant!r} must be positive and finite, not {weight}")


class Policy(abc.ABC):
    """The queue of waiting sequences, and who is next; also who is preempted when pages run out.

    The scheduler pops candidates until one cannot be admitted, and adds those back that it could not admit:
    that leaves everything as if they had not been popped. `add`, `pop` and `remove` cost at most O(log n).
    """

    name: ClassVar[str]

    def __init__(self, context: PolicyContext):
        self.context = context
        self._arrivals: Heap[Sequence] = Heap()

    def __len__(self) -> int:
        return len(self._arrivals)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._arrivals

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences, in order of arrival."""
        return iter(self._arrivals)

    def add(self, sequence: Sequence) -> None:
        """Joins the queue: new, preempted, or put back by the scheduler. ValueError if it waits already."""
        if sequence in self._arrivals:
            raise ValueError(f"request {sequence.request.id!r}, sample {sequence.index}, waits already")
        self._arrivals.put(sequence, arrival(sequence))
        self._joined(sequence)

    def pop(self) -> Sequence | None:
        """Takes out the one to admit next; None if nobody waits, or all are held back."""
        if not self._arrivals:
            return None
        oldest = self._arrivals.first()
        sequence = oldest if self.is_aged(oldest) else self._next()
        if sequence is not None:
            self._arrivals.remove(sequence)
            self._left(sequence)
        return sequence

    def is_aged(self, sequence: Sequence) -> bool:
        """Whether it has waited for as long as anybody should."""
        return self.context.clock() - sequence.request.metrics.arrival >= self.context.age_bound

    def remove(self, sequence: Sequence) -> None:
        """Takes out one that was aborted while it waited; ValueError if it does not wait."""
        if sequence not in self._arrivals:
            raise ValueError(f"request {sequence.request.id!r}, sample {sequence.index}, does not wait")
        self._arrivals.remove(sequence)
        self._left(sequence)

    @abc.abstractmethod
    def victim(self, running: list[Sequence]) -> Sequence:
        """Whom to preempt among these, of which there is at least one."""

    # Four hooks that a policy may leave empty.

    def served(self, prefilled: Iterable[tuple[Sequence, int]], decoded: Iterable[Sequence]) -> None:  # noqa: B027
        """After each step: who computed how many prompt tokens, and who decoded one token each."""

    def finished(self, sequence: Sequence, reason: str) -> None:  # noqa: B027
        """Called once for each sequence that ended, with its finish_reason."""

    def _joined(self, sequence: Sequence) -> None:  # noqa: B027
        """It is in the queue now."""

    def _left(self, sequence: Sequence) -> None:  # noqa: B027
        """It is not in the queue any more, popped or removed."""

    @abc.abstractmethod
    def _next(self) -> Sequence | None:
        """The one that the policy would admit, left where it is; None: all are held back. Somebody waits."""


class RankedPolicy(Policy):
    """Admits the smallest rank first. Ranks are taken when a sequence joins; they must not be equal."""

    def __init__(self, context: PolicyContext):
        super().__init__(context)
        self._ranks: Heap[Sequence] = Heap()

    @abc.abstractmethod
    def rank(self, sequence: Sequence) -> Key:
        """Sort key of a waiting sequence; ends with its arrival, which nobody shares."""

    def _next(self) -> Sequence | None:
        return self._ranks.first()

    def _joined(self, sequence: Sequence) -> None:
        self._ranks.put(sequence, self.rank(sequence))

    def _left(self, sequence: Sequence) -> None:
        self._ranks.remove(sequence)


def arrival(sequence: Sequence) -> tuple[float, int, int]:
    """Sort key: when it was submitted (preemption does not change that); no two sequences share one."""
    request = sequence.request
    return request.metrics.arrival, request.number, sequence.index


def prefill_work(sequence: Sequence, cached: int) -> int:
    """Cost of the known tokens that are neither computed nor in the cache (`cached` tokens from the start)."""
    return PREFILL_COST * max(0, sequence.pending - cached)
