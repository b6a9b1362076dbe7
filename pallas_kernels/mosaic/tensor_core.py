"""Tiles and products for Hopper's tensor cores (wgmma), in either orientation.

wgmma multiplies a [64, 16] tile by a [16, n] tile, both in swizzled shared memory, and its result is spread over
the registers of a warpgroup's 128 threads. So one operand's rows come in 64s and the other's in 8s.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

WGMMA = plgpu.Layout.WGMMA  # how a product lies in registers
CHUNK = 64  # columns of a tile that are worked on at once, where all of them would take too many registers


def tile(shape: tuple[int, ...], dtype: Any, columns: int | None = None) -> Any:
    """Shared memory for operands [..., rows, columns]: 8-row tiles with the widest swizzle that fits.

    `columns`: a narrower width that must be a whole number of tiles too, to be sliced at, or because the other
    operand has it (both share a swizzle).
    """
    size = jnp.dtype(dtype).itemsize
    width = math.gcd(shape[-1], columns or shape[-1]) * size
    swizzle = next((s for s in (128, 64, 32) if width % s == 0), None)
    if swizzle is None:
        raise ValueError(f"rows of {width} bytes do not fit a swizzled tile: multiples of 32 do")
    transforms: Any = plgpu  # (their base class looks abstract to a type checker)
    tiled, swizzled = transforms.TilingTransform((8, swizzle // size)), transforms.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=(tiled, swizzled))


@dataclasses.dataclass(frozen=True)
class Orientation:
    """Which axis of a score tile the keys lie on: 1 where queries are the tensor core's 64 rows, 0 where keys are.

    queries are rows   S = Q·Kᵀ,  O += P·V      64 packed queries per warpgroup: prefill, large trees
    keys are rows      Sᵀ = K·Qᵀ, Oᵀ += Vᵀ·Pᵀ   any multiple of 8 queries: decoding wastes nothing on padding
    """

    key_axis: int

    @property
    def keys_are_rows(self) -> bool:
        return self.key_axis == 0

    def shape(self, queries: int, others: int) -> tuple[int, int]:
        return (others, queries) if self.keys_are_rows else (queries, others)

    @property
    def query_layout(self) -> Any:
        """Layout of a vector over queries: the score tile's, reduced over the keys."""
        return WGMMA.reduce(self.key_axis)

    @property
    def key_layout(self) -> Any:
        return WGMMA.reduce(1 - self.key_axis)

    def spread_over_keys(self, x: jax.Array, others: int) -> jax.Array:
        """A vector over queries, repeated along the other axis."""
        return lax.broadcast_in_dim(x, self.shape(x.shape[0], others), [1 - self.key_axis])

    def spread_over_queries(self, x: jax.Array, queries: int) -> jax.Array:
        """A vector over keys, repeated for every query."""
        return lax.broadcast_in_dim(x, self.shape(queries, x.shape[0]), [self.key_axis])

    def scores(self, q: Any, k: Any) -> jax.Array:
        """Q·Kᵀ of q [queries, head_dim] and k [keys, head_dim] in shared memory."""
        return _product(k, _turned(q)) if self.keys_are_rows else _product(q, _turned(k))

    def weighted(self, p: Any, v: Any) -> jax.Array:
        """P·V of p [queries, keys] and v [keys, columns] in shared memory."""
        return _product(_turned(v), _turned(p)) if self.keys_are_rows else _product(p, v)

    def view(self, ref: Any) -> Any:
        """A [queries, …] reference as arrays of this orientation are stored to it."""
        return _turned(ref) if self.keys_are_rows else ref


def _turned(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _product(a: Any, b: Any) -> jax.Array:
    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]  # waits for it

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
