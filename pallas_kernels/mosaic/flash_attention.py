"""Flash-decoding over a paged KV cache, for Hopper's tensor cores (Dao 2023, "Flash-Decoding"; Shah et al. 2024).

One thread block takes one query tile, one KV head and one split of the tile's keys:

    producer warp        pages of K and V → rings in shared memory (page_ring.py)
    consumer warpgroups  for each block of keys:
                           S = Q·Kᵀ                      wgmma
                           S = mask(cap(scale · S))      only where a query does not see every key
                           m' = max(m, rowmax S); P = exp(S − m'); l = l·exp(m − m') + rowsum P
                           O = O·exp(m − m') + P·V       wgmma

A tensor-core product has 64 rows at least. Two ways of filling them (`Orientation`):

    queries are rows   S = Q·Kᵀ,  O += P·V      64 packed queries per warpgroup: prefill, large trees
    keys are rows      Sᵀ = K·Qᵀ, Oᵀ += Vᵀ·Pᵀ   any multiple of 8 queries: decoding wastes nothing on padding

With several splits each one writes its unnormalised O with m and l, and `merge` weighs them by exp(m − max m);
an empty split weighs nothing. Softmax runs in float32 and in base 2; P is rounded to the query's dtype.
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

from specax.pallas_kernels.mosaic.page_ring import PageRing, produce, tile
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles, Span

MASKED = -1e30  # finite, so that exp(MASKED − MASKED) is no NaN
LOG2_E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
CHUNK = 64  # columns of a tile that are in registers at once, on top of the output's own


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How a thread block works. Static; `block_sizes.py` holds the table of good ones."""

    keys: int = 64  # per block
    stages: int = 2  # slots of each ring
    warpgroups: int = 1  # consumers, each with its own queries; more than one only where queries are rows
    value_parts: int = 1  # thread blocks that share the columns of V; each computes all scores


@dataclasses.dataclass(frozen=True)
class Orientation:
    """Which axis of the score tile the keys lie on: 1 where queries are the tensor core's rows, else 0."""

    keys: int

    def shape(self, queries: int, others: int) -> tuple[int, int]:
        return (queries, others) if self.keys == 1 else (others, queries)

    @property
    def query_layout(self) -> Any:
        """Layout of a vector over queries: the score tile's, reduced over the keys."""
        return WGMMA.reduce(self.keys)

    @property
    def key_layout(self) -> Any:
        return WGMMA.reduce(1 - self.keys)

    def over_keys(self, x: jax.Array, others: int) -> jax.Array:
        """A vector over queries, repeated along the other axis."""
        return lax.broadcast_in_dim(x, self.shape(x.shape[0], others), [1 - self.keys])

    def over_queries(self, x: jax.Array, queries: int) -> jax.Array:
        """A vector over keys, repeated for every query."""
        return lax.broadcast_in_dim(x, self.shape(queries, x.shape[0]), [self.keys])

    def scores(self, q: Any, k: Any) -> jax.Array:
        """Q·Kᵀ of q [queries, head_dim] and k [keys, head_dim] in shared memory."""
        return _product(*((q, _transposed(k)) if self.keys == 1 else (k, _transposed(q))))

    def weighted(self, p: Any, v: Any) -> jax.Array:
        """P·V of p [queries, keys] and v [keys, columns] in shared memory."""
        return _product(*((p, v) if self.keys == 1 else (_transposed(v), _transposed(p))))

    def view(self, ref: Any) -> Any:
        """A [queries, …] reference, turned so that arrays of this orientation can be stored to it."""
        return ref if self.keys == 1 else _transposed(ref)


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def _product(a: Any, b: Any) -> jax.Array:
    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


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


