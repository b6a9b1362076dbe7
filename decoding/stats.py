"""Counters of an engine, and the figures that it reports from them."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from specax.decoding.scheduler import Scheduler


@dataclasses.dataclass
class EngineStats:
    """Counts since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    padding_tokens: int = 0
    requests_finished: int = 0
    peak_pages: int = 0  # of the first KV group, in use
    warm_compiles: int | None = None  # compilations until the end of warm-up
    host_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("schedule", "build", "commit"), 0.0)
    )

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the time inside to a part of `host_seconds`."""
        start = time.perf_counter()
        yield
        self.host_seconds[part] += time.perf_counter() - start

    def report(self, scheduler: Scheduler, compilations: int, compile_seconds: float) -> dict[str, Any]:
        """All figures: these counts, and scheduler and memory as they are now."""
        steps = max(1, self.steps)
        memory = scheduler.memory
        counters = memory.counters
        pool = memory.pools[0]
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "padding_tokens": self.padding_tokens,
            "requests_finished": self.requests_finished,
            "requests_running": len(scheduler.running),
            "requests_waiting": scheduler.num_waiting,
            "preemptions": scheduler.preemptions,
            "pages_total": pool.num_pages - 1,
            "pages_free": pool.num_free,
            "pages_cached": memory.tree.evictable[0],
            "pages_in_use": memory.in_use(),
            "pages_shared": _pages_shared(scheduler),
            "pages_peak": self.peak_pages,
            "prefix_query_tokens": counters.query_tokens,
            "prefix_hit_tokens": counters.hit_tokens,
            "prefix_host_hit_tokens": counters.host_hit_tokens,
            "prefix_recovered_tokens": counters.recovered_tokens,
            "prefix_evicted_tokens": memory.tree.evicted_tokens,
            "prefix_cached_tokens": memory.tree.cached_tokens,
            "pages_saved": counters.saved_pages,
            "pages_loaded": counters.loaded_pages,
            "host_cache_bytes": memory.host.used_bytes if memory.host else 0,
            "disk_cache_bytes": memory.disk.num_bytes if memory.disk else 0,
            "disk_cache_errors": memory.disk.errors if memory.disk else 0,
            "compilations": compilations,
            "compile_seconds": compile_seconds,
            "compilations_after_warmup": None if self.warm_compiles is None else compilations - self.warm_compiles,
            "host_ms_per_step": {k: 1e3 * v / steps for k, v in self.host_seconds.items()},
        }


def _pages_shared(scheduler: Scheduler) -> int:
    """Pages that several running sequences hold."""
    held = Counter(page for s in scheduler.running for page in s.table.pages[0].tolist() if page)
    return sum(count > 1 for count in held.values())
