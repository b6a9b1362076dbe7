"""Writes into the paged KV cache. All are in place when the cache is donated."""

import jax
from jaxtyping import Array, Float, Int, Real, Shaped

from specax.pallas_kernels.quantized_kv import is_quantized


def write_kv(
    pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    layer: int,
    new: Real[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, "tokens"],
) -> Real[Array, "layers pages kv_heads page_size head_dim"]:
    """Stores each token's keys (or values) of one layer at its flat slot = page · page_size + offset.

    Several padding tokens may name slots of the trash page; which of them wins is undefined. Into quantised pages
    go the values of `quantize_kv`, and its scales beside them by `write_kv_scales`.

    Raises:
      ValueError: quantised pages, and `new` of another dtype.
    """
    if is_quantized(pages.dtype) and new.dtype != pages.dtype:
        raise ValueError(f"pages of {pages.dtype} take what quantize_kv gives, got {new.dtype}")
    return _write(pages, layer, new, slots)


def write_kv_scales(
    scales: Float[Array, "layers pages kv_heads page_size"],
    layer: int,
    new: Float[Array, "tokens kv_heads"],
    slots: Int[Array, "tokens"],
) -> Float[Array, "layers pages kv_heads page_size"]:
    """Stores the scales of what `write_kv` stores in quantised pages, at the same slots."""
    return _write(scales, layer, new, slots)


def _write(pages: jax.Array, layer: int, new: jax.Array, slots: jax.Array) -> jax.Array:
    page_size = pages.shape[3]
    at = pages.at[layer, slots // page_size, :, slots % page_size]
    return at.set(new.astype(pages.dtype), mode="promise_in_bounds")


def copy_pages(
    pages: Shaped[Array, "layers pages kv_heads page_size *head_dim"],
    source: Int[Array, "copies"],
    target: Int[Array, "copies"],
) -> Shaped[Array, "layers pages kv_heads page_size *head_dim"]:
    """Copies whole pages, or the scales of them, in all layers (copy-on-write); padding copies page 0 onto itself."""

    def copy(i: jax.Array, pages: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(pages, source[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pages, one, target[i], axis=1)

    return jax.lax.fori_loop(0, source.shape[0], copy, pages)
