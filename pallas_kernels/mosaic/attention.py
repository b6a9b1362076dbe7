"""The attention ops on Hopper GPUs: packs queries into tiles, runs `flash_attention`, unpacks its output."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.block_sizes import BlockSizes, Plan
from specax.pallas_kernels.dispatch import plan_call
from specax.pallas_kernels.mosaic.flash_attention import Cache, Partial, Scoring, flash_attention, merge
from specax.pallas_kernels.mosaic.query_tiles import QueryTiles, decode_tiles, prefill_tiles


def paged_attention(
    query: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table: jax.Array,
    context_lens: jax.Array,
    tree_mask: jax.Array | None,
    options: AttentionOptions,
    *,
    value_dim: int,
    blocks: BlockSizes | None,
) -> jax.Array:
    """See `paged_attention.paged_attention`; without v_pages, `paged_attention.paged_latent_attention`."""
    rows, n, _, _ = query.shape
    plan, groups = plan_call(
        query, k_pages, page_table, value_dim, blocks,
        tokens=n, sequences=rows, latent=v_pages is None, merged=options.window_sinks > 0,
    )  # fmt: skip
    make = partial(
        decode_tiles, context_lens=context_lens, kv_heads=groups, tree_mask=tree_mask,
        queries=plan.queries, warpgroups=plan.blocks.warpgroups,
    )  # fmt: skip
    out = _attend(make, query, k_pages, v_pages, page_table, options, plan)
    return out.reshape(rows, n, *out.shape[1:])


def paged_prefill_attention(
    query: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    query_starts: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    options: AttentionOptions,
    *,
    blocks: BlockSizes | None,
) -> jax.Array:
    """See `paged_attention.paged_prefill_attention`."""
    tokens, _, head_dim = query.shape
    plan, groups = plan_call(
        query, k_pages, page_table, head_dim, blocks, tokens=tokens, sequences=1, merged=options.window_sinks > 0
    )
    make = partial(
        prefill_tiles, query_starts=query_starts, context_lens=context_lens, kv_heads=groups,
        queries=plan.queries, warpgroups=plan.blocks.warpgroups,
    )  # fmt: skip
    return _attend(make, query, k_pages, v_pages, page_table, options, plan)


def _attend(
    make_tiles: Callable[..., QueryTiles],
    query: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table: jax.Array,
    options: AttentionOptions,
    plan: Plan,
) -> jax.Array:
    """Attention of the tiles' tokens, [tokens, heads, value_dim].

    Keys that are a window's sinks meet queries of their own, so they are a second part of the softmax.
    """
    layer = jnp.full((1,), options.layer, jnp.int32)
    cache = Cache(k_pages, v_pages, page_table, layer, options.k_scales, options.v_scales)
    attend = partial(flash_attention, cache=cache, scoring=Scoring(options.scale, options.soft_cap))
    sinks = options.window_sinks
    tiles = make_tiles(query, window=options.window, keys=range(sinks, 2**31 - 1) if sinks else None)
    logits = None if options.sink_logits is None else tiles.sinks(options.sink_logits)
    result = attend(tiles, sinks=logits, plan=plan)
    if isinstance(result, Partial):
        parts = [result]
        if sinks:
            rotated = query if options.sink_query is None else options.sink_query
            of_sinks = make_tiles(rotated, window=None, keys=range(sinks))
            parts.append(attend(of_sinks, sinks=None, plan=dataclasses.replace(plan, splits=1)))
        result = merge(*parts).astype(query.dtype)
    return tiles.unpack(result)
