"""Flash-decoding over a paged KV cache, for Hopper's tensor cores (Dao et al. 2022, 2023; Shah et al. 2024).

One thread block takes one query tile, one KV head and one split of the tile's keys:

    producer warp        pages of K and V → rings in shared memory (page_ring.py)
    consumer warpgroups  for each block of keys:
                           S = Q·Kᵀ                      wgmma
                           S = mask(cap(scale · S))      the mask only where some query does not see every key
                           m' = max(m, rowmax S); P = exp(S − m'); l = l·exp(m − m') + rowsum P
                           O = O·exp(m − m') + P·V       wgmma

Products lie in either of two ways (tensor_core.py, `Orientation`); the recurrence is the same. Softmax runs in
float32 and in base 2; P is rounded to the query's dtype. With one split the block writes O / l. With several,
each writes O with its m and l, and `merge` weighs them by exp(m − max m); an empty split weighs nothing.

Beyond the plain case: 8-bit pages are widened tile by tile, their scales multiply S and P; a latent cache (MLA)
has no V of its own, values are the first columns of its keys; `value_parts` thread blocks can share the columns of
V where the accumulator of a wide head would not fit the registers.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from specax.pallas_kernels.block_sizes import Plan
from specax.pallas_kernels.mosaic.page_ring import PageRing, produce
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles, Span
from specax.pallas_kernels.mosaic.tensor_core import CHUNK, WGMMA, Orientation, tile

MASKED = -1e30  # finite, so that exp(MASKED − MASKED) is no NaN
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What becomes of a product q·k. Static."""

    scale: float
    soft_cap: float | None = None

    def __call__(self, s: jax.Array) -> jax.Array:
        """Scores in base 2."""
        if self.soft_cap is None:
            return s * (self.scale * LOG2_E)
        return jnp.tanh(s * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)


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


@functools.partial(jax.jit, static_argnames=("scoring", "plan"))
def flash_attention(
    tiles: QueryTiles, cache: Cache, sinks: jax.Array | None, *, scoring: Scoring, plan: Plan
) -> jax.Array:
    """Attention of all tiles, [tiles, heads, warpgroups, queries, plan.value_dim] in the query's dtype.

    Query heads [tiles, heads, …] are a multiple of the cache's KV heads, neighbours sharing one. `sinks`
    [heads, queries] are logits in base e that join the denominator.
    """
    geometry = _Geometry.of(tiles, cache, plan)
    operands = _named(tiles, cache, None if sinks is None else sinks * LOG2_E)
    outputs, scratch = geometry.outputs(), geometry.scratch()
    names = (*operands, *outputs)

    def kernel(*refs: Any, **scratch: Any) -> None:
        _thread_block(dict(zip(names, refs, strict=True)) | scratch, geometry, scoring)

    g = geometry
    result = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(g.tiles, plan.splits, g.heads, g.blocks.value_parts),
        grid_names=("tile", "split", "head", "value_part"),  # heads before splits: those of a page lie side by side
        num_threads=g.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands.values())
    if plan.splits == 1:
        return result[0]
    out, m_l = result
    return merge(out.swapaxes(-1, -2) if plan.keys_are_rows else out, m_l).astype(g.dtype)


def merge(out: jax.Array, m_l: jax.Array) -> jax.Array:
    """Log-sum-exp merge of splits: out [..., splits, queries, value_dim], m_l [..., splits, 2, queries]."""
    m, l = m_l[..., 0, :], m_l[..., 1, :]  # noqa: E741
    best = m.max(-2, keepdims=True)
    weight = jnp.where(best > MASKED / 2, jnp.exp2(m - best), 0.0)
    total, summed = (weight * l).sum(-2), (weight[..., None] * out).sum(-3)
    return summed / jnp.maximum(total, 1e-30)[..., None]


def _named(tiles: QueryTiles, cache: Cache, sinks: jax.Array | None) -> dict[str, jax.Array]:
    named = dict(
        query=tiles.query, spans=tiles.spans, visible=tiles.visible, sinks=sinks, table=cache.page_table,
        layer=cache.layer, k=cache.k, v=cache.v, k_scales=cache.k_scales, v_scales=cache.v_scales,
    )  # fmt: skip
    return {name: x for name, x in named.items() if x is not None}


