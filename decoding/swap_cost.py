"""Whether a preempted request's KV is worth keeping in host memory: loading it against computing it again."""

BYTES_PER_SECOND = 10e9  # between device and host, until measured: half of what PCIe 4.0 x16 gives
WEIGHT = 0.1  # of a new observation


class SwapCost:
    """Estimates from the engine's own prefill steps, and from measured transfers."""

    def __init__(self, bytes_per_token: float, bytes_per_second: float = BYTES_PER_SECOND):
        self.bytes_per_token, self.bytes_per_second = bytes_per_token, bytes_per_second
        self.seconds_per_token: float | None = None  # of prefill; None: not seen yet

    def computed(self, tokens: int, seconds: float) -> None:
        """Learns from a step that was prefill only."""
        new, old = seconds / tokens, self.seconds_per_token
        self.seconds_per_token = new if old is None else (1 - WEIGHT) * old + WEIGHT * new

    def worth_it(self, tokens: int) -> bool:
        """Whether saving and loading so many tokens is faster than computing them again."""
        if self.seconds_per_token is None:
            return True
        return 2 * tokens * self.bytes_per_token / self.bytes_per_second < tokens * self.seconds_per_token