@functools.partial(jax.jit, static_argnames=("scoring", "splits", "blocks", "keys_are_rows"))
def flash_attention(
    tiles: QueryTiles,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    layer: jax.Array,
    sinks: jax.Array | None,
    k_scales: jax.Array | None,
    v_scales: jax.Array | None,
    *,
    scoring: Scoring,
    splits: int,
    blocks: BlockSizes,
    keys_are_rows: bool,
) -> jax.Array:
    """Attention of all tiles, [tiles, kv_heads, warpgroups, queries, head_dim] in the query's dtype.

    The layer is data, so that all layers of a model share one kernel. `sinks` [kv_heads, queries] is in base e.
    """
    count, kv_heads, warpgroups, queries, head_dim = tiles.query.shape
    words = tiles.visible.shape[2] - 2
    page_size = k_pages.shape[3]
    dtype, quantized = tiles.query.dtype, k_scales is not None
    orientation = Orientation(keys=0 if keys_are_rows else 1)
    per_block = blocks.keys // page_size  # pages
    value_dim = head_dim // blocks.value_parts
    columns = CHUNK if orientation.keys == 1 else value_dim
    over_keys = orientation.over_keys

    operands = dict(
        query=tiles.query, spans=tiles.spans, visible=tiles.visible, table=page_table, layer=layer.reshape(1),
        k=k_pages, v=v_pages,
    )  # fmt: skip
    if sinks is not None:
        operands |= dict(sinks=sinks * LOG2_E)
    if k_scales is not None and v_scales is not None:
        operands |= dict(k_scales=k_scales, v_scales=v_scales)

    outputs = dict(out=jax.ShapeDtypeStruct(tiles.query.shape, dtype))
    if splits > 1:
        part = (count, kv_heads, warpgroups, splits)
        outputs = dict(
            out=jax.ShapeDtypeStruct((*part, *orientation.shape(queries, head_dim)), jnp.float32),
            m_l=jax.ShapeDtypeStruct((*part, 2, queries), jnp.float32),
        )

    k_ring, v_ring = ((blocks.stages, blocks.keys, dim) for dim in (head_dim, value_dim))
    copies = per_block * (2 if quantized else 1)
    scratch = dict(
        q_tile=tile((warpgroups, queries, head_dim), dtype),
        p_tile=tile((warpgroups, queries, blocks.keys), dtype, columns=value_dim),
        m_l_tile=plgpu.SMEM((warpgroups, 2, queries), jnp.float32),
        seen=plgpu.SMEM((warpgroups, 2 + words, queries), jnp.int32),
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=warpgroups),
        k_slots=tile(k_ring, k_pages.dtype, columns=CHUNK),
        v_slots=tile(v_ring, v_pages.dtype, columns=CHUNK),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=blocks.stages),
        k_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=blocks.stages),
        v_free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=blocks.stages),
    )
    if splits == 1:
        scratch |= dict(o_tile=tile((warpgroups, queries, columns), dtype))
    elif keys_are_rows:  # (a turned store into a tile exists for 16 bits only)
        scratch |= dict(o_tile=plgpu.SMEM((warpgroups, columns, queries), jnp.float32))
    else:
        scratch |= dict(o_tile=tile((warpgroups, queries, columns), jnp.float32))
    if warpgroups > 1:
        scratch |= dict(tail_ready=plgpu.Barrier(num_arrivals=warpgroups))
    if quantized:
        scratch |= dict(
            k_scale_slots=plgpu.SMEM(k_ring[:2], jnp.float32),
            v_scale_slots=plgpu.SMEM(k_ring[:2], jnp.float32),
            k_tile=tile(k_ring[1:], dtype),
            v_tile=tile(v_ring[1:], dtype),
        )

    names = (*operands, *outputs)

    def kernel(*refs: Any, **scratch: Any) -> None:
        r = dict(zip(names, refs, strict=True)) | scratch
        number = (count - 1) - lax.axis_index("tile")  # the last tiles of a prompt see most: they start first
        head, split, part, thread = (lax.axis_index(name) for name in ("head", "split", "value_part", "warpgroup"))
        first_column = part * value_dim
        span = Span(*(r["spans"][number, i] for i in range(len(Span._fields))))
        in_layer = {name: r[name].at[r["layer"][0]] for name in ("k", "v", "k_scales", "v_scales") if name in r}
        rings = [
            PageRing(
                in_layer[x], wanted, r[f"{x}_slots"], r[f"{x}_full"], r[f"{x}_free"],
                in_layer.get(f"{x}_scales"), r.get(f"{x}_scale_slots"),
            )
            for x, wanted in (("k", slice(None)), ("v", pl.ds(first_column, value_dim)))
        ]  # fmt: skip
        key_ring, value_ring = rings

        # This split's blocks of keys: first_block … first_block + mine − 1.
        low = lax.div(span.first, jnp.int32(blocks.keys))
        total = jnp.maximum(_ceil_div(span.end, blocks.keys) - low, 0)
        share = _ceil_div(total, splits)
        first_block = low + split * share
        mine = jnp.maximum(jnp.minimum(share, total - split * share), 0)

        def page_ids(i: jax.Array) -> list[jax.Array]:
            first, last = lax.div(span.first, jnp.int32(page_size)), lax.div(span.end - 1, jnp.int32(page_size))
            columns = [(first_block + i) * per_block + j for j in range(per_block)]
            return [r["table"][span.row, jnp.clip(c, first, last)] for c in columns]

        @pl.when(thread == warpgroups)
        def _producer() -> None:
            @plgpu.warp_map
            def _(warp: jax.Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    produce(rings, blocks.stages, head, mine, page_ids)

        @pl.when(thread < warpgroups)
        def _consumer() -> None:
            q_tile, p_tile, seen = r["q_tile"].at[thread], r["p_tile"].at[thread], r["seen"].at[thread]
            plgpu.copy_gmem_to_smem(r["query"].at[number, head, thread], q_tile, r["q_full"].at[thread])
            plgpu.copy_gmem_to_smem(r["visible"].at[number, thread], seen, r["q_full"].at[thread])

            def vector(value: float) -> jax.Array:
                return plgpu.layout_cast(jnp.full((queries,), value, jnp.float32), orientation.query_layout)

            m, l = vector(MASKED), vector(0.0)  # noqa: E741
            if sinks is not None:
                sink = plgpu.load(r["sinks"].at[head], layout=orientation.query_layout, optimized=False)
                m, l = lax.cond(split == 0, lambda: (sink, vector(1.0)), lambda: (m, l))  # noqa: E741
            zeros = jnp.zeros(orientation.shape(queries, columns), jnp.float32)
            acc = tuple(plgpu.layout_cast(zeros, WGMMA) for _ in range(0, value_dim, columns))
            plgpu.barrier_wait(r["q_full"].at[thread])

            def key_numbers(i: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
                return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) + (first_block + i) * blocks.keys

            def mask(s: jax.Array, i: jax.Array) -> jax.Array:
                def of_queries(row: int) -> jax.Array:
                    x = plgpu.load(seen.at[row], layout=orientation.query_layout, optimized=False)
                    return over_keys(x, blocks.keys)

                key = key_numbers(i, s.shape, orientation.keys)
                visible = (key >= of_queries(0)) & (key < of_queries(1))
                for w in range(words):
                    bit = key - (span.own + 32 * w)
                    word = lax.shift_right_logical(of_queries(2 + w), bit & 31)
                    visible |= (bit >= 0) & (bit < 32) & ((word & 1) == 1)
                return jnp.where(visible, s, MASKED)

            def unquantized(ring: PageRing, slot: jax.Array, to: Any) -> tuple[Any, jax.Array | None]:
                """The slot's tile as wgmma takes it, and its keys' scales. 8-bit values are widened into `to`."""
                if not quantized:
                    return ring.slots.at[slot], None
                # (Scales are read before commit_smem, whose fence orders the read before the slot's next copy.)
                scales = plgpu.load(ring.scale_slots.at[slot], layout=orientation.key_layout, optimized=False)
                for c in range(0, to.shape[1], CHUNK):
                    part = pl.ds(c, CHUNK)
                    x = plgpu.load(ring.slots.at[slot, :, part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                    x = x.astype(dtype) if x.dtype == jnp.int8 else x.astype(jnp.float32).astype(dtype)
                    to[:, part] = plgpu.layout_cast(x, WGMMA)
                plgpu.commit_smem()
                return to, scales

            def clear_unwritten(values: Any, i: jax.Array) -> None:
                """Zeros the values past the last key: they may be NaN, and 0 · NaN is NaN."""

                def clear() -> None:
                    key = key_numbers(i, (blocks.keys, CHUNK), 0)
                    for c in range(0, value_dim, CHUNK):
                        part = values.at[:, pl.ds(c, CHUNK)]
                        part[...] = jnp.where(key < span.end, plgpu.load(part, layout=WGMMA), 0)
                    plgpu.commit_smem()

                @pl.when((first_block + i + 1) * blocks.keys > span.end)
                def _() -> None:
                    if warpgroups == 1:
                        return clear()
                    pl.when(thread == 0)(clear)
                    plgpu.barrier_arrive(r["tail_ready"])
                    plgpu.barrier_wait(r["tail_ready"])

            def block(i: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
                acc, m, l = state  # noqa: E741
                slot = lax.rem(i, jnp.int32(blocks.stages))
                wanted = i + blocks.stages < mine
                start = (first_block + i) * blocks.keys

                plgpu.barrier_wait(key_ring.full.at[slot])
                keys, scales = unquantized(key_ring, slot, r.get("k_tile"))
                s = orientation.scores(q_tile, keys)
                key_ring.release(slot, wanted)
                if scales is not None:
                    s *= orientation.over_queries(scales, queries)
                s = scoring(s)
                plain = (start >= span.plain_from) & (start + blocks.keys <= span.plain_until)
                s = lax.cond(plain, lambda: s, lambda: mask(s, i))

                new_m = jnp.maximum(m, s.max(axis=orientation.keys))
                keep = jnp.exp2(m - new_m)
                p = jnp.exp2(s - over_keys(new_m, blocks.keys))
                l = l * keep + p.sum(axis=orientation.keys)  # noqa: E741

                plgpu.barrier_wait(value_ring.full.at[slot])
                values, scales = unquantized(value_ring, slot, r.get("v_tile"))
                clear_unwritten(values, i)
                if scales is not None:
                    p *= orientation.over_queries(scales, queries)
                orientation.view(p_tile)[...] = plgpu.layout_cast(p.astype(dtype), WGMMA)
                plgpu.commit_smem()
                added = []
                for c, old in enumerate(acc):
                    part = values.at[:, pl.ds(c * columns, columns)] if len(acc) > 1 else values
                    added.append(old * over_keys(keep, columns) + orientation.weighted(p_tile, part))
                value_ring.release(slot, wanted)
                return tuple(added), new_m, l

            acc, m, l = lax.fori_loop(0, mine, block, (acc, m, l))  # noqa: E741

            if splits == 1:
                inverse = jnp.where(m > MASKED / 2, 1 / jnp.maximum(l, 1e-30), 0.0)
                acc = tuple((x * over_keys(inverse, columns)).astype(dtype) for x in acc)
                o_tile = orientation.view(r["o_tile"].at[thread])
                out = r["out"].at[number, head, thread]
            else:
                m_l = r["m_l_tile"].at[thread]
                m_l[0], m_l[1] = m, l
                plgpu.commit_smem()

                @pl.when(part == 0)
                def _() -> None:
                    plgpu.copy_smem_to_gmem(m_l, r["m_l"].at[number, head, thread, split])

                o_tile = r["o_tile"].at[thread]
                out = r["out"].at[number, head, thread, split]
            for c, x in enumerate(acc):
                if c:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_tile[...] = plgpu.layout_cast(x, WGMMA)
                plgpu.commit_smem()
                of_out = [slice(None), pl.ds(first_column + c * columns, columns)]
                of_out = of_out if orientation.keys == 1 or splits == 1 else of_out[::-1]
                plgpu.copy_smem_to_gmem(r["o_tile"].at[thread], out.at[tuple(of_out)])
            plgpu.wait_smem_to_gmem(0)

    result = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(count, splits, kv_heads, blocks.value_parts),
        grid_names=("tile", "split", "head", "value_part"),  # heads before splits: those of a page lie side by side
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands.values())
    if splits == 1:
        return result[0]
    out, m_l = result
    return merge(out.swapaxes(-1, -2) if keys_are_rows else out, m_l).astype(dtype)


def merge(out: jax.Array, m_l: jax.Array) -> jax.Array:
    """Log-sum-exp merge of splits: out [..., splits, queries, head_dim], m_l [..., splits, 2, queries]."""
    m, l = m_l[..., 0, :], m_l[..., 1, :]  # noqa: E741
    best = m.max(-2, keepdims=True)
    weight = jnp.where(best > MASKED / 2, jnp.exp2(m - best), 0.0)
    total = (weight * l).sum(-2)
    summed = (weight[..., None] * out).sum(-3)
    return (1 / jnp.maximum(total, 1e-30))[..., None] * summed


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return lax.div(a + (b - 1), jnp.int32(b))
