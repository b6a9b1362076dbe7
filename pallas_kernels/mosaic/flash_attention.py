"""Flash-decoding over a paged KV cache, for Hopper's tensor cores (Dao et al. 2022, 2023; Shah et al. 2024).

One thread block takes one query tile, one KV head and one split of the tile's keys:

    producer warp         pages of K and V → rings in shared memory       page_ring.py
    consumer warpgroups   ring → S = Q·Kᵀ → online softmax → O += P·V     consumer.py

Products lie in either of two ways (tensor_core.py, `Orientation`); the recurrence is the same. Softmax runs in
float32 and in base 2; P is rounded to the query's dtype. With one split the block writes O / l. With several,
each writes O with its m and l, and `merge` weighs them by exp(m − max m); an empty split weighs nothing.

Beyond the plain case: 8-bit pages are widened tile by tile, their scales multiply S, and P or V; a latent cache (MLA)
has no V of its own, values are the first columns of its keys; `value_parts` thread blocks can share the columns of
V where the accumulator of a wide head would not fit the registers.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from specax.pallas_kernels.block_sizes import Plan
from specax.pallas_kernels.mosaic.consumer import LOG2_E, MASKED, Consumer, Scoring, State
from specax.pallas_kernels.mosaic.geometry import Geometry
from specax.pallas_kernels.mosaic.page_ring import PageRing, produce
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles, Span


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The pages that a kernel reads. The layer is data, so that all layers of a model share one kernel."""

    k: jax.Array  # [layers, pages, kv_heads, page_size, head_dim]
    v: jax.Array | None  # likewise; None: a latent cache, whose values are columns of its keys
    page_table: jax.Array  # [rows, pages_per_row]
    layer: jax.Array  # [1]
    k_scales: jax.Array | None = None  # [layers, pages, kv_heads, page_size], of 8-bit pages
    v_scales: jax.Array | None = None


class Partial(NamedTuple):
    """Attention over parts of the keys, to be merged."""

    out: jax.Array  # [tiles, heads, warpgroups, splits, queries, value_dim], not divided by l
    m: jax.Array  # [tiles, heads, warpgroups, splits, queries], maximum of the scores in base 2
    l: jax.Array  # likewise, sum of 2^(score − m)  # noqa: E741


def merge(*parts: Partial) -> jax.Array:
    """Log-sum-exp merge of all splits of all parts, [tiles, heads, warpgroups, queries, value_dim] in float32."""
    out, m, l = (jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True))  # noqa: E741
    best = m.max(3, keepdims=True)
    weight = jnp.where(best > MASKED / 2, jnp.exp2(m - best), 0.0)
    total, summed = (weight * l).sum(3), (weight[..., None] * out).sum(3)
    return summed / jnp.maximum(total, 1e-30)[..., None]


@functools.partial(jax.jit, static_argnames=("scoring", "plan"))
def flash_attention(
    tiles: QueryTiles, cache: Cache, sinks: jax.Array | None, *, scoring: Scoring, plan: Plan
) -> jax.Array | Partial:
    """Attention of all tiles, [tiles, heads, warpgroups, queries, plan.value_dim] in the query's dtype, or partial.

    Query heads [tiles, heads, …] are a multiple of the cache's KV heads, neighbours sharing one. `sinks`
    [heads, queries] are logits in base e that join the denominator.
    """
    sizes = Geometry.of(tiles, cache.k, plan, latent=cache.v is None)
    operands = _named(tiles, cache, None if sinks is None else sinks * LOG2_E)
    outputs = sizes.outputs()
    names = (*operands, *outputs)

    def kernel(*refs: Any, **scratch: Any) -> None:
        _thread_block(dict(zip(names, refs, strict=True)) | scratch, sizes, scoring)

    result = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=sizes.scratch(),
        grid=(sizes.tiles, plan.splits, sizes.heads, plan.blocks.value_parts),
        # The last axis varies fastest: heads before splits, since those of a page lie side by side.
        grid_names=("tile", "split", "head", "value_part"),
        num_threads=sizes.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands.values())
    if not plan.partial:
        return result[0]
    out, m_l = result
    return Partial(out.swapaxes(-1, -2) if sizes.o_is_turned else out, m_l[..., 0, :], m_l[..., 1, :])


def _named(tiles: QueryTiles, cache: Cache, sinks: jax.Array | None) -> dict[str, jax.Array]:
    named = dict(
        query=tiles.query, spans=tiles.spans, visible=tiles.visible, sinks=sinks, table=cache.page_table,
        layer=cache.layer, k=cache.k, v=cache.v, k_scales=cache.k_scales, v_scales=cache.v_scales,
    )  # fmt: skip
    return {name: x for name, x in named.items() if x is not None}


def _thread_block(refs: dict[str, Any], sizes: Geometry, scoring: Scoring) -> None:
    """The kernel; `refs`: operands, outputs and scratch by name."""
    tile = (sizes.tiles - 1) - lax.axis_index("tile")  # the last tiles of a prompt see most keys: they start first
    head, split, part, warpgroup = (lax.axis_index(name) for name in ("head", "split", "value_part", "warpgroup"))
    span = Span(*(refs["spans"][tile, i] for i in range(len(Span._fields))))
    keys, page_size = sizes.blocks.keys, jnp.int32(sizes.page_size)

    # This split's blocks of keys: first_block … first_block + mine − 1.
    low = lax.div(span.first, jnp.int32(keys))
    total = jnp.maximum(_ceil_div(span.end, keys) - low, 0)
    share = _ceil_div(total, sizes.plan.splits)
    first_block = low + split * share
    mine = jnp.maximum(jnp.minimum(share, total - split * share), 0)

    def pages_of(i: jax.Array) -> tuple[list[jax.Array], Any]:
        start = (first_block + i) * keys
        column, first, last = (lax.div(key, page_size) for key in (start, span.first, span.end - 1))
        columns = [jnp.clip(column + j, first, last) for j in range(sizes.pages_per_block)]
        offset = 0 if keys % sizes.page_size == 0 else lax.rem(start, page_size)
        return [refs["table"][span.row, c] for c in columns], offset

    def ring(name: str, columns: Any) -> PageRing:
        in_layer = {x: refs[x].at[refs["layer"][0]] for x in (name, f"{name}_scales") if x in refs}
        slots, full, free, scale_slots = (refs.get(f"{name}_{x}") for x in ("slots", "full", "free", "scale_slots"))
        return PageRing(in_layer[name], columns, slots, full, free, in_layer.get(f"{name}_scales"), scale_slots)

    rings = [ring("k", slice(None))]
    if not sizes.latent:
        rings.append(ring("v", pl.ds(part * sizes.value_dim, sizes.value_dim)))

    @pl.when(warpgroup == sizes.warpgroups)
    def _() -> None:
        page_head = lax.div(head, jnp.int32(sizes.heads_per_page_head))

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                produce(rings, sizes.blocks.stages, page_head, mine, pages_of)

    @pl.when(warpgroup < sizes.warpgroups)
    def _() -> None:
        consumer = Consumer(sizes, scoring, refs, rings, span, warpgroup)

        def step(i: jax.Array, state: State) -> State:
            return consumer.take(state, first_block + i, i, refilled=i + sizes.blocks.stages < mine)

        state = lax.fori_loop(0, mine, step, consumer.start(tile, head, split))
        consumer.finish(state, tile, head, split, part)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.int32(b))
