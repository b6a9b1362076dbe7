"""The paged-attention ops against a naive float32 reference, and the writes into the cache.

`AttentionContract` holds for every implementation; a new one is added to `IMPLEMENTATIONS` and no more.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import pytest

from specax.pallas_kernels import copy_pages, paged_attention, paged_prefill_attention, write_kv

IMPLEMENTATIONS = ["xla", None]
LAYERS, LAYER = 2, 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TOLERANCE = {np.dtype(np.float32): 2e-5, BFLOAT16: 2e-2}
GARBAGE = 1e4  # finite, in slots of live pages that hold no key yet

decode_op = jax.jit(paged_attention, static_argnames=("layer", "scale", "implementation"))
prefill_op = jax.jit(paged_prefill_attention, static_argnames=("layer", "scale", "implementation"))


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shapes that one compiled program serves."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    keys: int = 320  # that a page table can name
    dtype: Any = np.float32

    @property
    def pages_per_row(self) -> int:
        return self.keys // self.page_size

    @property
    def scale(self) -> float:
        return float(self.head_dim) ** -0.5


GQA = Geometry(heads=6, kv_heads=3, head_dim=16, page_size=8)
GEOMETRIES = {
    "gqa": GQA,
    "mha_small_pages": Geometry(heads=4, kv_heads=4, head_dim=8, page_size=4),
    "mqa_large_pages": Geometry(heads=8, kv_heads=1, head_dim=32, page_size=16),
    "bf16_cache": dataclasses.replace(GQA, dtype=BFLOAT16),
}


@dataclasses.dataclass
class Pool:
    """A cache, and the page table of each row; the keys of row r lie where `tables[r]` says."""

    k: np.ndarray
    v: np.ndarray
    tables: np.ndarray

    @classmethod
    def make(cls, rng: np.random.Generator, g: Geometry, lengths: list[int], unused: float = np.nan) -> "Pool":
        """Rows of `lengths` keys on scattered pages. Pages that no row names, and other layers, hold `unused`."""
        counts = [-(-length // g.page_size) for length in lengths]
        # The pool's size does not hang on the lengths, so that every case runs the same program.
        pages = len(lengths) * g.pages_per_row + 8
        shape = (LAYERS, pages, g.kv_heads, g.page_size, g.head_dim)
        k, v = np.full(shape, unused, np.float32), np.full(shape, unused, np.float32)
        k[:, 0], v[:, 0] = GARBAGE, GARBAGE
        free = iter(rng.permutation(np.arange(1, pages)).tolist())
        tables = np.zeros((len(lengths), g.pages_per_row), np.int32)
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for index in range(count):
                page = tables[row, index] = next(free)
                filled = min(g.page_size, length - index * g.page_size)
                for array in (k, v):
                    array[LAYER, page] = GARBAGE
                    array[LAYER, page, :, :filled] = rng.normal(size=(g.kv_heads, filled, g.head_dim))
        return cls(k.astype(g.dtype), v.astype(g.dtype), tables)

    def keys_and_values(self, row: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Float32 [length, kv_heads, head_dim] of a row, gathered slot by slot."""
        size = self.k.shape[3]
        at = [(int(self.tables[row, p // size]), p % size) for p in range(length)]
        read = lambda array: np.array([array[LAYER, page, :, offset] for page, offset in at], np.float32)  # noqa: E731
        return read(self.k), read(self.v)

    def permuted(self, rng: np.random.Generator) -> "Pool":
        """The same rows with every physical page somewhere else (the trash page too)."""
        to = rng.permutation(self.k.shape[1])
        k, v = np.empty_like(self.k), np.empty_like(self.v)
        k[:, to], v[:, to] = self.k, self.v
        return Pool(k, v, to[self.tables].astype(np.int32))


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray, scale: float) -> np.ndarray:
    """One query [heads, head_dim] over the keys where `seen`: the textbook formula, head by head."""
    group = q.shape[0] // keys.shape[1]
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        scores = keys[seen, head // group] @ q[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[seen, head // group] / weights.sum()
    return out


def reference_decode(
    q: np.ndarray, pool: Pool, contexts: list[int], scale: float, sees: np.ndarray | None = None
) -> np.ndarray:
    """sees [rows, N, N]: own key j visible to own query i; None: causal."""
    n, out = q.shape[1], np.zeros_like(q)
    for row, context in enumerate(contexts):
        if context < 0:
            continue
        keys, values = pool.keys_and_values(row, context + n)
        for i in range(n):
            own = np.arange(n) <= i if sees is None else sees[row, i]
            out[row, i] = attend(q[row, i], keys, values, np.concatenate([np.ones(context, bool), own]), scale)
    return out


def reference_prefill(q: np.ndarray, pool: Pool, lengths: list[int], contexts: list[int], scale: float) -> np.ndarray:
    out, at = np.zeros_like(q), 0
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        keys, values = pool.keys_and_values(row, context + length)
        for i in range(length):
            seen = np.arange(context + length) <= context + i
            out[at + i] = attend(q[at + i], keys, values, seen, scale)
        at += length
    return out


def random_trees(rng: np.random.Generator, rows: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Ancestor matrices [rows, n, n] of random trees, and the same packed into 32-bit words."""
    sees = np.zeros((rows, n, n), bool)
    for row in range(rows):
        for i in range(n):
            if i:
                sees[row, i] = sees[row, rng.integers(0, i)]
            sees[row, i, i] = True
    packed = np.zeros((rows, n, -(-n // 32)), np.uint32)
    for row, i, j in np.argwhere(sees):
        packed[row, i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    return sees, packed


def decode(
    q: np.ndarray, pool: Pool, contexts: list[int], g: Geometry, implementation: Any, mask: np.ndarray | None = None
) -> np.ndarray:
    static = {"layer": LAYER, "scale": g.scale, "implementation": implementation}
    context = np.asarray(contexts, np.int32)
    return np.asarray(decode_op(q, pool.k, pool.v, pool.tables, context, tree_mask=mask, **static))


def prefill(
    q: np.ndarray, pool: Pool, lengths: list[int], contexts: list[int], g: Geometry, implementation: Any
) -> np.ndarray:
    static = {"layer": LAYER, "scale": g.scale, "implementation": implementation}
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    return np.asarray(prefill_op(q, pool.k, pool.v, starts, pool.tables, np.asarray(contexts, np.int32), **static))


# Eight rows each: short ones, page and block boundaries (blocks of 32, 64, 128, 256 keys), and padding.
DECODE_CONTEXTS = {
    "short": lambda size: [0, 1, 2, size - 1, size, size + 1, 2 * size, 31],
    "blocks": lambda size: [63, 64, 65, 127, 128, 129, 255, 256],
    "long": lambda size: [0, 257, 300, 319, -1, 1, 33, -1],
    "padding": lambda size: [-1] * 8,
    "one_live": lambda size: [-1, -1, 5, -1, -1, -1, -1, -1],
}
# Five rows each within 160 tokens: (lengths, contexts).
PREFILL_ROWS = {
    "ragged": ([70, 0, 3, 64, 5], [0, 0, 130, 5, 200]),
    "whole": ([32, 32, 32, 32, 32], [0, 1, 7, 8, 9]),
    "one": ([0, 0, 160, 0, 0], [0, 0, 160, 0, 0]),
    "single_tokens": ([1, 1, 1, 1, 1], [0, 63, 127, 128, 319]),
    "tile_edges": ([63, 1, 65, 0, 20], [1, 255, 64, 40, 256]),
    "nothing": ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
class TestAttentionContract:
    """What every implementation of both ops owes."""

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("contexts", DECODE_CONTEXTS)
    def test_decode(self, implementation, geometry, contexts, rng):
        g = GEOMETRIES[geometry]
        context = DECODE_CONTEXTS[contexts](g.page_size)
        pool = Pool.make(rng, g, [c + 1 for c in context])
        q = rng.normal(size=(8, 1, g.heads, g.head_dim)).astype(np.float32)
        got = decode(q, pool, context, g, implementation)
        np.testing.assert_allclose(got, reference_decode(q, pool, context, g.scale), atol=TOLERANCE[np.dtype(g.dtype)])
        assert not got[np.array(context) < 0].any()

    @pytest.mark.parametrize("n", [2, 7, 33])
    @pytest.mark.parametrize("geometry", ["gqa", "bf16_cache"])
    def test_tree(self, implementation, geometry, n, rng):
        g = GEOMETRIES[geometry]
        context = [0, 1, g.page_size, 64 - n, 65, 128, 250, -n]
        pool = Pool.make(rng, g, [c + n for c in context])
        q = rng.normal(size=(8, n, g.heads, g.head_dim)).astype(np.float32)
        sees, mask = random_trees(rng, 8, n)
        got = decode(q, pool, context, g, implementation, mask)
        want = reference_decode(q, pool, context, g.scale, sees)
        np.testing.assert_allclose(got, want, atol=TOLERANCE[np.dtype(g.dtype)])
        assert not got[-1].any()

    def test_without_a_mask_own_keys_are_causal(self, implementation, rng):
        n, context = 7, [0, 1, 60, 64, 121, 200, 13, -7]
        pool = Pool.make(rng, GQA, [c + n for c in context])
        q = rng.normal(size=(8, n, GQA.heads, GQA.head_dim)).astype(np.float32)
        got = decode(q, pool, context, GQA, implementation)
        np.testing.assert_allclose(got, reference_decode(q, pool, context, GQA.scale), atol=2e-5)

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("rows", PREFILL_ROWS)
    def test_prefill(self, implementation, geometry, rows, rng):
        g = dataclasses.replace(GEOMETRIES[geometry], keys=384)
        lengths, contexts = PREFILL_ROWS[rows]
        pool = Pool.make(rng, g, [a + b for a, b in zip(lengths, contexts, strict=True)])
        q = rng.normal(size=(160, g.heads, g.head_dim)).astype(np.float32)
        got = prefill(q, pool, lengths, contexts, g, implementation)
        want = reference_prefill(q, pool, lengths, contexts, g.scale)
        np.testing.assert_allclose(got, want, atol=TOLERANCE[np.dtype(g.dtype)])
        assert not got[sum(lengths) :].any()

    @pytest.mark.parametrize("seed", range(6))
    def test_prefill_of_random_rows(self, implementation, seed):
        rng, g = np.random.default_rng(seed), dataclasses.replace(GQA, keys=384)
        cuts = np.sort(rng.integers(0, 161, size=5))
        lengths = np.diff([0, *cuts]).tolist()
        contexts = [int(rng.integers(0, g.keys - length)) for length in lengths]
        pool = Pool.make(rng, g, [a + b for a, b in zip(lengths, contexts, strict=True)])
        q = rng.normal(size=(160, g.heads, g.head_dim)).astype(np.float32)
        got = prefill(q, pool, lengths, contexts, g, implementation)
        np.testing.assert_allclose(got, reference_prefill(q, pool, lengths, contexts, g.scale), atol=2e-5)

    @pytest.mark.parametrize("kind", ["decode", "tree", "prefill"])
    def test_unseen_slots_may_hold_nan(self, implementation, kind, rng):
        """In the trash page, where padding writes, and behind a row's last key, where an earlier owner of the
        page may have left what overflowed: a request that fails must not harm the next one on its pages."""
        g = dataclasses.replace(GQA, keys=384) if kind == "prefill" else GQA
        n = {"decode": 1, "tree": 7}.get(kind, 0)
        lengths, contexts = PREFILL_ROWS["ragged"] if kind == "prefill" else ([n] * 8, [0, 300, -n, 9, 64, -n, 17, 130])
        pool = Pool.make(rng, g, [a + b for a, b in zip(lengths, contexts, strict=True)])
        for array in (pool.k, pool.v):
            array[array == GARBAGE] = np.nan
        if kind == "prefill":
            q = rng.normal(size=(160, g.heads, g.head_dim)).astype(np.float32)
            got = prefill(q, pool, lengths, contexts, g, implementation)
            want = reference_prefill(q, pool, lengths, contexts, g.scale)
        else:
            q = rng.normal(size=(8, n, g.heads, g.head_dim)).astype(np.float32)
            sees, mask = random_trees(rng, 8, n) if kind == "tree" else (None, None)
            got = decode(q, pool, contexts, g, implementation, mask)
            # (No row reads another's: unseen own keys are written, hence finite.)
            want = reference_decode(q, pool, contexts, g.scale, sees)
        np.testing.assert_allclose(got, want, atol=2e-5)

    def test_physical_order_of_pages_changes_no_bit(self, implementation, rng):
        context = DECODE_CONTEXTS["long"](GQA.page_size)
        pool = Pool.make(rng, GQA, [c + 1 for c in context])
        q = rng.normal(size=(8, 1, GQA.heads, GQA.head_dim)).astype(np.float32)
        first = decode(q, pool, context, GQA, implementation)
        np.testing.assert_array_equal(first, decode(q, pool.permuted(rng), context, GQA, implementation))
        g = dataclasses.replace(GQA, keys=384)
        lengths, contexts = PREFILL_ROWS["ragged"]
        pool = Pool.make(rng, g, [a + b for a, b in zip(lengths, contexts, strict=True)])
        q = rng.normal(size=(160, g.heads, g.head_dim)).astype(np.float32)
        first = prefill(q, pool, lengths, contexts, g, implementation)
        np.testing.assert_array_equal(first, prefill(q, pool.permuted(rng), lengths, contexts, g, implementation))

    def test_rows_do_not_mix(self, implementation, rng):
        """A row's output is the same bits wherever it stands and whoever else is there."""
        context = [40, 0, 130, 7, 64, 300, 12, 1]
        pool = Pool.make(rng, GQA, [c + 1 for c in context])
        q = rng.normal(size=(8, 1, GQA.heads, GQA.head_dim)).astype(np.float32)
        together = decode(q, pool, context, GQA, implementation)
        order = rng.permutation(8)
        moved = Pool(pool.k, pool.v, pool.tables[order])
        got = decode(q[order], moved, [context[i] for i in order], GQA, implementation)
        np.testing.assert_array_equal(got, together[order])
        for row in (0, 2, 5):
            alone = [c if i == row else -1 for i, c in enumerate(context)]
            tables = np.where(np.arange(8)[:, None] == row, pool.tables, 0).astype(np.int32)
            got = decode(q, Pool(pool.k, pool.v, tables), alone, GQA, implementation)
            np.testing.assert_array_equal(got[row], together[row])

    def test_a_named_implementation_that_is_not_there(self, implementation, rng, monkeypatch):
        # (The tests' shape checks would refuse the name first.)
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        pool = Pool.make(rng, GQA, [1])
        q = np.zeros((1, 1, GQA.heads, GQA.head_dim), np.float32)
        with pytest.raises(NotImplementedError, match="no_such_kernel"):
            decode(q, pool, [0], GQA, "no_such_kernel")
        with pytest.raises(NotImplementedError, match="no_such_kernel"):
            prefill(q[0], pool, [1], [0], GQA, "no_such_kernel")

    def test_the_query_dtype_is_the_output_dtype(self, implementation):
        cache = jnp.zeros((1, 3, 1, 4, 8), jnp.float32)
        static = {"layer": 0, "scale": 1.0, "implementation": implementation}
        table, context = jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32)
        q = jnp.zeros((2, 1, 2, 8), jnp.bfloat16)
        out = jax.eval_shape(partial(paged_attention, **static), q, cache, cache, table, context)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        starts = jnp.zeros(3, jnp.int32)
        out = jax.eval_shape(partial(paged_prefill_attention, **static), q[:, 0], cache, cache, starts, table, context)
        assert (out.shape, out.dtype) == (q[:, 0].shape, q.dtype)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_write_kv(dtype, rng):
    pages = rng.normal(size=(3, 6, 2, 4, 8)).astype(dtype)
    slots = np.array([4, 7, 22, 9, 0, 0, 3], np.int32)  # two padding tokens on the trash page
    new = rng.normal(size=(7, 2, 8)).astype(np.float32)
    got = np.asarray(jax.jit(write_kv, static_argnums=1)(pages, 1, new, slots))
    want = pages.copy()
    for token, slot in zip(new, slots.tolist(), strict=True):
        want[1, slot // 4, :, slot % 4] = token.astype(dtype)
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
    np.testing.assert_array_equal(got[1, 0, :, 3], want[1, 0, :, 3])
    assert got.dtype == pages.dtype


def test_copy_pages_in_order(rng):
    pages = rng.normal(size=(3, 7, 2, 4, 8)).astype(np.float32)
    source, target = np.array([1, 2, 5, 2, 0, 0], np.int32), np.array([2, 3, 1, 6, 0, 0], np.int32)
    got = np.asarray(jax.jit(copy_pages)(pages, source, target))
    want = pages.copy()
    for a, b in zip(source, target, strict=True):  # 1 → 2 → 3: the second copy reads what the first wrote
        want[:, b] = want[:, a]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got[:, 3], pages[:, 1])
