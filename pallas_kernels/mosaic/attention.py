"""The attention ops on Hopper GPUs: packs queries into tiles, runs `flash_attention`, unpacks its output."""

import jax
import jax.numpy as jnp

from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.block_sizes import BlockSizes, Plan, plan_call
from specax.pallas_kernels.mosaic.flash_attention import Cache, Scoring, flash_attention
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
    rows, n, heads, _ = query.shape
    plan, groups = plan_call(query, k_pages, page_table, value_dim, blocks, tokens=n, sequences=rows)
    tiles = decode_tiles(
        query, context_lens, groups, tree_mask, options.window, queries=plan.queries, warpgroups=plan.blocks.warpgroups
    )
    out = _run(tiles, k_pages, v_pages, page_table, options, plan)
    return out.reshape(rows, n, heads, value_dim)


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
    plan, groups = plan_call(query, k_pages, page_table, head_dim, blocks, tokens=tokens, sequences=1)
    tiles = prefill_tiles(
        query, query_starts, context_lens, groups, options.window,
        queries=plan.queries, warpgroups=plan.blocks.warpgroups,
    )  # fmt: skip
    return _run(tiles, k_pages, v_pages, page_table, options, plan)


def _run(
    tiles: QueryTiles,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    page_table: jax.Array,
    options: AttentionOptions,
    plan: Plan,
) -> jax.Array:
    """Attention of the tiles' tokens, [tokens, heads, value_dim]."""
    layer = jnp.full((1,), options.layer, jnp.int32)
    cache = Cache(k_pages, v_pages, page_table, layer, options.k_scales, options.v_scales)
    sinks = None if options.sink_logits is None else tiles.sinks(options.sink_logits)
    out = flash_attention(tiles, cache, sinks, scoring=Scoring(options.scale, options.soft_cap), plan=plan)
    return tiles.unpack(out)
