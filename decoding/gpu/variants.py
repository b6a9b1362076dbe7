"""Kernel variants: the attention ops in the geometries that the kernels serve, with random inputs for each.

`specax-device-check` runs and times them on a GPU, `specax-tune-kernels` looks for their block sizes. Inputs are made
on the device, and are hostile where the contract allows it: NaN lies in the trash page, in the other layer, in pages
that no row holds and in slots behind a row's last key (of 8-bit pages, in their scales).
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specax.pallas_kernels.block_sizes import BlockSizes, Body, Shapes, heads_together, make_plan
from specax.pallas_kernels.dispatch import HEAD_DIMS, PAGE_SIZES, Implementation
from specax.pallas_kernels.paged_attention import paged_attention, paged_latent_attention, paged_prefill_attention
from specax.pallas_kernels.quantized_kv import is_quantized
from specax.pallas_kernels.window import Window

type Op = Literal["decode", "tree", "prefill", "latent"]

PAGE_DTYPES = ("bfloat16", "float16", "int8", "float8_e4m3fn")
LAYERS, LAYER = 2, 1  # of the cache, and the one that is read
LATENT = (576, 512)  # widths of DeepSeek's latents and of their compressed part


@dataclasses.dataclass(frozen=True)
class Variant:
    """One op in one geometry. Static, hashable."""

    op: Op
    head_dim: int = 128
    page_size: int = 16
    page_dtype: str = "bfloat16"
    kv_heads: int = 2
    group: int = 4  # query heads per KV head
    query_len: int = 1  # tokens per row; of prefill, unless rows are given lengths of their own
    dtype: str | None = None  # of queries; None: the pages', or bfloat16 beside 8-bit pages
    window: Window | None = None
    soft_cap: float | None = None
    sink_logits: bool = False

    @property
    def quantized(self) -> bool:
        return is_quantized(self.page_dtype)

    @property
    def query_dtype(self) -> str:
        return self.dtype or ("bfloat16" if self.quantized else self.page_dtype)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def value_dim(self) -> int:
        return LATENT[1] if self.op == "latent" else self.head_dim

    @property
    def window_sinks(self) -> int:
        """First keys that stay visible before the window, to queries of their own rotation."""
        return 0 if self.window is None else self.window.sinks

    @property
    def of_trees(self) -> bool:
        return self.op == "tree" or (self.op == "latent" and self.query_len > 1)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def name(self) -> str:
        words = [self.op if self.query_len == 1 or self.op == "prefill" else f"{self.op} of {self.query_len}"]
        words += [f"d{self.head_dim}", f"page {self.page_size}", self.page_dtype, f"{self.kv_heads}×{self.group} heads"]
        words += [f"{self.dtype} queries"] if self.dtype is not None else []
        words += [f"window {self.window.size}"] if self.window is not None else []
        words += [f"{self.window_sinks} sinks"] if self.window_sinks else []
        words += [f"cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        words += ["sink logits"] * self.sink_logits
        return ", ".join(words)

    def shapes(self, rows: int, max_keys: int, tokens: int | None = None) -> Shapes:
        """What the plan of a call depends on. `tokens`: of all rows, for prefill."""
        group = heads_together(self.group, self.value_dim, self.op == "latent")
        of, sequences = (self.query_len, rows) if tokens is None else (tokens, 1)
        return Shapes(
            of, sequences, self.heads // group, group, self.head_dim, self.value_dim, self.page_size, max_keys,
            self.page_dtype, self.op == "latent", merged=self.window_sinks > 0,
        )  # fmt: skip

    @property
    def body(self) -> Body:
        tokens = 64 * self.query_len if self.op == "prefill" else None
        return make_plan(self.shapes(1, 64, tokens), "", None, BlockSizes(keys=max(64, self.page_size))).body


def kernel_variants() -> list[Variant]:
    """Every head dim, page size and dtype in every op, the commonest first.

    Trees of 8 tokens fill the columns of the tensor core's tiles, those of 32 their rows. Options of the ops
    (windows, caps, sinks), float16 queries on 8-bit pages and other numbers of heads come with few geometries only.
    """
    ops: list[tuple[Op, int]] = [("decode", 1), ("tree", 8), ("tree", 32), ("prefill", 256)]
    grid = itertools.product(ops, HEAD_DIMS, PAGE_SIZES, PAGE_DTYPES)
    out = [Variant(op, dim, page, dtype, query_len=n) for (op, n), dim, page, dtype in grid]
    pages = itertools.product(PAGE_SIZES, PAGE_DTYPES[:2], (16, 128))
    out += [Variant("latent", LATENT[0], page, dtype, 1, heads) for page, dtype, heads in pages]
    out += [Variant("latent", LATENT[0], kv_heads=1, group=16, query_len=n) for n in (4, 32)]
    streaming = Window(256, sinks=16, granularity=16)  # StreamingLLM's, with whole pages
    for base in [Variant(op, query_len=n) for op, n in ops]:
        changes: list[dict[str, Any]] = [{"window": Window(300)}, {"soft_cap": 50.0}, {"group": 7}]
        changes += [{"page_dtype": dtype, "dtype": "float16"} for dtype in PAGE_DTYPES[2:]]
        if base.op != "tree":
            changes += [{"window": streaming}, {"soft_cap": 5.0}, {"sink_logits": True}]
            changes += [{"group": 1}, {"group": 8}, {"kv_heads": 3, "group": 3}]
        out += [dataclasses.replace(base, **change) for change in changes]
    return sorted(out, key=_rarity)


def pairs_first(variants: Sequence[Variant]) -> list[Variant]:
    """Reordered: at the head some in which every two values that meet in any variant meet, and then the others.

    Greedy: next comes the one with the most pairs of fields' values that none before it has, the first of equals.
    """
    names = [field.name for field in dataclasses.fields(Variant)]
    left = {v: set(itertools.combinations([(name, getattr(v, name)) for name in names], 2)) for v in variants}
    out: list[Variant] = []
    while left and (new := left[best := max(left, key=lambda v: len(left[v]))]):
        out.append(best)
        del left[best]
        left = {v: pairs - new for v, pairs in left.items()}
    return out + list(left)


def _rarity(variant: Variant) -> int:
    """How many things a variant has that the commonest geometry has not."""
    common, fields = Variant(variant.op), ["page_size", "page_dtype"]
    if variant.op != "latent":
        fields += ["head_dim", "kv_heads", "group", "dtype", "window", "soft_cap", "sink_logits"]
    return sum(getattr(variant, name) != getattr(common, name) for name in fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of a call as the public ops take them: arrays, or what stands for them in tracing."""

    query: Any
    k_pages: Any
    v_pages: Any  # None: latents
    page_table: Any
    context_lens: Any
    query_starts: Any = None
    tree_mask: Any = None
    k_scales: Any = None
    v_scales: Any = None
    sink_logits: Any = None
    sink_query: Any = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a call. Static, hashable."""

    contexts: tuple[int, ...]  # keys before the step; −query_len: a padding row (not of prefill)
    lengths: tuple[int, ...] = ()  # of prefill: new tokens of each row
    columns: int | None = None  # of the page table; None: as the longest row needs
    copies: int = 1  # of all pages, with other contents, behind one another in the pool: see `in_copy`

    def new(self, variant: Variant) -> list[int]:
        """Tokens of each row in this step."""
        return list(self.lengths) if variant.op == "prefill" else [variant.query_len] * len(self.contexts)

    def keys(self, variant: Variant) -> list[int]:
        """That each row has after the step."""
        return [context + n for context, n in zip(self.contexts, self.new(variant), strict=True)]

    def table(self, variant: Variant) -> tuple[int, int]:
        """Shape of the page table."""
        columns = self.columns or max(1, *(-(-keys // variant.page_size) for keys in self.keys(variant)))
        return len(self.contexts), columns


def in_copy(inputs: Inputs, number: Any, pages: int) -> Inputs:
    """The same call on another copy of the `pages` (rows · columns) of a cache made with `Rows.copies`."""
    return dataclasses.replace(inputs, page_table=inputs.page_table + number * pages)


def random_key(seed: int) -> jax.Array:
    """For `random_inputs`: of the generator that compiles fastest."""
    return jax.random.key(seed, impl="rbg")


@partial(jax.jit, static_argnums=(0, 1))
def random_inputs(variant: Variant, rows: Rows, key: jax.Array) -> Inputs:
    """Standard-normal queries, keys and values, in pages that are scattered over the pool."""
    keys = iter(jax.random.split(key, 12))
    count, columns = rows.table(variant)
    size, dtype = variant.page_size, jnp.dtype(variant.page_dtype)
    # Known while tracing: XLA compiles neither a shuffle nor a scatter.
    lens, number = np.asarray(rows.keys(variant)), _scattered(count * columns)
    slot = (np.arange(columns) * size)[:, None] + np.arange(size)
    written = np.zeros((count * columns, size), bool)
    written[number] = (slot < lens[:, None, None]).reshape(-1, size)
    written = np.concatenate([np.zeros((1, size), bool), *[written] * rows.copies, np.zeros((2, size), bool)])
    table = np.where(np.arange(columns) * size < lens[:, None], number.reshape(count, columns) + 1, 0)
    held = np.stack([np.zeros_like(written)] * LAYER + [written])[:, :, None]  # [layers, pages, 1, page_size]
    shape = (LAYERS, written.shape[0], variant.kv_heads, size, variant.head_dim)

    def pages() -> tuple[jax.Array, jax.Array | None]:
        if not variant.quantized:
            return jnp.where(held[..., None], jax.random.normal(next(keys), shape, dtype), jnp.nan), None
        scales = jax.random.uniform(next(keys), shape[:-1], jnp.float32, 0.5, 2.0) / 50
        scales = jnp.where(held, scales, jnp.nan)
        if dtype == jnp.int8:
            return jax.random.randint(next(keys), shape, -127, 128, jnp.int8), scales
        return (50 * jax.random.normal(next(keys), shape, jnp.bfloat16)).astype(dtype), scales

    (k, k_scales), (v, v_scales) = pages(), (None, None) if variant.op == "latent" else pages()
    starts, tokens = None, [count, variant.query_len]
    if variant.op == "prefill":
        starts = jnp.cumsum(jnp.asarray((0, *rows.lengths), jnp.int32), dtype=jnp.int32)
        tokens = [sum(rows.lengths)]
    query = jax.random.normal(next(keys), (*tokens, variant.heads, variant.head_dim), variant.query_dtype)
    sinks = jax.random.normal(next(keys), (variant.heads,), jnp.float32) if variant.sink_logits else None
    mask = pack_bits(random_trees(next(keys), count, variant.query_len)) if variant.of_trees else None
    # Not the query in another rotation, but any other one: who takes the wrong one of the two is far off.
    other = jax.random.normal(next(keys), query.shape, query.dtype) if variant.window_sinks else None
    context = jnp.asarray(rows.contexts, jnp.int32)
    return Inputs(query, k, v, jnp.asarray(table, jnp.int32), context, starts, mask, k_scales, v_scales, sinks, other)


def _scattered(n: int) -> np.ndarray:
    """0..n−1 in an order in which neighbours lie far apart."""
    step = next(s for s in range(max(1, int(0.618 * n)), 2 * n + 1) if math.gcd(s, n) == 1)
    return np.arange(n) * step % n


def random_trees(key: jax.Array, rows: int, n: int) -> jax.Array:
    """Ancestor matrices, bool [rows, n, n], of random trees with node 0 as root: [i, j] if j is i or above it."""
    parent = (jax.random.uniform(key, (rows, n)) * jnp.arange(n)).astype(jnp.int32)  # below the node's own number
    sees = (jax.nn.one_hot(parent, n) + jnp.eye(n)) > 0
    for _ in range(math.ceil(math.log2(max(n, 2)))):
        sees = jnp.einsum("rij,rjk->rik", sees.astype(jnp.float32), sees.astype(jnp.float32)) > 0
    return sees


def pack_bits(bits: jax.Array) -> jax.Array:
    """Bool [..., n] to uint32 [..., words], the first in the lowest bit."""
    n = bits.shape[-1]
    words = -(-n // 32)
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, 32 * words - n)]).reshape(*bits.shape[:-1], words, 32)
    return (bits.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def attend(
    variant: Variant, inputs: Inputs, *, implementation: Implementation, block_sizes: BlockSizes | None = None
) -> jax.Array:
    """The variant's op on inputs of its shapes (of any dtype)."""
    common: dict[str, Any] = {
        "layer": LAYER, "scale": variant.scale, "window": variant.window, "implementation": implementation,
        "block_sizes": block_sizes,
    }  # fmt: skip
    table, context = inputs.page_table, inputs.context_lens
    if variant.op == "latent":
        common |= {"value_dim": variant.value_dim, "tree_mask": inputs.tree_mask}
        return paged_latent_attention(inputs.query, inputs.k_pages, table, context, **common)
    common |= {"soft_cap": variant.soft_cap, "sink_logits": inputs.sink_logits, "sink_query": inputs.sink_query}
    common |= {"k_scales": inputs.k_scales, "v_scales": inputs.v_scales}
    pages = inputs.k_pages, inputs.v_pages
    if inputs.query_starts is not None:
        return paged_prefill_attention(inputs.query, *pages, inputs.query_starts, table, context, **common)
    return paged_attention(inputs.query, *pages, table, context, tree_mask=inputs.tree_mask, **common)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call has to do at least."""

    bytes: int  # of keys, values and scales, each once; of queries and outputs
    flops: int  # of the two products, where a query sees the key

    @classmethod
    def of(cls, variant: Variant, rows: Rows) -> "Work":
        """A window counts; a tree's own tokens count as half seen, as in a causal chunk."""
        item = jnp.dtype(variant.page_dtype).itemsize
        widths = variant.head_dim + (0 if variant.op == "latent" else variant.value_dim)
        per_key = variant.kv_heads * (widths * item + (8 if variant.quantized else 0))
        seen, pairs, tokens = 0, 0, 0
        for context, n in zip(rows.contexts, rows.new(variant), strict=True):
            if context < 0:
                continue
            before = context if variant.window is None else min(context, variant.window.size + variant.window.sinks)
            seen, pairs, tokens = seen + before + n, pairs + n * before + n * (n + 1) // 2, tokens + n
        of_tokens = tokens * variant.heads * (variant.head_dim + variant.value_dim) * 2
        return cls(seen * per_key + of_tokens, 2 * pairs * variant.heads * (variant.head_dim + variant.value_dim))