@dataclasses.dataclass(frozen=True)
class _Geometry:
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
    def of(cls, tiles: QueryTiles, cache: Cache, plan: Plan) -> "_Geometry":
        count, heads, warpgroups, queries, head_dim = tiles.query.shape
        _, _, page_heads, page_size, _ = cache.k.shape
        words, dtype = tiles.visible.shape[2] - 2, tiles.query.dtype
        return cls(
            plan, count, heads, heads // page_heads, warpgroups, queries, head_dim, words, page_size, dtype,
            cache.k.dtype, cache.v is None,
        )  # fmt: skip

    @property
    def blocks(self) -> Any:
        return self.plan.blocks

    @property
    def orientation(self) -> Orientation:
        return Orientation(keys=0 if self.plan.keys_are_rows else 1)

    @property
    def quantized(self) -> bool:
        return self.page_dtype.itemsize == 1

    @property
    def value_dim(self) -> int:
        """Columns of V that one thread block takes."""
        return self.plan.value_dim // self.blocks.value_parts

    @property
    def columns(self) -> int:
        """Columns of V per product."""
        return self.value_dim if self.plan.keys_are_rows else CHUNK

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        per = (self.tiles, self.heads, self.warpgroups)
        if self.plan.splits == 1:
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
        copies = keys // self.page_size * (2 if self.quantized else 1)
        for name, dim in [("k", self.head_dim)] + [("v", self.value_dim)] * (not self.latent):
            scratch[f"{name}_slots"] = tile((stages, keys, dim), self.page_dtype, columns=CHUNK)
            scratch[f"{name}_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
            scratch[f"{name}_free"] = plgpu.Barrier(num_arrivals=w, num_barriers=stages)
            if self.quantized:
                scratch[f"{name}_scale_slots"] = plgpu.SMEM((stages, keys), jnp.float32)
                scratch[f"{name}_wide"] = tile((keys, dim), self.dtype, columns=CHUNK)
        if self.plan.splits == 1:
            scratch |= dict(o_tile=tile((w, queries, self.columns), self.dtype))
        else:
            scratch |= dict(m_l_tile=plgpu.SMEM((w, 2, queries), jnp.float32))
            if self.plan.keys_are_rows:  # (a turned store into a swizzled tile exists for 16 bits only)
                scratch |= dict(o_tile=plgpu.SMEM((w, self.columns, queries), jnp.float32))
            else:
                scratch |= dict(o_tile=tile((w, queries, self.columns), jnp.float32))
        if w > 1:
            scratch |= dict(cleared=plgpu.Barrier(num_arrivals=w))
        return scratch


def _thread_block(r: dict[str, Any], g: _Geometry, scoring: Scoring) -> None:
    """The kernel: `r` holds the references of operands, outputs and scratch by name."""
    # The last tiles of a prompt see most keys: they start first.
    number = (g.tiles - 1) - lax.axis_index("tile")
    head, split, part, thread = (lax.axis_index(name) for name in ("head", "split", "value_part", "warpgroup"))
    span = Span(*(r["spans"][number, i] for i in range(len(Span._fields))))

    # This split's blocks of keys: first_block … first_block + mine − 1.
    low = lax.div(span.first, jnp.int32(g.blocks.keys))
    total = jnp.maximum(_ceil_div(span.end, g.blocks.keys) - low, 0)
    share = _ceil_div(total, g.plan.splits)
    first_block = low + split * share
    mine = jnp.maximum(jnp.minimum(share, total - split * share), 0)

    def ring(name: str, columns: Any) -> PageRing:
        in_layer = {x: r[x].at[r["layer"][0]] for x in (name, f"{name}_scales") if x in r}
        shared = [r.get(f"{name}_{x}") for x in ("slots", "full", "free")]
        return PageRing(in_layer[name], columns, *shared, in_layer.get(f"{name}_scales"), r.get(f"{name}_scale_slots"))

    rings = [ring("k", slice(None))]
    if not g.latent:
        rings.append(ring("v", pl.ds(part * g.value_dim, g.value_dim)))

    def page_ids(i: jax.Array) -> list[jax.Array]:
        first, last = lax.div(span.first, jnp.int32(g.page_size)), lax.div(span.end - 1, jnp.int32(g.page_size))
        per_block = g.blocks.keys // g.page_size
        columns = [(first_block + i) * per_block + j for j in range(per_block)]
        return [r["table"][span.row, jnp.clip(c, first, last)] for c in columns]

    @pl.when(thread == g.warpgroups)
    def _() -> None:
        page_head = lax.div(head, jnp.int32(g.heads_per_page_head))

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                produce(rings, g.blocks.stages, page_head, mine, page_ids)

    @pl.when(thread < g.warpgroups)
    def _() -> None:
        plgpu.copy_gmem_to_smem(r["query"].at[number, head, thread], r["q_tile"].at[thread], r["q_full"].at[thread])
        plgpu.copy_gmem_to_smem(r["visible"].at[number, thread], r["seen"].at[thread], r["q_full"].at[thread])
        sinks = r["sinks"].at[head] if "sinks" in r else None
        state = _empty(g, sinks, split)
        plgpu.barrier_wait(r["q_full"].at[thread])

        def step(i: jax.Array, state: _State) -> _State:
            return _take_block(r, g, scoring, rings, span, state, thread, first_block + i, i, i + g.blocks.stages < mine)

        state = lax.fori_loop(0, mine, step, state)
        _write(r, g, state, (number, head, thread), thread, split, part)


type _State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]  # O in chunks of columns, m, l


