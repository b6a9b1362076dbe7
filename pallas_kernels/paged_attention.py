"""Attention over a paged KV cache: the public ops. `xla_attention` holds their XLA implementation.

Both ops read keys and values through a page table and never touch a page that no row names:

    page_table[r] = [7, 2, 9, 0, …]          row r's keys 0..ps−1 lie in page 7, ps..2ps−1 in page 2, …
    k_pages[layer, page, kv_head, offset]    one key vector

The keys of the step's own tokens are already in the cache (written by `write_kv` before the call).

With a `window`, pages that hold neither sinks nor a key of any query's window may have been given back: their
entries of the page table name the trash page 0, or anything else, and are not looked at. Work grows with the
window, not with the context.

Pages of int8 or float8_e4m3fn come with scales (`quantized_kv`). Slots that a row has not written yet, in pages and
in scales, may hold anything, NaN included, and never reach an output.
"""

from jaxtyping import Array, Float, Int, Real, UInt

from specax.pallas_kernels import xla_attention
from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.block_sizes import BlockSizes
from specax.pallas_kernels.dispatch import Implementation, choose
from specax.pallas_kernels.window import Window


def paged_attention(
    query: Float[Array, "rows query_len heads head_dim"],
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    context_lens: Int[Array, "rows"],
    *,
    layer: int,
    scale: float,
    tree_mask: UInt[Array, "rows query_len words"] | None = None,
    window: Window | None = None,
    sink_query: Float[Array, "rows query_len heads head_dim"] | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "heads"] | None = None,
    k_scales: Float[Array, "layers pages kv_heads page_size"] | None = None,
    v_scales: Float[Array, "layers pages kv_heads page_size"] | None = None,
    implementation: Implementation = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "rows query_len heads head_dim"]:
    """Decode and tree attention: every row has the same static number N of query tokens.

    Args:
      context_lens: keys in the cache before this step. The N query tokens' own keys follow them; a row
        with context_lens = −N has no keys (padding) and gives zeros.
      layer: which layer of the stacked cache to read.
      tree_mask: packed ancestor bits over the row's N own keys: query i sees own key j if bit j % 32 of
        word j // 32 is set. None: causal among the own keys (all that N = 1 needs).
      window: what each query sees of the keys before it; static. None: all. A query's position is
        context_lens plus its depth in the tree (its own bits − 1), and so is an own key's.
      sink_query: the queries rotated at `window.rebased` of their positions, for the scores against keys
        below `window.sinks`. None: `query` serves there too.
      soft_cap: scores become soft_cap · tanh(scale · q·k / soft_cap), as in Gemma 2 (2024); static, above 0.
      sink_logits: learned logits, one per head, that join the softmax's denominator and nothing else, as in
        gpt-oss (2025): a key of value 0. They are neither scaled nor capped.
      k_scales, v_scales: float32; given when pages are int8 or float8_e4m3fn, and only then. Key = page entry ·
        scale, for each token and KV head. The products are then of the query's dtype, else of the pages'.
      implementation: "mosaic_gpu", kernels for Hopper; "xla"; None picks by platform, dtype and shape.
      block_sizes: of the kernel; None takes the table's. XLA has no use for them.

    Raises:
      ValueError: a window with sinks that is smaller than N (a tree could be deeper than the window); options
        that contradict one another, the pages or the query (`AttentionOptions.check`).
      NotImplementedError: the named implementation can't serve this call.
    """
    if window is not None and window.sinks and query.shape[1] > window.size:
        raise ValueError(f"rows of {query.shape[1]} queries need a window of at least as many keys, got {window}")
    options = AttentionOptions(layer, scale, window, soft_cap, sink_query, sink_logits, k_scales, v_scales)
    options.check(query, k_pages, v_pages)
    if choose(implementation, query, k_pages, options) == "xla":
        return xla_attention.paged_attention(query, k_pages, v_pages, page_table, context_lens, tree_mask, options)
    from specax.pallas_kernels.mosaic import attention as mosaic  # Pallas is a second to import

    return mosaic.paged_attention(
        query, k_pages, v_pages, page_table, context_lens, tree_mask, options,
        value_dim=query.shape[-1], blocks=block_sizes,
    )  # fmt: skip


