"""Paged attention in plain XLA: the CPU path, and the reference that kernels are tested against.

Flash-decoding's recurrence (Dao et al. 2022, 2023) over blocks of pages: the number of blocks is read from
`context_lens` on the device, so one compiled program serves every context length and reads only the pages
in use. Softmax runs in float32 whatever the dtype of the cache.

With a window there are two parts. The sinks, few and at a fixed place, are one block before the loop. The loop
takes the keys from the window's start on, or from the first that is no sink: no key is in both. It starts at
the block which holds that key; blocks stay aligned to the context, so that a query's result has the same bits
whoever shares its tile or batch.

The scales of quantised pages go where there is one number per key: the keys' onto the scores, the values' onto the
softmax's weights.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.window import Window

# A large finite number instead of −inf: exp(m − m) stays 1 for rows that have seen no key yet.
MASKED = -1e30
DECODE_BLOCK = 64  # keys per step of the decode loop
PREFILL_BLOCK = 128  # keys per step of the prefill loop
PREFILL_TILE = 64  # query tokens per tile


class _Softmax(NamedTuple):
    """Running state of the online softmax over [..., queries]: maximum, denominator, weighted values."""

    m: jax.Array
    l: jax.Array  # noqa: E741  (the paper's name)
    acc: jax.Array

    @classmethod
    def empty(cls, batch: int, queries: int, head_dim: int, sink_logits: jax.Array | None = None) -> "_Softmax":
        """No key taken in yet; with sink_logits [batch, queries], one of that score whose value is 0."""
        m = jnp.full((batch, queries), MASKED, jnp.float32) if sink_logits is None else sink_logits
        denominator = jnp.zeros_like(m) if sink_logits is None else jnp.ones_like(m)
        return cls(m, denominator, jnp.zeros((batch, queries, head_dim), jnp.float32))

    def update(
        self, scores: jax.Array, visible: jax.Array, values: jax.Array, v_scales: jax.Array | None = None
    ) -> "_Softmax":
        """Takes in one block: scores and visible [batch, queries, keys], values [batch, keys, head_dim].

        Values that no query sees are multiplied by 0: they, and their scales [batch, keys], must be finite (see
        `_gather_written`).

        While a query has seen no key, m is MASKED and what it sums up is arbitrary but finite: the first
        visible key multiplies it by exp(MASKED − m) = 0, and `result` drops it if none ever comes.
        """
        scores = jnp.where(visible, scores, MASKED)
        m = jnp.maximum(self.m, scores.max(-1))
        p = jnp.exp(scores - m[..., None])
        keep = jnp.exp(self.m - m)
        weights = p if v_scales is None else p * v_scales[:, None]
        weighted = jnp.einsum("bqk,bkd->bqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return _Softmax(m, self.l * keep + p.sum(-1), self.acc * keep[..., None] + weighted)

    def result(self) -> jax.Array:
        """Attention output; zeros for a query that saw no key."""
        seen = self.m > MASKED / 2
        return jnp.where(seen[..., None], self.acc / jnp.where(seen, self.l, 1.0)[..., None], 0.0)


def _pages_per_block(page_size: int, keys: int) -> int:
    return max(1, keys // page_size)


def _pad_pages(page_table: jax.Array, multiple: int) -> jax.Array:
    """Appends trash pages so that the last block of pages is whole."""
    missing = -page_table.shape[1] % multiple
    return jnp.pad(page_table, ((0, 0), (0, missing))) if missing else page_table


def _gather(pages: jax.Array, layer: int, ids: jax.Array) -> jax.Array:
    """[rows, block] page ids to head-major keys or values [rows · kv_heads, block · page_size, head_dim].

    Or to their scales, [rows · kv_heads, block · page_size].
    """
    rows, block = ids.shape
    _, _, heads, size, *dim = pages.shape
    got = pages.at[layer, ids].get(mode="promise_in_bounds")
    return got.swapaxes(1, 2).reshape(rows * heads, block * size, *dim)


def _gather_written(pages: jax.Array, layer: int, ids: jax.Array, written: jax.Array) -> jax.Array:
    """`_gather`, with zeros in slots that the row has not written: written is [rows, block · page_size].

    Such a slot may hold anything, of an earlier request say, and 0 · NaN is NaN.
    """
    got = _gather(pages, layer, ids)
    written = jnp.repeat(written, pages.shape[2], axis=0)
    return jnp.where(written[..., None] if got.ndim == 3 else written, got, 0)


def _product_dtype(query: jax.Array, pages: jax.Array, options: AttentionOptions) -> Any:
    """Of both matrix products: that of the pages, so that no block is converted; of the query if they're quantised."""
    return pages.dtype if options.k_scales is None else query.dtype