def _empty(g: _Geometry, sinks: Any, split: jax.Array) -> _State:
    """No key seen; the first split starts with the sinks, keys of value 0."""

    def vector(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((g.queries,), value, jnp.float32), g.orientation.query_layout)

    m, l = vector(MASKED), vector(0.0)  # noqa: E741
    if sinks is not None:
        logits = plgpu.load(sinks, layout=g.orientation.query_layout, optimized=False)
        m, l = lax.cond(split == 0, lambda: (logits, vector(1.0)), lambda: (m, l))  # noqa: E741
    zeros = jnp.zeros(g.orientation.shape(g.queries, g.columns), jnp.float32)
    return tuple(plgpu.layout_cast(zeros, WGMMA) for _ in range(0, g.value_dim, g.columns)), m, l


def _take_block(
    r: dict[str, Any],
    g: _Geometry,
    scoring: Scoring,
    rings: list[PageRing],
    span: Span,
    state: _State,
    thread: jax.Array,
    block: jax.Array,
    i: jax.Array,
    wanted: jax.Array,
) -> _State:
    """One step of the online softmax: takes in key block number `block`, the i-th of this thread block.

    `wanted`: whether a later block will take this one's slots.
    """
    acc, m, l = state  # noqa: E741
    orientation, keys = g.orientation, g.blocks.keys
    slot = lax.rem(i, jnp.int32(g.blocks.stages))
    start = block * keys
    q_tile, p_tile, seen = (r[name].at[thread] for name in ("q_tile", "p_tile", "seen"))

    plgpu.barrier_wait(rings[0].full.at[slot])
    k_tile, scales = _operand(rings[0], slot, r.get("k_wide"), orientation, g.dtype)
    s = orientation.scores(q_tile, k_tile)
    if not g.latent:
        rings[0].release(slot, wanted)
    if scales is not None:
        s *= orientation.over_queries(scales, g.queries)
    s = scoring(s)
    plain = (start >= span.plain_from) & (start + keys <= span.plain_until)
    s = lax.cond(plain, lambda: s, lambda: _mask(s, seen, g, span, start))

    new_m = jnp.maximum(m, s.max(axis=orientation.keys))
    keep = jnp.exp2(m - new_m)
    p = jnp.exp2(s - orientation.over_keys(new_m, keys))
    l = l * keep + p.sum(axis=orientation.keys)  # noqa: E741

    if g.latent:
        v_tile = k_tile
    else:
        plgpu.barrier_wait(rings[1].full.at[slot])
        # Scales of values go into the weights where those are few. (Not in float16, which is too narrow for that.)
        fold = g.dtype == jnp.float16 or not orientation.keys_are_rows
        v_tile, scales = _operand(rings[1], slot, r.get("v_wide"), orientation, g.dtype, fold)
        if scales is not None:
            p = _times_scales(p, scales, g, span, start)
    _clear_unwritten(r, g, v_tile, span, start, thread)
    orientation.view(p_tile)[...] = plgpu.layout_cast(p.astype(g.dtype), WGMMA)
    plgpu.commit_smem()
    added = []
    for c, old in enumerate(acc):
        columns = v_tile.at[:, pl.ds(c * g.columns, g.columns)]
        added.append(old * orientation.over_keys(keep, g.columns) + orientation.weighted(p_tile, columns))
    rings[-1].release(slot, wanted)
    return tuple(added), new_m, l


def _operand(
    ring: PageRing, slot: jax.Array, wide: Any, orientation: Orientation, dtype: Any, fold: bool = False
) -> tuple[Any, jax.Array | None]:
    """A slot's tile as wgmma takes it, and the scales of its keys unless `fold` has multiplied them in.

    8-bit values are widened into the tile `wide`.
    """
    if wide is None:
        return ring.slots.at[slot], None
    # (Scales are read before commit_smem, whose fence orders the read before the slot's next copy.)
    narrow = plgpu.Layout.WGMMA_UPCAST_2X
    layout = narrow.reduce(1) if fold else orientation.key_layout
    scales = plgpu.load(ring.scale_slots.at[slot], layout=layout, optimized=False)
    for c in range(0, wide.shape[1], CHUNK):
        x = plgpu.load(ring.slots.at[slot, :, pl.ds(c, CHUNK)], layout=narrow).astype(jnp.float32)
        if fold:
            x *= lax.broadcast_in_dim(scales, x.shape, [0])
        wide[:, pl.ds(c, CHUNK)] = plgpu.layout_cast(x.astype(dtype), WGMMA)
    plgpu.commit_smem()
    return wide, None if fold else scales


