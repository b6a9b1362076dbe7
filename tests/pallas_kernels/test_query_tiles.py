"""Query tiles: what each packed query may see, unpacked bit by bit, against the reference's `seen_keys`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specax.pallas_kernels import Window
from specax.pallas_kernels.mosaic import query_tiles
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles, Span
from tests.pallas_kernels.reference import packed, random_trees, seen_keys

static = ("kv_heads", "window", "queries", "warpgroups")
decode_tiles = jax.jit(query_tiles.decode_tiles, static_argnames=static)
prefill_tiles = jax.jit(query_tiles.prefill_tiles, static_argnames=static)
SMALL, LARGE = {"queries": 8, "warpgroups": 1}, {"queries": 16, "warpgroups": 2}
HEADS, KV_HEADS, GROUP, DIM = 6, 2, 3, 4


def queries(*shape: int) -> jax.Array:
    """Each entry of a [tokens…, heads, head_dim] array another number."""
    size = (*shape, HEADS, DIM)
    return jnp.arange(np.prod(size), dtype=jnp.float32).reshape(size)


def check(tiles: QueryTiles, query: Any, seen: list[set[int]], row_of: list[int]) -> None:
    """`seen`: the keys that each token sees, and `row_of` its row; padding has none."""
    np.testing.assert_array_equal(tiles.unpack(tiles.query), jnp.where(tiles.place[:, None, None] < 0, 0, query))
    count, _, warpgroups, _, _ = tiles.query.shape
    per = tiles.tokens_per_warpgroup
    visible, spans = np.asarray(tiles.visible), [Span(*s) for s in np.asarray(tiles.spans).tolist()]
    inside: dict[int, list[set[int]]] = {tile: [] for tile in range(count)}
    for token, place in enumerate(np.asarray(tiles.place).tolist()):
        if place < 0:
            assert not seen[token]
            continue
        tile, at = divmod(place, warpgroups * per)
        span = spans[tile]
        assert span.row == row_of[token]
        for head in range(GROUP):
            start, end, *words = visible[tile, at // per, :, at % per * GROUP + head].tolist()
            keys = set(range(start, end))
            bits = [32 * w + bit for w, word in enumerate(words) for bit in range(32) if word >> bit & 1]
            keys |= {span.tree_from + bit for bit in bits}
            assert {k for k in keys if 0 <= k < span.end} == seen[token]
        inside[tile].append(seen[token])
    for tile, span in enumerate(spans):
        every = set().union(*inside[tile])
        if not every:
            assert span.end <= 0 or not inside[tile]
            continue
        assert span.first <= min(every) and span.end > max(every)
        assert all(set(range(span.plain_from, span.plain_until)) <= of_token for of_token in inside[tile])


@pytest.mark.parametrize(
    ("n", "tree", "window", "division"),
    [
        (1, False, None, SMALL),
        (5, False, Window(9), LARGE),
        (40, True, None, LARGE),
        (40, True, Window(4), SMALL),
        (7, True, Window(20, granularity=8), LARGE),
    ],
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_decode(n: int, tree: bool, window: Window | None, division: dict[str, int], data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.sampled_from([-n, 0]) | st.integers(0, 90), min_size=2, max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    trees = random_trees(rng, 2, n) if tree else np.tril(np.ones((2, n, n), bool))
    query, mask = queries(2, n), jnp.asarray(packed(trees)) if tree else None
    context_lens = jnp.asarray(contexts, jnp.int32)
    tiles = decode_tiles(query, context_lens, tree_mask=mask, kv_heads=KV_HEADS, window=window, **division)
    seen = []
    for context, of_row in zip(contexts, trees, strict=True):
        if context < 0:
            seen += [set[int]()] * n
        else:
            seen += [set(np.flatnonzero(keys).tolist()) for keys in seen_keys(context, of_row, window)]
    check(tiles, query.reshape(2 * n, HEADS, DIM), seen, np.repeat([0, 1], n).tolist())


@pytest.mark.parametrize(("window", "division"), [(None, LARGE), (Window(9), SMALL)])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 13), min_size=3, max_size=3), data=st.data())
def test_prefill(window: Window | None, division: dict[str, int], lengths: list[int], data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(0, 90), min_size=3, max_size=3))
    query, starts = queries(40), jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    tiles = prefill_tiles(query, starts, jnp.asarray(contexts, jnp.int32), kv_heads=KV_HEADS, window=window, **division)
    seen, row_of = [], []
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        causal = np.tril(np.ones((length, length), bool))
        seen += [set(np.flatnonzero(keys).tolist()) for keys in seen_keys(context, causal, window)]
        row_of += [row] * length
    padding = 40 - sum(lengths)
    check(tiles, query, seen + [set[int]()] * padding, row_of + [-1] * padding)


def test_every_head_has_its_own_sink() -> None:
    context_lens = jnp.zeros(1, jnp.int32)
    tiles = decode_tiles(queries(1, 2), context_lens, tree_mask=None, kv_heads=KV_HEADS, window=None, **SMALL)
    logits = tiles.sinks(jnp.arange(10.0, 16.0))
    np.testing.assert_array_equal(logits, [[10, 11, 12, 10, 11, 12, 0, 0], [13, 14, 15, 13, 14, 15, 0, 0]])


def test_prefill_without_rows_in_use() -> None:
    tokens = 5
    query, none = queries(tokens), jnp.zeros(2, jnp.int32)
    tiles = prefill_tiles(query, jnp.zeros(3, jnp.int32), none, kv_heads=KV_HEADS, window=None, **SMALL)
    check(tiles, query, [set()] * tokens, [-1] * tokens)
