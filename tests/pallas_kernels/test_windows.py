"""Attention through a window, with and without sinks, against the definition written out key by key.

Whatever a window has left behind is taken away as the host plane would: its page-table entries are 0, and its
pages, like the trash page, hold NaN. Nothing of it may reach an output.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specax.pallas_kernels import Window, paged_attention, paged_prefill_attention, xla_attention
from tests.pallas_kernels.test_paged_attention import GARBAGE, GQA, LAYER, Geometry, Pool, random_trees

STATIC = ("layer", "scale", "window")
decode_op = jax.jit(paged_attention, static_argnames=STATIC)
prefill_op = jax.jit(paged_prefill_attention, static_argnames=STATIC)
WIDE = dataclasses.replace(GQA, keys=384)  # pages of 8 keys
WINDOWS = {
    "one_key": Window(1),
    "mistral": Window(20),
    "wider_than_most": Window(200),
    "streaming": Window(24, sinks=4, granularity=8),
    "whole_pages_of_sinks": Window(50, sinks=16, granularity=8),
    "many_sinks": Window(30, sinks=70),
}


def visible(window: Window, n: int) -> set[int]:
    """The keys that the query at position n sees, by the definition."""
    start = max(0, n + 1 - window.size)
    while start % window.granularity:
        start -= 1
    return {j for j in range(n + 1) if j >= start or j < window.sinks}


class TestWindow:
    @pytest.mark.parametrize("window", WINDOWS.values(), ids=str)
    def test_positions(self, window: Window) -> None:
        positions = np.arange(260)
        for n in positions.tolist():
            seen = visible(window, n)
            assert seen == {j for j in range(n + 1) if j >= window.start(n) or j < window.sinks}
            assert window.rebased(n) == len(seen) - 1  # its place among the keys that it sees
        for convert in (np.asarray, jnp.asarray):
            for method in (window.start, window.rebased):
                got = np.asarray(method(convert(positions)))
                assert got.tolist() == [method(n) for n in positions.tolist()]

    def test_padding_starts_at_zero(self) -> None:
        assert Window(8, 4, 4).start(-7) == 0

    @pytest.mark.parametrize("field", ["size", "sinks", "granularity"])
    def test_nonsense(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"window: {field} must be an integer ≥ [01], got -1"):
            Window(**{"size": 8, field: -1})


def reference(
    q: np.ndarray, sink_q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: list[int], sinks: int, scale: float
) -> np.ndarray:
    """One query [heads, head_dim] over the keys `seen`, head by head; those below `sinks` are scored with sink_q."""
    out, group = np.zeros_like(q), q.shape[0] // keys.shape[1]
    for head in range(q.shape[0]):
        scores = np.array([(sink_q if j < sinks else q)[head] @ keys[j, head // group] for j in seen]) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ values[seen, head // group] / weights.sum()
    return out


def take_back(pool: Pool, seen: list[set[int]]) -> None:
    """Rows' pages without a key that a query of the step sees: page-table entry 0, contents NaN."""
    size = pool.k.shape[3]
    for row, keys in enumerate(seen):
        for column in np.flatnonzero(pool.tables[row]).tolist():
            if keys.isdisjoint(range(column * size, (column + 1) * size)):
                page = pool.tables[row, column]
                pool.k[LAYER, page] = pool.v[LAYER, page] = np.nan
                pool.tables[row, column] = 0
    for array in (pool.k, pool.v):
        array[array == GARBAGE] = np.nan


