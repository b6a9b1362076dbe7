"""Keys and values in eight bits: symmetric, one float32 scale per token and KV head.

    value = page entry · scale          pages  [layers, pages, kv_heads, page_size, head_dim]  int8 | float8_e4m3fn
                                        scales [layers, pages, kv_heads, page_size]            float32

The scale of a token is known when the token is written and never changes, so pages are still only appended to,
and shared and copied as others are. This is the granularity of vLLM's `int8_per_token_head` and
`fp8_per_token_head` caches (its pull request 38378); attention multiplies the scales into scores and weights, not
into every entry.

On CPUs int8 is the one to use: XLA's backend there widens whole float8 arrays to read from them or write into them.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

# The largest number that a scaled entry may be. (Symmetric: −128 is not used.)
LIMITS = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


def is_quantized(dtype: Any) -> bool:
    """Whether pages of this dtype go with scales."""
    return jnp.dtype(dtype) in LIMITS


def quantize_kv(
    new: Float[Array, "tokens kv_heads head_dim"], dtype: Any
) -> tuple[Real[Array, "tokens kv_heads head_dim"], Float[Array, "tokens kv_heads"]]:
    """New keys (or values) as entries of pages of `dtype` (int8 or float8_e4m3fn), and their float32 scales.

    Each vector's largest magnitude becomes the dtype's largest number; so int8 is off by half a scale at most, and
    float8 by 2⁻⁴ of each entry (or by 2⁻¹⁰ of a scale). Zeros have the scale 1. A vector that holds NaN or infinity
    comes back as NaN.

    Raises:
      ValueError: another dtype.
    """
    if not is_quantized(dtype):
        raise ValueError(f"quantised keys and values are int8 or float8_e4m3fn, got {jnp.dtype(dtype)}")
    limit = LIMITS[jnp.dtype(dtype)]
    wide = new.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / limit
    # Also for subnormal scales, by which some backends can't divide: those vectors become zeros.
    scales = jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)
    scales = jnp.where(jnp.isinf(scales), jnp.nan, scales)
    scaled = jnp.clip(wide / scales[..., None], -limit, limit)
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales
