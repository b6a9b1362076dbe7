"""Whether a preempted request's KV is worth keeping in host memory: loading it against computing it again."""

import time

BYTES_PER_SECOND = 10e9  # between device and host, until warm-up measures it: half of what PCIe 4.0 x16 gives
WEIGHT = 0.1  # of a new observation


class SwapCost:
    """Estimates from the engine's own prefill steps.

    Steps are not waited for unless they sample, so tokens and time are summed up from one wait to the next; runs
    of steps with decodes, or with a compilation in them, teach nothing.
    """

    def __init__(self, bytes_per_token: float, bytes_per_second: float = BYTES_PER_SECOND):
        self.bytes_per_token, self.bytes_per_second = bytes_per_token, bytes_per_second
        self.seconds_per_token: float | None = None  # of prefill; None: not seen yet
        self._tokens = self._compiles = 0
        self._began: float | None = None  # None: the steps since the last wait are of no use

    def step_begins(self, tokens: int, decodes: bool, compiles: int) -> None:
        """A step of so many tokens; `compiles`: compilations so far."""
        if self._tokens == 0:
            self._began, self._compiles = time.perf_counter(), compiles
        if decodes:
            self._began = None
        self._tokens += tokens

    def device_is_done(self, compiles: int) -> None:
        """All steps so far were waited for."""
        if self._began is not None and self._tokens and compiles == self._compiles:
            new, old = (time.perf_counter() - self._began) / self._tokens, self.seconds_per_token
            self.seconds_per_token = new if old is None else (1 - WEIGHT) * old + WEIGHT * new
        self._tokens, self._began = 0, None

    def interrupted(self) -> None:
        """What was begun will not be waited for."""
        self._tokens, self._began = 0, None

    def worth_it(self, tokens: int) -> bool:
        """Whether saving and loading so many tokens is faster than computing them again."""
        if self.seconds_per_token is None:
            return True
        return 2 * tokens * self.bytes_per_token / self.bytes_per_second < tokens * self.seconds_per_token
