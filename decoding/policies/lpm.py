"""Longest cached prefix first, so that what is in the cache is used before it is evicted.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, section 3;
the hold-back follows SGLang's in-batch prefix caching (`schedule_policy.py`).
"""

import bisect

import numpy as np

from specax.decoding.policies.base import Policy, PolicyContext, arrival
from specax.decoding.policies.heap import Heap
from specax.decoding.request import Sequence

WINDOW = 64  # the oldest so many are ranked. (SGLang ranks all, and none once more than 128 wait.)
HOLD_BACK = 32  # tokens that waiting for a running prefill must save; as in SGLang


class LPMPolicy(Policy):
    """The longest cached prefix among the oldest 64; beyond them, first come, first served.

    Whose prompt shares a prefix with one that is being computed now, at least 32 tokens longer than what is cached
    for it, is held back: once that is computed it is a hit. Nobody is held back past the age bound. (With prefix
    caching off, `context.prefilling` must yield nobody, as nothing would ever become a hit.)

    The victim has the fewest output tokens, as in SGLang's retraction: the least is computed again.
    """

    name = "lpm"

    def __init__(self, context: PolicyContext):
        super().__init__(context)
        self._window: list[Sequence] = []  # the oldest, in order of arrival; full if anybody is in the rest
        self._rest: Heap[Sequence] = Heap()

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=lambda s: (-s.output_len, *arrival(s)))

    def _next(self) -> Sequence | None:
        cached = {s: self.context.cached_tokens(s) for s in self._window}
        prefilling = list(self.context.prefilling())
        for sequence in sorted(self._window, key=lambda s: -cached[s]):  # stable: ties in order of arrival
            scored = sequence.request.prompt_logprobs is not None  # computes its whole prompt
            if scored or not any(shares(sequence, other, cached[sequence] + HOLD_BACK) for other in prefilling):
                return sequence
        return None

    def _joined(self, sequence: Sequence) -> None:
        if len(self._window) < WINDOW or arrival(sequence) < arrival(self._window[-1]):
            bisect.insort(self._window, sequence, key=arrival)
            if len(self._window) > WINDOW:
                newest = self._window.pop()
                self._rest.put(newest, arrival(newest))
        else:
            self._rest.put(sequence, arrival(sequence))

    def _left(self, sequence: Sequence) -> None:
        if sequence in self._rest:
            self._rest.remove(sequence)
            return
        self._window.remove(sequence)
        if self._rest:
            oldest = self._rest.first()
            self._rest.remove(oldest)
            self._window.append(oldest)


def shares(one: Sequence, other: Sequence, length: int) -> bool:
    """Whether two prompts share at least the first `length` > 0 tokens, and may share their KV."""
    a, b = one.request.prompt, other.request.prompt
    if one.request.namespace != other.request.namespace or min(len(a), len(b)) < length:
        return False
    if a[0] != b[0] or a[length - 1] != b[length - 1]:
        return False  # almost always, and much cheaper than a call into NumPy
    return bool(np.array_equal(one.request.prompt_array[:length], other.request.prompt_array[:length]))
