"""First come, first served."""

from specax.decoding.policies.base import Policy, arrival
from specax.decoding.request import Sequence


class FCFSPolicy(Policy):
    """In order of arrival; the victim is the latest arrived, so the oldest always makes progress."""

    name = "fcfs"

    def victim(self, running: list[Sequence]) -> Sequence:
        return max(running, key=arrival)

    def _next(self) -> Sequence | None:
        return self._arrivals.first()
