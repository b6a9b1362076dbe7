"""Query tiles: how a step's queries are packed for the tensor cores, and what each of them may see.

A query tile is a set of query tokens of one sequence whose keys one thread block reads. All query heads that
share a KV head are packed with the tokens, so that a block of keys is read once for tokens · group rows:

    warpgroup 0                     warpgroup 1
    t0h0 t0h1 t1h0 t1h1 · ·         t2h0 t2h1 t3h0 t3h1 · ·      group 2, 2 tokens per warpgroup, · padding

What a query sees is three things: the keys start ≤ n < end, and, in a draft tree, the keys at `tree_from` + j of the
step's own tokens whose bit j is set. So plain decoding, trees, windows and prefill chunks are one case to the
kernel. `Span` says what the tile as a whole needs; between plain_from and plain_until nothing is masked.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specax.pallas_kernels.window import Window


class Span(NamedTuple):
    """Columns of `QueryTiles.spans`: the keys that a tile's queries see, numbered within their sequence."""

    row: Any  # of the page table
    first: Any  # the first key that any query sees
    end: Any  # one past the last; 0 for a tile without queries
    plain_from: Any  # keys from plain_from to plain_until − 1 are seen by every query
    plain_until: Any
    tree_from: Any  # the key that bit 0 of the tree words stands for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Packed queries: of each warpgroup's `queries` rows, tokens_per_warpgroup · group are in use."""

    query: jax.Array  # [tiles, kv_heads, warpgroups, queries, head_dim]
    spans: jax.Array  # int32 [tiles, 6], see Span
    visible: jax.Array  # int32 [tiles, warpgroups, 2 + words, queries]: start, end, tree words
    place: jax.Array  # int32 [tokens]: token → tile · tokens per tile + number within the tile, −1 for padding
    group: int = dataclasses.field(metadata={"static": True})  # query heads per KV head

    @property
    def tokens_per_warpgroup(self) -> int:
        return self.query.shape[3] // self.group

    def sinks(self, logits: jax.Array) -> jax.Array:
        """Each head's sink logit at each packed query, [kv_heads, queries]."""
        per_head = jnp.tile(logits.astype(jnp.float32).reshape(-1, self.group), (1, self.tokens_per_warpgroup))
        return jnp.pad(per_head, ((0, 0), (0, self.query.shape[3] - per_head.shape[1])))

    def unpack(self, packed: jax.Array) -> jax.Array:
        """[tiles, kv_heads, warpgroups, queries, head_dim] back to [tokens, heads, head_dim]; zeros for padding."""
        tiles, kv_heads, warpgroups, _, dim = packed.shape
        per = self.tokens_per_warpgroup
        x = packed[:, :, :, : per * self.group].reshape(tiles, kv_heads, warpgroups * per, self.group, dim)
        x = x.transpose(0, 2, 1, 3, 4).reshape(tiles * warpgroups * per, kv_heads * self.group, dim)
        return x.at[self.place].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def decode_tiles(
    query: jax.Array,
    context_lens: jax.Array,
    kv_heads: int,
    tree_mask: jax.Array | None,
    window: Window | None,
    *,
    queries: int,
    warpgroups: int,
    keys: range | None = None,
) -> QueryTiles:
    """Tiles of rows [rows, query_len, heads, head_dim] that all have N = query_len tokens.

    See `paged_attention` for `context_lens` and `tree_mask` [rows, N, words]. No key outside `keys` is seen.
    """
    rows, n, heads, dim = query.shape
    group = heads // kv_heads
    per = warpgroups * (queries // group)
    per_row = math.ceil(n / per)  # tiles
    own = jnp.arange(n)
    position = context_lens[:, None] + own
    end = position + 1
    words = jnp.zeros((rows, n, 0), jnp.int32)
    if tree_mask is not None:
        end = jnp.broadcast_to(context_lens[:, None], (rows, n))
        words = lax.bitcast_convert_type(tree_mask, jnp.int32)
        sees = (tree_mask[:, :, own // 32] >> (own % 32).astype(tree_mask.dtype)) & 1 == 1
        if window is not None:
            position = context_lens[:, None] + sees.sum(-1, dtype=jnp.int32) - 1  # depth in the tree
            sees &= position[:, None, :] >= window.start(position)[:, :, None]
        if keys is not None:
            number = context_lens[:, None] + own
            sees &= ((number >= keys.start) & (number < keys.stop))[:, None, :]
        if window is not None or keys is not None:
            words = _pack_bits(sees, tree_mask.shape[2])
    start = jnp.zeros_like(position) if window is None else window.start(position)
    last = jnp.broadcast_to(context_lens[:, None] + n, (rows, n))
    last = jnp.where(last > 0, last if tree_mask is not None else end, 0)
    start, end, last = _within(keys, start, end, last)

    within = np.arange(per_row * per)
    index = np.where(within < n, np.arange(rows)[:, None] * n + within, -1).reshape(rows * per_row, per)
    place = np.arange(rows)[:, None] * per_row * per + np.arange(n)
    tokens = _Tokens(start, end, last, words, jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, n)))
    flat = _Tokens(*(x.reshape(rows * n, *x.shape[2:]) for x in tokens))
    tree_from = context_lens[jnp.arange(rows * per_row) // per_row]
    return _pack(
        query.reshape(rows * n, heads, dim), flat, jnp.asarray(index), tree_from, jnp.asarray(place.reshape(-1)),
        kv_heads=kv_heads, queries=queries, warpgroups=warpgroups,
    )  # fmt: skip


def prefill_tiles(
    query: jax.Array,
    query_starts: jax.Array,
    context_lens: jax.Array,
    kv_heads: int,
    window: Window | None,
    *,
    queries: int,
    warpgroups: int,
    keys: range | None = None,
) -> QueryTiles:
    """Tiles of ragged rows, [tokens, heads, head_dim] cut at `query_starts`: none spans two rows.

    No key outside `keys` is seen. The number of tiles is static: beside tokens / (tokens per tile) full ones, each
    row adds one that is not full.
    """
    tokens, heads, _ = query.shape
    rows = context_lens.shape[0]
    per = warpgroups * (queries // (heads // kv_heads))
    tiles = math.ceil(tokens / per) + rows
    lengths = query_starts[1:] - query_starts[:-1]
    ends = jnp.cumsum((lengths + per - 1) // per)  # tiles up to and with each row
    starts = ends - (lengths + per - 1) // per

    tile = jnp.arange(tiles)
    find = partial(jnp.searchsorted, side="right", method="compare_all")  # (others loop on the device)
    row = jnp.minimum(find(ends, tile), rows - 1)
    index = (query_starts[row] + (tile - starts[row]) * per)[:, None] + jnp.arange(per)
    index = jnp.where((index < query_starts[row + 1][:, None]) & (tile < ends[-1])[:, None], index, -1)

    token = jnp.arange(tokens)
    of = jnp.minimum(find(query_starts[1:], token), rows - 1)  # each token's row
    within = token - query_starts[of]
    place = jnp.where(token < query_starts[-1], starts[of] * per + within, -1)
    end = context_lens[of] + within + 1
    start = jnp.zeros_like(end) if window is None else window.start(end - 1)
    start, end, last = _within(keys, start, end, end)
    return _pack(
        query, _Tokens(start, end, last, jnp.zeros((tokens, 0), jnp.int32), of), index, jnp.zeros_like(row), place,
        kv_heads=kv_heads, queries=queries, warpgroups=warpgroups,
    )  # fmt: skip


def _within(
    keys: range | None, start: jax.Array, end: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The interval start ≤ n < end, and the end `last` of all that may be read, cut to a range of keys."""
    if keys is None:
        return start, end, last
    return jnp.maximum(start, keys.start), jnp.minimum(end, keys.stop), jnp.minimum(last, keys.stop)


class _Tokens(NamedTuple):
    """What each query token sees, [tokens]: start ≤ n < end and tree words; nothing from `last` on."""

    start: jax.Array
    end: jax.Array
    last: jax.Array
    words: jax.Array  # [tokens, words]
    row: jax.Array


def _pack(
    query: jax.Array,
    tokens: _Tokens,
    index: jax.Array,
    tree_from: jax.Array,
    place: jax.Array,
    *,
    kv_heads: int,
    queries: int,
    warpgroups: int,
) -> QueryTiles:
    """Gathers tokens into tiles by `index` [tiles, tokens per tile], −1 where there is none."""
    (tiles, per), (_, heads, dim) = index.shape, query.shape
    group = heads // kv_heads

    def take(x: jax.Array, fill: int) -> jax.Array:
        return x.at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)

    packed = take(query, 0).reshape(tiles, warpgroups, per // warpgroups, kv_heads, group, dim)
    packed = packed.transpose(0, 3, 1, 2, 4, 5).reshape(tiles, kv_heads, warpgroups, -1, dim)
    padding = queries - packed.shape[3]
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))

    visible = jnp.stack([take(tokens.start, 0), take(tokens.end, 0)], axis=-1)
    visible = jnp.concatenate([visible, take(tokens.words, 0)], axis=-1)
    visible = jnp.repeat(visible.reshape(tiles, warpgroups, per // warpgroups, -1), group, axis=2)
    visible = jnp.pad(visible, ((0, 0), (0, 0), (0, padding), (0, 0))).swapaxes(2, 3)

    far = np.iinfo(np.int32).max
    span = Span(
        row=jnp.max(take(tokens.row, 0), axis=1),
        first=jnp.min(take(tokens.start, far), axis=1),
        end=jnp.max(take(tokens.last, 0), axis=1),
        plain_from=jnp.max(take(tokens.start, 0), axis=1),
        plain_until=jnp.min(take(tokens.end, far), axis=1),
        tree_from=tree_from,
    )
    spans = jnp.stack([x.astype(jnp.int32) for x in span], axis=1)
    return QueryTiles(packed, spans, visible.astype(jnp.int32), place.astype(jnp.int32), group)


def _pack_bits(bits: jax.Array, words: int) -> jax.Array:
    """[..., n] booleans to int32 [..., words], the first in the lowest bit."""
    bits = jnp.pad(bits, ((0, 0), (0, 0), (0, 32 * words - bits.shape[-1])))
    shifts = jnp.arange(32, dtype=jnp.uint32)
    packed = (bits.reshape(*bits.shape[:-1], words, 32).astype(jnp.uint32) << shifts).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)