def _times_scales(p: jax.Array, scales: jax.Array, g: _Geometry, span: Span, start: jax.Array) -> jax.Array:
    """Weights times their values' scales; those past the last key may be NaN, which 0 would not undo."""
    scaled = p * g.orientation.over_queries(scales, g.queries)

    def written() -> jax.Array:
        key = plgpu.broadcasted_iota(jnp.int32, p.shape, g.orientation.keys, layout=WGMMA) + start
        return jnp.where(key < span.end, scaled, 0.0)

    return lax.cond(start + g.blocks.keys > span.end, written, lambda: scaled)


def _mask(s: jax.Array, seen: Any, g: _Geometry, span: Span, start: jax.Array) -> jax.Array:
    """Scores of the block of keys from `start` on, MASKED where a query does not see the key."""
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, g.orientation.keys, layout=WGMMA)
    bits = jnp.zeros_like(key)
    for first in range(0, g.blocks.keys, 32):
        word = g.orientation.over_keys(_visible_bits(seen, g, span, start + first), g.blocks.keys)
        bits = word if first == 0 else jnp.where(key < first, bits, word)
    return jnp.where(lax.shift_right_logical(bits, key & 31) & 1 == 1, s, MASKED)


def _visible_bits(seen: Any, g: _Geometry, span: Span, start: jax.Array) -> jax.Array:
    """Which of the 32 keys from `start` on each query sees: int32 [queries], key start + b in bit b."""

    def load(row: int) -> jax.Array:
        return plgpu.load(seen.at[row], layout=g.orientation.query_layout, optimized=False)

    def below(key: jax.Array) -> jax.Array:
        n = jnp.clip(key - start, 0, 32)
        return jnp.where(n == 32, -1, lax.shift_left(jnp.full_like(n, 1), n & 31) - 1)

    bits = below(load(1)) & ~below(load(0))
    for w in range(g.words):
        shift = start - (span.own + 32 * w)  # of the tree word's bits towards the block's
        word = load(2 + w)
        down = lax.shift_right_logical(word, jnp.full_like(word, jnp.clip(shift, 0, 31)))
        up = lax.shift_left(word, jnp.full_like(word, jnp.clip(-shift, 0, 31)))
        moved = jnp.where(jnp.full_like(word, shift) >= 0, down, up)
        bits |= jnp.where(jnp.full_like(word, jnp.abs(shift)) < 32, moved, 0)
    return bits


def _clear_unwritten(
    r: dict[str, Any], g: _Geometry, values: Any, span: Span, start: jax.Array, thread: jax.Array
) -> None:
    """Zeros the values past the last key: whatever lies there may be NaN, and 0 · NaN is NaN."""

    def clear() -> None:
        key = plgpu.broadcasted_iota(jnp.int32, (g.blocks.keys, CHUNK), 0, layout=WGMMA) + start
        for c in range(0, g.value_dim, CHUNK):
            part = values.at[:, pl.ds(c, CHUNK)]
            part[...] = jnp.where(key < span.end, plgpu.load(part, layout=WGMMA), 0)
        plgpu.commit_smem()

    @pl.when(start + g.blocks.keys > span.end)
    def _() -> None:
        if g.warpgroups == 1:
            return clear()
        pl.when(thread == 0)(clear)
        plgpu.barrier_arrive(r["cleared"])
        plgpu.barrier_wait(r["cleared"])


def _write(
    r: dict[str, Any], g: _Geometry, state: _State, at: tuple[Any, ...], thread: Any, split: Any, part: Any
) -> None:
    """O / l to its tile of the output, or O, m and l to the split's place."""
    acc, m, l = state  # noqa: E741
    orientation, o_tile = g.orientation, r["o_tile"].at[thread]
    turned = orientation.keys_are_rows and g.plan.splits > 1
    if g.plan.splits == 1:
        inverse = jnp.where(m > MASKED / 2, 1 / jnp.maximum(l, 1e-30), 0.0)
        acc = tuple((x * orientation.over_keys(inverse, g.columns)).astype(g.dtype) for x in acc)
    else:
        at = (*at, split)
        m_l = r["m_l_tile"].at[thread]
        m_l[0], m_l[1] = m, l
        plgpu.commit_smem()
        pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(m_l, r["m_l"].at[at]))
    for c, x in enumerate(acc):
        if c:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        (o_tile if turned else orientation.view(o_tile))[...] = plgpu.layout_cast(x, WGMMA)
        plgpu.commit_smem()
        columns = pl.ds(part * g.value_dim + c * g.columns, g.columns)
        plgpu.copy_smem_to_gmem(o_tile, r["out"].at[at].at[(columns, slice(None)) if turned else (slice(None), columns)])
    plgpu.wait_smem_to_gmem(0)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.int32(b))
