"""EngineConfig: the engine's sizes."""

import dataclasses
import math
import os
import time
from collections.abc import Mapping

import jax

from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies import POLICIES, PolicyContext
from specax.model import Decoder
from specax.paged import CacheSpec
from specax.pallas_kernels import Window
from specax.sharding import Layout

CPU_CACHE_BYTES = 2 << 30  # at most, and at most a quarter of the memory
DEVICE_CACHE_SHARE = 0.85  # of the memory that is free once the weights are loaded


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine; they fix the static shapes that are compiled. Defaults run on a laptop."""

    page_size: int = 16  # tokens per page
    num_pages: int | None = None  # pages of the cache, trash page included; None: as memory allows
    max_rows: int = 64  # sequences that run at the same time
    max_batched_tokens: int = 512  # tokens per step, decodes and prefill chunks together
    max_model_len: int | None = None  # prompt + output; None: what the model was made for
    policy: str = "fcfs"  # who waits, and who gives way: fcfs, priority, sjf, fair, lpm, predicted
    age_bound: float = 60.0  # seconds: who has waited longer is next, whatever the policy says
    tenant_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)  # shares under "fair"; default 1
    prefix_cache: bool = True  # share the KV of common prefixes between requests
    tenant_cache_share: float = 0.5  # of the cache that a named tenant keeps when others need room
    host_cache_gb: float = 0.0  # host memory for KV that leaves the device
    disk_cache_dir: str | os.PathLike[str] | None = None  # folder for KV that leaves host memory; survives a restart
    # (what waits to be written takes up to twice host_cache_gb more)
    disk_cache_gb: float = 10.0  # of the files that this process wrote or found
    cache_write: str = "back"  # to slower tiers: "back" when evicted, "through" at once
    preemption: str = "auto"  # "recompute", "swap" (needs host_cache_gb), or by estimated cost
    streaming_window: int | None = None  # StreamingLLM (approximate): keep so many last tokens; raise max_model_len too
    streaming_sinks: int = 4  # and so many first ones
    kv_dtype: str | None = None  # of the cache; None: the model's
    seed: int = 0  # of requests that name none

    def __post_init__(self) -> None:
        for name, low in (("page_size", 1), ("max_rows", 1), ("max_batched_tokens", 1), ("seed", 0)):
            _need(self, name, low)
        if self.num_pages is not None:
            _need(self, "num_pages", 2)
        if self.max_model_len is not None:
            _need(self, "max_model_len", 1)
        if self.max_batched_tokens < self.max_rows:
            raise InvalidRequestError(
                f"max_batched_tokens ({self.max_batched_tokens}) is below max_rows ({self.max_rows}): "
                "a step could not hold one token per running sequence"
            )
        _choice(self, "policy", tuple(POLICIES))
        _choice(self, "cache_write", ("back", "through"))
        _choice(self, "preemption", ("auto", "recompute", "swap"))
        if not isinstance(self.prefix_cache, bool):
            raise InvalidRequestError(f"prefix_cache must be True or False, got {self.prefix_cache!r}")
        if not isinstance(self.disk_cache_dir, str | os.PathLike | None) or self.disk_cache_dir == "":
            raise InvalidRequestError(f"disk_cache_dir must be a folder's path or None, got {self.disk_cache_dir!r}")
        if not isinstance(self.age_bound, int | float) or isinstance(self.age_bound, bool):
            raise InvalidRequestError(f"age_bound must be seconds ≥ 0 (inf: none), got {self.age_bound!r}")
        weights = self.tenant_weights
        named = isinstance(weights, Mapping) and all(isinstance(t, str) and _is_number(w) for t, w in weights.items())
        if not named:
            raise InvalidRequestError(f"tenant_weights maps tenants' names to numbers > 0, got {weights!r}")
        object.__setattr__(self, "tenant_weights", dict(weights))
        for name, most in (("host_cache_gb", None), ("disk_cache_gb", None), ("tenant_cache_share", 1.0)):
            value = getattr(self, name)
            if not _is_number(value) or value < 0 or (most is not None and not 0 < value <= most):
                limit = f"in (0, {most:g}]" if most else "≥ 0"
                raise InvalidRequestError(f"{name} must be a number {limit}, got {value!r}")
        PolicyContext(clock=time.monotonic, age_bound=self.age_bound, weights=self.tenant_weights)  # checks these two
        if self.preemption == "swap" and not self.host_cache_gb:
            raise InvalidRequestError("preemption is 'swap', but host_cache_gb is 0: there is nowhere to swap to")
        if self.disk_cache_dir is not None and not (self.host_cache_gb and self.disk_cache_gb):
            raise InvalidRequestError(
                "disk_cache_dir needs host_cache_gb and disk_cache_gb above 0: pages reach the disk through host memory"
            )
        if self.cache_write == "through" and not self.host_cache_gb:
            raise InvalidRequestError("cache_write is 'through', but host_cache_gb is 0: there is nothing to write to")
        if self.disk_cache_dir is not None and not self.prefix_cache:
            raise InvalidRequestError("disk_cache_dir is given, but prefix_cache is False: nothing would be kept")
        if self.streaming_window is not None:
            _need(self, "streaming_window", 1)
        _need(self, "streaming_sinks", 0)
        if self.kv_dtype not in (None, "float32", "bfloat16", "float16"):
            raise InvalidRequestError(f"kv_dtype is {self.kv_dtype!r}; use float32, bfloat16, float16 or None")


def _need(config: EngineConfig, name: str, low: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequestError(f"{name} must be an integer ≥ {low}, got {value!r}")


def _choice(config: EngineConfig, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise InvalidRequestError(f"{name} is {value!r}; there are {', '.join(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def kv_windows(config: EngineConfig, model: Decoder) -> tuple[Window | None, ...]:
    """What the queries of each of the model's KV groups see.

    Raises:
      InvalidRequestError: StreamingLLM asked of a model that has windows of its own.
    """
    if config.streaming_window is None:
        return tuple(None if g.window is None else Window(g.window) for g in model.config.kv_groups)
    if any(g.window is not None for g in model.config.kv_groups):
        raise InvalidRequestError(
            f"streaming_window is {config.streaming_window}, but this model's layers have sliding windows of their own"
        )
    return (Window(config.streaming_window, config.streaming_sinks, config.page_size),)


def choose_num_pages(
    config: EngineConfig, specs: tuple[CacheSpec, ...], windows: tuple[Window | None, ...], max_len: int, layout: Layout
) -> tuple[int, ...]:
    """Pages of each KV group, its trash page included: as many as all rows can use, as memory allows.

    On an accelerator a share of its free memory (of each device, since KV heads are split); on the CPU a
    fixed sum, because other programs live there too. Beside full attention, windowed groups get what their rows
    need at the most, and as much again for the prefix cache.
    """
    size = config.page_size
    row = -(-max_len // size)
    wanted = []
    for window in windows:
        seen = max_len if window is None else window.size + window.granularity + window.sinks
        pages = min(row, -(-seen // size) + 2) * config.max_rows
        if window is not None:
            pages += -(-config.max_batched_tokens // size)
        wanted.append(2 * pages if window is not None and len(windows) > 1 else pages)
    if config.num_pages is not None:
        return (config.num_pages, *(min(config.num_pages, pages + 1) for pages in wanted[1:]))
    device = jax.devices()[0] if layout.mesh is None else layout.mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        budget = DEVICE_CACHE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]) * layout.parts("kv_heads")
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(CPU_CACHE_BYTES, total // 4)
    whole = sum(pages * spec.page_bytes for pages, spec in zip(wanted, specs, strict=True))
    share = min(1.0, budget / whole)
    return tuple(max(2, int(share * pages) + 1) for pages in wanted)
