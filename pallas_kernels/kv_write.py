"""Writes into the paged KV cache. Both are in place when the cache is donated."""

import jax
from jaxtyping import Array, Float, Int


def write_kv(
    pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    layer: int,
    new: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, "tokens"],
) -> Float[Array, "layers pages kv_heads page_size head_dim"]:
    """Stores each token's keys (or values) of one layer at its flat slot = page · page_size + offset.

    Several padding tokens may name slots of the trash page; which of them wins is undefined.
    """
    page_size = pages.shape[3]
    at = pages.at[layer, slots // page_size, :, slots % page_size]
    return at.set(new.astype(pages.dtype), mode="promise_in_bounds")


def copy_pages(
    pages: Float[Array, "layers pages kv_heads page_size head_dim"],
    source: Int[Array, "copies"],
    target: Int[Array, "copies"],
) -> Float[Array, "layers pages kv_heads page_size head_dim"]:
    """Copies whole pages in all layers (copy-on-write); padding entries copy page 0 onto itself."""

    def copy(i: jax.Array, pages: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(pages, source[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pages, one, target[i], axis=1)

    return jax.lax.fori_loop(0, source.shape[0], copy, pages)
