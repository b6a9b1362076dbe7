"""Shortest job first, by what is known for certain."""

from specax.decoding.policies.base import DECODE_COST, RankedPolicy, arrival, prefill_work
from specax.decoding.policies.heap import Key
from specax.decoding.request import Sequence


class SJFPolicy(RankedPolicy):
    """The least remaining work first: prompt tokens that are not cached, and as many outputs as are allowed.

    `max_tokens` is an upper bound, so this serves callers who set it close to what they need. What is cached is
    asked when a sequence joins, and again when it is put back. The victim has the most work left.
    """

    name = "sjf"

    def rank(self, sequence: Sequence) -> Key:
        return (remaining(sequence, self.context.cached_tokens(sequence)), *arrival(sequence))

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=lambda s: (remaining(s, 0), *arrival(s)))


def remaining(sequence: Sequence, cached: int) -> int:
    """Upper bound of the work left, in units of one prefill token."""
    left = max(0, sequence.request.max_tokens - sequence.output_len)
    return prefill_work(sequence, cached) + DECODE_COST * left
