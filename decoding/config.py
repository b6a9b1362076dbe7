"""EngineConfig: the engine's sizes."""

import dataclasses
import os

import jax

from specax.decoding.errors import InvalidRequestError
from specax.paged import CacheSpec
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
    policy: str = "fcfs"  # who waits, and who gives way
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
        if self.policy != "fcfs":
            raise InvalidRequestError(f"policy is {self.policy!r}; there is 'fcfs'")
        if self.kv_dtype not in (None, "float32", "bfloat16", "float16"):
            raise InvalidRequestError(f"kv_dtype is {self.kv_dtype!r}; use float32, bfloat16, float16 or None")


def _need(config: EngineConfig, name: str, low: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidRequestError(f"{name} must be an integer ≥ {low}, got {value!r}")


def choose_num_pages(spec: CacheSpec, wanted: int, layout: Layout) -> int:
    """Pages for `wanted` at most, as memory allows, plus the trash page.

    On an accelerator a share of its free memory (of each device, since KV heads are split); on the CPU a
    fixed sum, because other programs live there too.
    """
    device = jax.devices()[0] if layout.mesh is None else layout.mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        budget = DEVICE_CACHE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"]) * layout.parts("kv_heads")
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        budget = min(CPU_CACHE_BYTES, total // 4)
    return max(2, min(wanted, int(budget // spec.page_bytes)) + 1)