def queries(rng: np.random.Generator, window: Window, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries, and what the sinks are scored with."""
    q, sink_q = rng.normal(size=(2, *shape)).astype(np.float32)
    return q, sink_q if window.sinks else q


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("n", [1, 7])
def test_decode(name: str, n: int, rng: np.random.Generator) -> None:
    """Rows of very different lengths; draft trees, whose positions are counted by depth, for n > 1."""
    window, g = WINDOWS[name], WIDE
    contexts = [0, 377, 21, -n, 9, 128, 70, 250]
    pool = Pool.make(rng, g, [c + n for c in contexts])
    q, sink_q = queries(rng, window, 8, n, g.heads, g.head_dim)
    sees, mask = random_trees(rng, 8, n)
    want, all_seen = np.zeros_like(q), list[set[int]]()
    for row, context in enumerate(contexts):
        all_seen.append(set())
        keys, values = pool.keys_and_values(row, max(context + n, 0))
        depth = sees[row].sum(1) - 1
        for i in range(n if context >= 0 else 0):
            allowed = visible(window, context + int(depth[i]))
            own = {context + j for j in np.flatnonzero(sees[row, i]).tolist() if context + int(depth[j]) in allowed}
            seen = sorted({j for j in allowed if j < context} | own)
            want[row, i] = reference(q[row, i], sink_q[row, i], keys, values, seen, window.sinks, g.scale)
            all_seen[-1].update(seen)
    take_back(pool, all_seen)
    static = {"layer": LAYER, "scale": g.scale, "window": window}
    args = (pool.k, pool.v, pool.tables, np.asarray(contexts, np.int32))
    extra = {"tree_mask": mask if n > 1 else None, "sink_query": sink_q if window.sinks else None}
    got = np.asarray(decode_op(q, *args, **static, **extra))
    np.testing.assert_allclose(got, want, atol=2e-5)
    # The same bits without the other rows.
    for row in (1, 4):
        alone = np.where(np.arange(8) == row, args[3], -n).astype(np.int32)
        np.testing.assert_array_equal(decode_op(q, *args[:3], alone, **static, **extra)[row], got[row])


def prefill_reference(
    pool: Pool, g: Geometry, window: Window, q: np.ndarray, sink_q: np.ndarray, lengths: list[int], contexts: list[int]
) -> tuple[np.ndarray, list[set[int]]]:
    out, all_seen, at = np.zeros_like(q), list[set[int]](), 0
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        keys, values = pool.keys_and_values(row, context + length)
        all_seen.append(set())
        for i in range(length):
            seen = sorted(visible(window, context + i))
            out[at + i] = reference(q[at + i], sink_q[at + i], keys, values, seen, window.sinks, g.scale)
            all_seen[-1].update(seen)
        at += length
    return out, all_seen


@pytest.mark.parametrize("name", WINDOWS)
def test_prefill(name: str, rng: np.random.Generator) -> None:
    window, g = WINDOWS[name], WIDE
    static = {"layer": LAYER, "scale": g.scale, "window": window}
    for lengths, contexts in (([70, 0, 3, 64, 5], [0, 9, 130, 5, 300]), ([0, 160, 0, 0, 0], [0, 224, 0, 0, 0])):
        pool = Pool.make(rng, g, [a + b for a, b in zip(lengths, contexts, strict=True)])
        q, sink_q = queries(rng, window, 160, g.heads, g.head_dim)
        want, seen = prefill_reference(pool, g, window, q, sink_q, lengths, contexts)
        take_back(pool, seen)
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        args = (pool.k, pool.v, starts, pool.tables, np.asarray(contexts, np.int32))
        got = np.asarray(prefill_op(q, *args, **static, sink_query=sink_q if window.sinks else None))
        np.testing.assert_allclose(got, want, atol=2e-5)
        assert not got[sum(lengths) :].any()


@pytest.mark.parametrize("name", ["mistral", "streaming"])
def test_chunks_change_no_bit(name: str, rng: np.random.Generator) -> None:
    window, g = WINDOWS[name], WIDE
    pool = Pool.make(rng, g, [160])
    q, sink_q = queries(rng, window, 160, g.heads, g.head_dim)

    def run(start: int, stop: int) -> np.ndarray:
        parts = [np.roll(x, -start, axis=0) for x in (q, sink_q)]
        cuts, context = np.array([0, stop - start], np.int32), np.array([start], np.int32)
        static: Any = {"layer": LAYER, "scale": g.scale, "window": window, "sink_query": parts[1]}
        return np.asarray(prefill_op(parts[0], pool.k, pool.v, cuts, pool.tables, context, **static))[: stop - start]

    cuts = [0, 1, 37, 101, 160]
    chunked = np.concatenate([run(a, b) for a, b in itertools.pairwise(cuts)])
    np.testing.assert_array_equal(chunked, run(0, 160))


@pytest.mark.parametrize("window", [Window(64), Window(64, sinks=4, granularity=16)], ids=str)
def test_work_grows_with_the_window_not_the_context(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, counted = xla_attention._gather, []

    def counting(pages: jax.Array, layer: int, ids: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: counted.append(ids.shape[1] * 16))  # keys per row
        return gather(pages, layer, ids)

    monkeypatch.setattr(xla_attention, "_gather", counting)
    pages = jnp.zeros((1, 2, 1, 16, 4))
    table = jnp.ones((2, 2048), jnp.int32)
    static: Any = {"layer": 0, "scale": 1.0, "window": window}
    decode = jax.jit(partial(paged_attention, **static))  # (traced here, with the counter in it)
    prefill = jax.jit(partial(paged_prefill_attention, **static))
    decode(jnp.ones((2, 1, 1, 4)), pages, pages, table, jnp.array([32000, 5], jnp.int32))
    jax.effects_barrier()
    assert 0 < sum(counted) <= 2 * (64 + 2 * 64 + 16)  # keys and values: the window, a block more, the sinks
    counted.clear()
    starts, context = jnp.array([0, 8, 16], jnp.int32), jnp.array([32000, 0], jnp.int32)
    prefill(jnp.ones((16, 1, 4)), pages, pages, starts, table, context)
    jax.effects_barrier()
    assert 0 < sum(counted) <= 2 * 2 * (64 + 2 * 128 + 16)


def test_sinks_need_a_window_as_long_as_a_row(rng: np.random.Generator) -> None:
    pool = Pool.make(rng, GQA, [9])
    q = np.zeros((1, 9, GQA.heads, GQA.head_dim), np.float32)
    with pytest.raises(ValueError, match="9 queries need a window of at least as many keys, got Window"):
        decode_op(
            q, pool.k, pool.v, pool.tables, np.zeros(1, np.int32), layer=LAYER, scale=1.0, window=Window(8, sinks=1)
        )
