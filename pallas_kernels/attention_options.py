"""AttentionOptions: what both attention ops take beyond queries, pages and rows, and the checks of it."""

import dataclasses

import jax
import jax.numpy as jnp

from specax.pallas_kernels.quantized_kv import is_quantized
from specax.pallas_kernels.window import Window

WIDE = tuple(jnp.dtype(name) for name in ("float64", "float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Keyword arguments of the public ops, which describe them, on their way to an implementation.

    Lives within one trace: not a pytree.
    """

    layer: int
    scale: float
    window: Window | None = None
    soft_cap: float | None = None
    sink_query: jax.Array | None = None  # as the query
    sink_logits: jax.Array | None = None  # [heads]
    k_scales: jax.Array | None = None  # [layers, pages, kv_heads, page_size], as v_scales
    v_scales: jax.Array | None = None

    @property
    def window_sinks(self) -> int:
        """First keys that stay visible before the window."""
        return 0 if self.window is None else self.window.sinks

    def check(self, query: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
        """Raises ValueError for what no implementation could make sense of."""
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be a number above 0, or None, got {self.soft_cap!r}")
        heads = query.shape[-2]
        if self.sink_logits is not None and self.sink_logits.shape != (heads,):
            raise ValueError(f"sink_logits must have one logit per head, [{heads}], got {self.sink_logits.shape}")
        if (self.k_scales is None) != (self.v_scales is None):
            missing = "k_scales" if self.k_scales is None else "v_scales"
            raise ValueError(f"k_scales and v_scales go together: {missing} is missing")
        for name, pages, scales in (("k", k_pages, self.k_scales), ("v", v_pages, self.v_scales)):
            quantized = is_quantized(pages.dtype)
            if not quantized and pages.dtype not in WIDE:
                raise ValueError(f"{name}_pages must be floats, int8 or float8_e4m3fn, got {pages.dtype}")
            if quantized and scales is None:
                raise ValueError(f"{name}_pages of {pages.dtype} need {name}_scales")
            if scales is None:
                continue
            if not quantized:
                raise ValueError(f"{name}_scales are for pages of int8 or float8_e4m3fn, got {pages.dtype} pages")
            if scales.shape != pages.shape[:-1] or scales.dtype != jnp.float32:
                want = f"float32 {list(pages.shape[:-1])}"
                raise ValueError(f"{name}_scales must be {want}, got {scales.dtype} {list(scales.shape)}")
        if self.k_scales is not None and k_pages.dtype != v_pages.dtype:
            raise ValueError(f"quantised pages must have one dtype, got {k_pages.dtype} keys, {v_pages.dtype} values")