def _attend(
    state: _Softmax,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    ids: jax.Array,
    visible: jax.Array,
    written: jax.Array,
    options: AttentionOptions,
) -> _Softmax:
    """Takes pages `ids` [rows, block] into the softmax of q [rows · kv_heads, queries, head_dim].

    Without v_pages, values are the first columns of the keys, as many as the state has.

    visible is [rows · kv_heads, queries, block · page_size]; written is [rows, block · page_size].
    """
    layer = options.layer
    keys = _gather(k_pages, layer, ids).astype(q.dtype)
    scores = jnp.einsum("bqd,bkd->bqk", q, keys, preferred_element_type=jnp.float32)
    if options.k_scales is not None:
        scores *= _gather(options.k_scales, layer, ids)[:, None]
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    if v_pages is None:
        values = jnp.where(jnp.repeat(written, k_pages.shape[2], axis=0)[..., None], keys, 0)
        return state.update(scores, visible, values[..., : state.acc.shape[-1]])
    values = _gather_written(v_pages, layer, ids, written)
    if options.v_scales is None:
        return state.update(scores, visible, values)
    # (float16 is too narrow for the weights once they are multiplied by scales.)
    values = values.astype(jnp.float32 if q.dtype == jnp.float16 else q.dtype)
    return state.update(scores, visible, values, _gather_written(options.v_scales, layer, ids, written))


