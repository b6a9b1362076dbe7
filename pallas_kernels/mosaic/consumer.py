"""The consumers' work: the online softmax over blocks of keys (Milakov & Gimelshein 2018; Dao et al. 2022).

All of it happens in the registers of one warpgroup, with tiles in shared memory between the two products:

    S = Q·Kᵀ                      wgmma
    S = mask(cap(scale · S))      the mask only where some query does not see every key
    m' = max(m, rowmax S)
    P = exp(S − m')
    l = l · exp(m − m') + rowsum P
    O = O · exp(m − m') + P·V     wgmma
"""

import dataclasses
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from specax.pallas_kernels.mosaic.geometry import Geometry
from specax.pallas_kernels.mosaic.page_ring import PageRing
from specax.pallas_kernels.mosaic.query_tiles import Span
from specax.pallas_kernels.mosaic.tensor_core import CHUNK, WGMMA, Orientation

MASKED = -1e30  # finite, so that exp(MASKED − MASKED) is no NaN
LOG2_E = math.log2(math.e)

type State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]  # O in chunks of columns, m, l


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What becomes of a product q·k. Static."""

    scale: float
    soft_cap: float | None = None

    def __call__(self, s: jax.Array) -> jax.Array:
        """Scores in base 2."""
        if self.soft_cap is None:
            return s * (self.scale * LOG2_E)
        # tanh x = 1 − 2 / (1 + e^2x). The GPU's own tanh is off by up to 2⁻¹¹, which a cap of 50 makes 2 % of a weight.
        capped = 1 - 2 / (1 + jnp.exp2(s * (2 * LOG2_E * self.scale / self.soft_cap)))
        return capped * (self.soft_cap * LOG2_E)


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One warpgroup with its queries."""

    sizes: Geometry
    scoring: Scoring
    refs: dict[str, Any]  # operands, outputs and scratch by name
    rings: list[PageRing]  # of K, and unless the cache is latent of V
    span: Span  # of the thread block's query tile
    warpgroup: jax.Array  # its number

    @property
    def orientation(self) -> Orientation:
        return self.sizes.orientation

    def local(self, name: str) -> Any:
        """This warpgroup's part of a tile in shared memory."""
        return self.refs[name].at[self.warpgroup]

    def start(self, tile: jax.Array, head: jax.Array, split: jax.Array) -> State:
        """Loads the queries. No key is seen yet; the first split starts with the sinks, keys of value 0."""
        full = self.local("q_full")
        plgpu.copy_gmem_to_smem(self.refs["query"].at[tile, head, self.warpgroup], self.local("q_tile"), full)
        plgpu.copy_gmem_to_smem(self.refs["visible"].at[tile, self.warpgroup], self.local("seen"), full)
        sizes, layout = self.sizes, self.orientation.query_layout

        def vector(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full((sizes.queries,), value, jnp.float32), layout)

        m, l = vector(MASKED), vector(0.0)  # noqa: E741
        if "sinks" in self.refs:
            logits = plgpu.load(self.refs["sinks"].at[head], layout=layout, optimized=False)
            m, l = lax.cond(split == 0, lambda: (logits, vector(1.0)), lambda: (m, l))  # noqa: E741
        zeros = jnp.zeros(self.orientation.shape(sizes.queries, sizes.columns), jnp.float32)
        acc = tuple(plgpu.layout_cast(zeros, WGMMA) for _ in range(0, sizes.value_dim, sizes.columns))
        plgpu.barrier_wait(full)
        return acc, m, l

    def take(self, state: State, block: jax.Array, i: jax.Array, refilled: jax.Array) -> State:
        """Takes in block number `block` of the sequence, the i-th of this thread block.

        `refilled`: whether a later block will take this one's slots.
        """
        acc, m, l = state  # noqa: E741
        sizes, orientation, keys = self.sizes, self.orientation, self.sizes.blocks.keys
        slot = lax.rem(i, jnp.int32(sizes.blocks.stages))
        start = block * keys  # the block's first key

        k_tile, scales = self._operand(0, slot, refilled, scale_values=False)
        s = orientation.scores(self.local("q_tile"), k_tile)
        if not sizes.latent:
            self._release(0, slot, refilled)
        if scales is not None:
            s *= orientation.spread_over_queries(scales, sizes.queries)
        s = self.scoring(s)
        plain = (start >= self.span.plain_from) & (start + keys <= self.span.plain_until)
        s = lax.cond(plain, lambda: s, lambda: self._mask(s, start))

        new_m = jnp.maximum(m, s.max(axis=orientation.key_axis))
        keep = jnp.exp2(m - new_m)
        p = jnp.exp2(s - orientation.spread_over_keys(new_m, keys))
        l = l * keep + p.sum(axis=orientation.key_axis)  # noqa: E741

        v_tile = k_tile  # of a latent cache
        if not sizes.latent:
            # Scales of values go into the weights, or into the values: with queries as rows that takes fewer registers,
            # and float16 is too narrow for such weights.
            scale_values = sizes.dtype == jnp.float16 or not orientation.keys_are_rows
            v_tile, scales = self._operand(1, slot, refilled, scale_values)
            if scales is not None:
                p = self._times_scales(p, scales, start)
        self._clear_unwritten(v_tile, start)
        p_tile = self.local("p_tile")
        orientation.view(p_tile)[...] = plgpu.layout_cast(p.astype(sizes.dtype), WGMMA)
        plgpu.commit_smem()
        added = []
        for c, old in enumerate(acc):
            columns = v_tile.at[:, pl.ds(c * sizes.columns, sizes.columns)]
            kept = old * orientation.spread_over_keys(keep, sizes.columns)
            added.append(kept + orientation.weighted(p_tile, columns))
        self._release(-1, slot, refilled)
        return tuple(added), new_m, l

    def _operand(
        self, number: int, slot: jax.Array, refilled: jax.Array, scale_values: bool
    ) -> tuple[Any, jax.Array | None]:
        """The tile of a ring's slot as wgmma takes it, once it is full, and the scales of its keys.

        8-bit values are widened into a tile of their own, which frees the slot at once. With `scale_values` they are
        scaled there, too, and no scales are given.
        """
        ring, wide = self.rings[number], self.refs.get("k_wide" if number == 0 else "v_wide")
        plgpu.barrier_wait(ring.full.at[slot])
        if wide is None:
            return ring.slots.at[slot], None
        narrow = plgpu.Layout.WGMMA_UPCAST_2X
        layout = narrow.reduce(1) if scale_values else self.orientation.key_layout
        scales = plgpu.load(ring.scale_slots.at[slot], layout=layout, optimized=False)
        for c in range(0, wide.shape[1], CHUNK):
            x = plgpu.load(ring.slots.at[slot, :, pl.ds(c, CHUNK)], layout=narrow).astype(jnp.float32)
            if scale_values:
                x *= lax.broadcast_in_dim(scales, x.shape, [0])
            wide[:, pl.ds(c, CHUNK)] = plgpu.layout_cast(x.astype(self.sizes.dtype), WGMMA)
        plgpu.commit_smem()  # orders these reads before the slot's next copy, and the stores before wgmma
        ring.release(slot, refilled)
        return wide, None if scale_values else scales

    def _release(self, number: int, slot: jax.Array, refilled: jax.Array) -> None:
        """After a product of the slot's own tile."""
        if not self.sizes.quantized:
            self.rings[number].release(slot, refilled)

    def _times_scales(self, p: jax.Array, scales: jax.Array, start: jax.Array) -> jax.Array:
        """Weights times their values' scales; those past the last key may be NaN, which 0 would not undo."""
        scaled = p * self.orientation.spread_over_queries(scales, self.sizes.queries)

        def written() -> jax.Array:
            key = plgpu.broadcasted_iota(jnp.int32, p.shape, self.orientation.key_axis, layout=WGMMA) + start
            return jnp.where(key < self.span.end, scaled, 0.0)

        return lax.cond(start + self.sizes.blocks.keys > self.span.end, written, lambda: scaled)

    def _mask(self, s: jax.Array, start: jax.Array) -> jax.Array:
        """Scores of the block of keys from `start` on, MASKED where a query does not see the key."""
        keys = self.sizes.blocks.keys
        key = plgpu.broadcasted_iota(jnp.int32, s.shape, self.orientation.key_axis, layout=WGMMA)
        bits = self.orientation.spread_over_keys(self._visible_bits(start), keys)
        for first in range(32, keys, 32):
            word = self.orientation.spread_over_keys(self._visible_bits(start + first), keys)
            bits = jnp.where(key < first, bits, word)
        return jnp.where(lax.shift_right_logical(bits, key & 31) & 1 == 1, s, MASKED)

    def _visible_bits(self, start: jax.Array) -> jax.Array:
        """Which of the 32 keys from `start` on each query sees: int32 [queries], key start + b in bit b."""
        seen = self.local("seen")

        def load(row: int) -> jax.Array:
            return plgpu.load(seen.at[row], layout=self.orientation.query_layout, optimized=False)

        def below(key: jax.Array) -> jax.Array:
            n = jnp.clip(key - start, 0, 32)
            return jnp.where(n == 32, -1, lax.shift_left(jnp.full_like(n, 1), n & 31) - 1)

        bits = below(load(1)) & ~below(load(0))
        for w in range(self.sizes.words):
            shift = start - (self.span.tree_from + 32 * w)  # of the tree word's bits towards the block's
            word = load(2 + w)
            down = lax.shift_right_logical(word, jnp.full_like(word, jnp.clip(shift, 0, 31)))
            up = lax.shift_left(word, jnp.full_like(word, jnp.clip(-shift, 0, 31)))
            moved = jnp.where(jnp.full_like(word, shift) >= 0, down, up)
            bits |= jnp.where(jnp.full_like(word, jnp.abs(shift)) < 32, moved, 0)
        return bits

    def _clear_unwritten(self, values: Any, start: jax.Array) -> None:
        """Zeros the values past the last key: whatever lies there may be NaN, and 0 · NaN is NaN."""
        keys = self.sizes.blocks.keys

        def clear() -> None:
            key = plgpu.broadcasted_iota(jnp.int32, (keys, CHUNK), 0, layout=WGMMA) + start
            for c in range(0, self.sizes.value_dim, CHUNK):
                part = values.at[:, pl.ds(c, CHUNK)]
                part[...] = jnp.where(key < self.span.end, plgpu.load(part, layout=WGMMA), 0)
            plgpu.commit_smem()

        @pl.when(start + keys > self.span.end)
        def _() -> None:
            if self.sizes.warpgroups == 1:
                return clear()
            pl.when(self.warpgroup == 0)(clear)  # the others wait for it
            plgpu.barrier_arrive(self.refs["cleared"])
            plgpu.barrier_wait(self.refs["cleared"])

    def finish(self, state: State, tile: jax.Array, head: jax.Array, split: jax.Array, part: jax.Array) -> None:
        """Writes O / l to the tile of the output, or O, m and l to the split's place."""
        acc, m, l = state  # noqa: E741
        sizes, orientation, o_tile = self.sizes, self.orientation, self.local("o_tile")
        at: tuple[Any, ...] = (tile, head, self.warpgroup)
        if not sizes.plan.partial:
            inverse = jnp.where(m > MASKED / 2, 1 / jnp.maximum(l, 1e-30), 0.0)
            acc = tuple((x * orientation.spread_over_keys(inverse, sizes.columns)).astype(sizes.dtype) for x in acc)
        else:
            at = (*at, split)
            m_l = self.local("m_l_tile")
            m_l[0], m_l[1] = m, l
            plgpu.commit_smem()
            pl.when(part == 0)(lambda: plgpu.copy_smem_to_gmem(m_l, self.refs["m_l"].at[at]))
        out = self.refs["out"].at[at]
        turned = sizes.o_is_turned
        for c, x in enumerate(acc):
            if c:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            (o_tile if turned else orientation.view(o_tile))[...] = plgpu.layout_cast(x, WGMMA)
            plgpu.commit_smem()
            columns = pl.ds(part * sizes.value_dim + c * sizes.columns, sizes.columns)
            plgpu.copy_smem_to_gmem(o_tile, out.at[columns, :] if turned else out.at[:, columns])
        plgpu.wait_smem_to_gmem(0)
