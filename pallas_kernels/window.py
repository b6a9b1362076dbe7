"""Window: which keys a query sees when it does not see its whole context, and the positions it sees them at."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Window:
    """The query at position n sees key j ≤ n if `j >= start(n)` or `j < sinks`.

        sinks   given back       window
        ■ ■ │ · · · · · · │ ■ ■ ■ ■ ■ ■ ■
        0     sinks         start(n)    n

    - `Window(size)`: sliding-window attention as in Mistral (Jiang et al. 2023): the query's own key and the
      size − 1 before it.
    - `Window(size, sinks, granularity=page_size)`: StreamingLLM (Xiao et al. 2023). The window begins at a
      whole page, so that it is size to size + granularity − 1 keys long.

    Hashable: it is static under jit. Its methods take ints, NumPy and JAX arrays.
    """

    size: int  # keys, the query's own among them
    sinks: int = 0  # first keys of the context that stay visible
    granularity: int = 1  # `start` is a multiple of this many keys

    def __post_init__(self) -> None:
        for name, low in (("size", 1), ("sinks", 0), ("granularity", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ValueError(f"window: {name} must be an integer ≥ {low}, got {value!r}")

    def start(self, position: Any) -> Any:
        """First key of the window of the query at `position`; 0 for positions below 0 (padding)."""
        first = position + 1 - self.size
        first = first * (first > 0)
        return first - first % self.granularity

    def rebased(self, position: Any) -> Any:
        """The query's position counted among the keys that it sees, as StreamingLLM counts.

        Sinks keep their positions 0..sinks−1 and the window follows them without a gap. Between keys of the
        window, only differences count, and those are the same in the whole context; so it is for its scores
        against sinks that a query must be rotated to this position.
        """
        gap = self.start(position) - self.sinks
        return position - gap * (gap > 0)