def paged_attention(
    query: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table: jax.Array,
    context_lens: jax.Array,
    tree_mask: jax.Array | None,
    options: AttentionOptions,
    value_dim: int | None = None,
) -> jax.Array:
    """See `paged_attention.paged_attention`, and without v_pages `paged_attention.paged_latent_attention`."""
    window = options.window
    rows, n, heads, dim = query.shape
    kv_heads, page_size = k_pages.shape[2:4]
    group = heads // kv_heads
    block = min(_pages_per_block(page_size, DECODE_BLOCK), page_table.shape[1])
    keys = block * page_size
    table = _pad_pages(page_table, block)

    def arrange(query: jax.Array) -> jax.Array:
        # Batch of small matrix products, one per (row, KV head): its N · group queries against a block of keys.
        q = (options.scale * query).reshape(rows, n, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
        return q.reshape(rows * kv_heads, n * group, dim).astype(_product_dtype(query, k_pages, options))

    q = arrange(query)
    own = jnp.arange(n)
    if tree_mask is None:
        sees = own[:, None] >= own[None, :]
        sees = jnp.broadcast_to(sees, (rows, n, n))
    else:
        sees = ((tree_mask[:, :, own // 32] >> (own % 32).astype(tree_mask.dtype)) & 1).astype(bool)
    if window is not None:
        position = context_lens[:, None] + sees.sum(-1, dtype=jnp.int32) - 1  # of the queries and own keys
        starts = window.start(position)
        sees &= position[:, None, :] >= starts[:, :, None]
        low = jnp.maximum(window.start(context_lens), window.sinks)  # the first key that the loop must see

    def take(
        state: _Softmax, q: jax.Array, ids: jax.Array, key: jax.Array, inside: jax.Array | None, starts: Any = None
    ) -> _Softmax:
        """Takes in pages `ids`, with keys number `key` [rows or 1, keys], as far as `inside` and from `starts` on."""
        offset = key - context_lens[:, None]
        # (In a padding row, whose context is −N, every offset is ≥ N: nothing is visible.)
        if n == 1:
            visible = (offset <= 0)[:, None]
        else:  # own keys (offset ≥ 0) through the mask, earlier ones always or from the query's start on
            index = jnp.clip(offset, 0, n - 1)[:, None, :]
            tree = jnp.take_along_axis(sees, jnp.broadcast_to(index, (rows, n, index.shape[-1])), axis=2)
            visible = (offset < 0)[:, None] | (tree & (offset < n)[:, None])
            if starts is not None:
                visible &= (offset >= 0)[:, None] | (key[:, None] >= starts[:, :, None])
        written = offset < n
        if inside is not None:
            visible, written = visible & inside[:, None], written & inside
        visible = jnp.broadcast_to(visible[:, None, :, None], (rows, kv_heads, n, group, visible.shape[-1]))
        visible = visible.reshape(rows * kv_heads, n * group, -1)
        return _attend(state, q, k_pages, v_pages, ids, visible, written, options)

    def step(j: jax.Array, state: _Softmax) -> _Softmax:
        if window is None:
            ids = lax.dynamic_slice_in_dim(table, j * block, block, axis=1)
            return take(state, q, ids, (j * keys + jnp.arange(keys))[None, :], None)
        at = (low // keys + j)[:, None]  # each row's own block
        # (A row that is done stays on its last column, whose keys are then past its context.)
        ids = jnp.take_along_axis(table, at * block + jnp.arange(block), axis=1, mode="clip")
        key = at * keys + jnp.arange(keys)
        return take(state, q, ids, key, key >= low[:, None], starts)

    value_dim = value_dim or dim
    state = _Softmax.empty(rows * kv_heads, n * group, value_dim, _per_query(options.sink_logits, rows, kv_heads, n))
    if window is None:
        blocks = _cdiv(jnp.max(context_lens, initial=0) + n, keys)
    else:
        if window.sinks:
            ids = table[:, : _sink_pages(window, page_size)]
            key = jnp.arange(ids.shape[1] * page_size)[None, :]
            sink_q = q if options.sink_query is None else arrange(options.sink_query)
            state = take(state, sink_q, ids, key, key < window.sinks)
        blocks = _cdiv(jnp.max(context_lens + n - low // keys * keys, initial=0), keys)
    state = lax.fori_loop(0, blocks, step, state)
    out = state.result().reshape(rows, kv_heads, n, group, value_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, n, heads, value_dim).astype(query.dtype)


def paged_prefill_attention(
    query: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    query_starts: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `paged_attention.paged_prefill_attention`.

    Tiles of queries never span rows. A row's last tile runs over into the next row's tokens; rows go in
    order, so the next row's own tiles overwrite that part of the output afterwards.
    """
    window = options.window
    tokens, heads, dim = query.shape
    kv_heads, page_size = k_pages.shape[2:4]
    group = heads // kv_heads
    tile = min(PREFILL_TILE, tokens)
    block = min(_pages_per_block(page_size, PREFILL_BLOCK), page_table.shape[1])
    keys = block * page_size
    table = _pad_pages(page_table, block)

    def arrange(query: jax.Array) -> jax.Array:
        q = (options.scale * query).reshape(tokens, kv_heads, group, dim).transpose(1, 0, 2, 3)
        q = q.astype(_product_dtype(query, k_pages, options))
        return jnp.pad(q, ((0, 0), (0, tile), (0, 0), (0, 0)))

    q = arrange(query)
    sink_q = q if options.sink_query is None else arrange(options.sink_query)
    sink_logits = _per_query(options.sink_logits, 1, kv_heads, tile)

    def row(r: jax.Array, out: jax.Array) -> jax.Array:
        start, length, context = query_starts[r], query_starts[r + 1] - query_starts[r], context_lens[r]

        def query_tile(i: jax.Array, out: jax.Array) -> jax.Array:
            def of_tile(q: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(q, start + i * tile, tile, axis=1).reshape(kv_heads, tile * group, dim)

            qt = of_tile(q)
            # (Queries past the row's end are overwritten later; they must not look at stale slots meanwhile.)
            position = context + jnp.minimum(i * tile + jnp.arange(tile), length - 1)
            last = context + jnp.minimum((i + 1) * tile, length)  # keys that the tile's last query sees

            def take(
                state: _Softmax, qt: jax.Array, ids: jax.Array, key: jax.Array, low: Any = None, high: Any = None
            ) -> _Softmax:
                """Takes in pages `ids` with keys number `key`: those from low[query] on, or those below high."""
                visible, written = key[None, :] <= position[:, None], key < last
                if low is not None:
                    visible, written = visible & (key[None, :] >= low[:, None]), written & (key >= low[0])
                if high is not None:
                    visible, written = visible & (key < high), written & (key < high)
                visible = jnp.broadcast_to(visible[None, :, None], (kv_heads, tile, group, key.size))
                visible = visible.reshape(kv_heads, tile * group, key.size)
                return _attend(state, qt, k_pages, v_pages, ids, visible, written[None, :], options)

            def key_block(j: jax.Array, state: _Softmax) -> _Softmax:
                ids = lax.dynamic_slice(table, (r, j * block), (1, block))
                return take(state, qt, ids, j * keys + jnp.arange(keys), low)

            state = _Softmax.empty(kv_heads, tile * group, dim, sink_logits)
            low, first = None, jnp.int32(0)
            if window is not None:
                if window.sinks:
                    ids = lax.dynamic_slice_in_dim(table, r, 1)[:, : _sink_pages(window, page_size)]
                    state = take(state, of_tile(sink_q), ids, jnp.arange(ids.size * page_size), high=window.sinks)
                low = jnp.maximum(window.start(position), window.sinks)  # [tile], ascending
                first = low[0] // keys
            state = lax.fori_loop(first, _cdiv(last, keys), key_block, state)
            result = state.result().reshape(kv_heads, tile, group, dim).astype(query.dtype)
            return lax.dynamic_update_slice_in_dim(out, result, start + i * tile, axis=1)

        return lax.fori_loop(0, _cdiv(length, tile), query_tile, out)

    out = jnp.zeros((kv_heads, tokens + tile, group, dim), query.dtype)
    out = lax.fori_loop(0, page_table.shape[0], row, out)[:, :tokens]
    out = jnp.where((jnp.arange(tokens) < query_starts[-1])[None, :, None, None], out, 0)
    return out.transpose(1, 0, 2, 3).reshape(tokens, heads, dim)


def _per_query(sink_logits: jax.Array | None, rows: int, kv_heads: int, queries: int) -> jax.Array | None:
    """[heads] to float32 [rows · kv_heads, queries · group], as the queries are laid out."""
    if sink_logits is None:
        return None
    logits = sink_logits.astype(jnp.float32).reshape(1, kv_heads, 1, -1)
    logits = jnp.broadcast_to(logits, (rows, kv_heads, queries, logits.shape[-1]))
    return logits.reshape(rows * kv_heads, -1)


def _sink_pages(window: Window, page_size: int) -> int:
    return -(-window.sinks // page_size)


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b
