"""Geometry: the static sizes of one attention kernel, its outputs, and what it keeps in shared memory."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from specax.pallas_kernels.block_sizes import BlockSizes, Plan
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles
from specax.pallas_kernels.mosaic.tensor_core import CHUNK, Orientation, tile
from specax.pallas_kernels.quantized_kv import is_quantized


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Static sizes of a kernel."""

    plan: Plan
    tiles: int
    heads: int
    heads_per_page_head: int
    warpgroups: int
    queries: int
    head_dim: int
    words: int  # of a tree mask
    page_size: int
    dtype: Any  # of queries and tensor-core operands
    page_dtype: Any
    latent: bool

    @classmethod
    def of(cls, tiles: QueryTiles, k_pages: jax.Array, plan: Plan, latent: bool) -> "Geometry":
        count, heads, warpgroups, queries, head_dim = tiles.query.shape
        _, _, page_heads, page_size, _ = k_pages.shape
        words, dtype = tiles.visible.shape[2] - 2, tiles.query.dtype
        return cls(
            plan, count, heads, heads // page_heads, warpgroups, queries, head_dim, words, page_size, dtype,
            k_pages.dtype, latent,
        )  # fmt: skip

    @property
    def blocks(self) -> BlockSizes:
        return self.plan.blocks

    @property
    def orientation(self) -> Orientation:
        return Orientation(key_axis=0 if self.plan.keys_are_rows else 1)

    @property
    def quantized(self) -> bool:
        return is_quantized(self.page_dtype)

    @property
    def value_dim(self) -> int:
        """Columns of V that one thread block takes."""
        return self.plan.value_dim // self.blocks.value_parts

    @property
    def columns(self) -> int:
        """Columns of V per product."""
        return self.value_dim if self.plan.keys_are_rows else CHUNK

    @property
    def pages_per_block(self) -> int:
        return max(1, self.blocks.keys // self.page_size)

    @property
    def o_is_turned(self) -> bool:
        """Whether O leaves as [columns, queries]: a turned store into a swizzled tile exists for 16 bits only."""
        return self.plan.keys_are_rows and self.plan.partial

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        per = (self.tiles, self.heads, self.warpgroups)
        if not self.plan.partial:
            return dict(out=jax.ShapeDtypeStruct((*per, self.queries, self.plan.value_dim), self.dtype))
        shape = self.orientation.shape(self.queries, self.plan.value_dim)
        return dict(
            out=jax.ShapeDtypeStruct((*per, self.plan.splits, *shape), jnp.float32),
            m_l=jax.ShapeDtypeStruct((*per, self.plan.splits, 2, self.queries), jnp.float32),
        )

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers."""
        w, queries, keys, stages = self.warpgroups, self.queries, self.blocks.keys, self.blocks.stages
        scratch = dict(
            q_tile=tile((w, queries, self.head_dim), self.dtype),
            p_tile=tile((w, queries, keys), self.dtype, columns=self.columns),
            seen=plgpu.SMEM((w, 2 + self.words, queries), jnp.int32),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=w),
        )
        copies = self.pages_per_block * (2 if self.quantized else 1)
        for name, dim in [("k", self.head_dim)] + [("v", self.value_dim)] * (not self.latent):
            scratch[f"{name}_slots"] = tile((stages, keys, dim), self.page_dtype, columns=CHUNK)
            scratch[f"{name}_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
            scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=w, num_barriers=stages)
            if self.quantized:
                scratch[f"{name}_scale_slots"] = plgpu.SMEM((stages, keys), jnp.float32)
                scratch[f"{name}_wide"] = tile((keys, dim), self.dtype, columns=CHUNK)
        if not self.plan.partial:
            scratch |= dict(o_tile=tile((w, queries, self.columns), self.dtype))
        else:
            scratch |= dict(m_l_tile=plgpu.SMEM((w, 2, queries), jnp.float32))
            if self.o_is_turned:
                scratch |= dict(o_tile=plgpu.SMEM((w, self.columns, queries), jnp.float32))
            else:
                scratch |= dict(o_tile=tile((w, queries, self.columns), jnp.float32))
        if w > 1:
            scratch |= dict(cleared=plgpu.Barrier(num_arrivals=w))
        return scratch
