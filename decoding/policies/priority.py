"""Classes of service, and promised times to the first token within a class."""

import math

from specax.decoding.policies.base import RankedPolicy, arrival
from specax.decoding.policies.heap import Key
from specax.decoding.request import Sequence


class PriorityPolicy(RankedPolicy):
    """The highest class first; in a class the least slack to the promised first token; then the oldest.

    Slack is deadline − now, and now is the same for all: the earliest deadline has the least (EDF: Liu and
    Layland, JACM 1973). Without a promise the deadline is infinite. The victim is whom this order puts last.
    """

    name = "priority"

    def rank(self, sequence: Sequence) -> Key:
        request = sequence.request
        target = math.inf if request.ttft_target is None else request.ttft_target
        return (-request.priority, request.metrics.arrival + target, *arrival(sequence))

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=self.rank)