def paged_prefill_attention(
    query: Float[Array, "tokens heads head_dim"],
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"],
    query_starts: Int[Array, "rows_plus_one"],
    page_table: Int[Array, "rows pages_per_row"],
    context_lens: Int[Array, "rows"],
    *,
    layer: int,
    scale: float,
    window: Window | None = None,
    sink_query: Float[Array, "tokens heads head_dim"] | None = None,
    soft_cap: float | None = None,
    sink_logits: Float[Array, "heads"] | None = None,
    k_scales: Float[Array, "layers pages kv_heads page_size"] | None = None,
    v_scales: Float[Array, "layers pages kv_heads page_size"] | None = None,
    implementation: Implementation = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Prefill attention over ragged rows: row r's queries are tokens query_starts[r]..query_starts[r+1]−1.

    Each query sees the row's `context_lens[r]` earlier keys and, causally, the row's own tokens, as far as
    `window` lets it (see `paged_attention`, also for the other options). Rows may be empty; tokens past
    query_starts[-1] are padding and give zeros.

    Raises:
      ValueError: options that contradict one another, the pages or the query (`AttentionOptions.check`).
      NotImplementedError: the named implementation can't serve this call.
    """
    options = AttentionOptions(layer, scale, window, soft_cap, sink_query, sink_logits, k_scales, v_scales)
    options.check(query, k_pages, v_pages)
    if choose(implementation, query, k_pages, options) == "xla":
        return xla_attention.paged_prefill_attention(
            query, k_pages, v_pages, query_starts, page_table, context_lens, options
        )
    from specax.pallas_kernels.mosaic import attention as mosaic

    return mosaic.paged_prefill_attention(
        query, k_pages, v_pages, query_starts, page_table, context_lens, options, blocks=block_sizes
    )


def paged_latent_attention(
    query: Float[Array, "rows query_len heads latent_dim"],
    latent_pages: Float[Array, "layers pages 1 page_size latent_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    context_lens: Int[Array, "rows"],
    *,
    layer: int,
    scale: float,
    value_dim: int,
    tree_mask: UInt[Array, "rows query_len words"] | None = None,
    window: Window | None = None,
    implementation: Implementation = None,
    block_sizes: BlockSizes | None = None,
) -> Float[Array, "rows query_len heads value_dim"]:
    """Decode and tree attention of multi-head latent attention (DeepSeek-V2, 2024), in its absorbed form.

    The cache holds one vector per token for all heads, [compressed KV ‖ rotated key], 512 + 64 wide in DeepSeek's
    models; it is laid out like keys of one KV head, and written by `write_kv`. With the up-projections absorbed,
    a head's query is [q_nope · W_UK ‖ q_rope], and its output, to be multiplied by W_UV, a weighted sum of the
    compressed part:

        score(i, j) = scale · query_i · latent_j
        out_i = Σ_j softmax_j(score(i, j)) · latent_j[:value_dim]

    Args:
      scale: of the head before absorption: (nope_dim + rope_dim)^−½ in DeepSeek's models.
      value_dim: width of the compressed part.
      Others: see `paged_attention`.

    Raises:
      ValueError: value_dim is not within the latents' width; a window with sinks.
      NotImplementedError: the named implementation can't serve this call.
    """
    if not 0 < value_dim <= latent_pages.shape[-1]:
        raise ValueError(f"value_dim must be from 1 to the latents' width {latent_pages.shape[-1]}, got {value_dim}")
    if window is not None and window.sinks:
        raise ValueError(f"latent attention has windows without sinks only, got {window}")
    options = AttentionOptions(layer, scale, window)
    options.check(query, latent_pages, latent_pages)
    if choose(implementation, query, latent_pages, options, value_dim) == "xla":
        return xla_attention.paged_attention(
            query, latent_pages, None, page_table, context_lens, tree_mask, options, value_dim
        )
    from specax.pallas_kernels.mosaic import attention as mosaic

    return mosaic.paged_attention(
        query, latent_pages, None, page_table, context_lens, tree_mask, options,
        value_dim=value_dim, blocks=block_sizes,
    )  # fmt: skip
