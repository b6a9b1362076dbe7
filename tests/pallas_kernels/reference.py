"""The contract of the paged-attention ops, written out naively in NumPy, and random cases to hold them to it.

    case = make_case(rng, contexts=[0, 17, 40], heads=6, kv_heads=3, head_dim=16, page_size=8, soft_cap=2.0)
    check(case, "xla")

Cases are hostile where the contract allows it. Rows' pages lie out of order; about half of the rows share full pages
with an earlier one, as from a prefix cache. Pages in which a row sees no key are taken from it (page-table entry 0).
NaN is in the trash page, the other layer, pages that no row holds, and slots behind a row's last key; where int8 pages
have none, their scales do.

With `value_dim`, a case is one of latent attention: keys of one head, whose first columns are the values.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specax.pallas_kernels import (
    BlockSizes,
    Window,
    interpreted,
    paged_attention,
    paged_latent_attention,
    paged_prefill_attention,
)

IMPLEMENTATIONS = ["xla"]  # those that take every shape and dtype
KERNELS = ["xla", "mosaic_gpu"]  # those that take the kernels' shapes and dtypes
LAYERS, LAYER = 2, 1
FLOAT32, FLOAT16, INT8 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8)
BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
# Of max |out − reference| / max |reference|, by the dtype of the matrix products. (Over many seeds XLA's worst on a
# CPU are 7e-7, 6e-3 and 6e-4.)
TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 8e-3, FLOAT16: 5e-3}
MOSAIC_TOLERANCE = 5e-3

_STATIC = ("layer", "scale", "window", "implementation", "block_sizes")
decode_op = jax.jit(paged_attention, static_argnames=(*_STATIC, "soft_cap"))
prefill_op = jax.jit(paged_prefill_attention, static_argnames=(*_STATIC, "soft_cap"))
latent_op = jax.jit(paged_latent_attention, static_argnames=(*_STATIC, "value_dim"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: arguments as the public ops take them, and `sees`, which they know only packed, or by causality."""

    query: np.ndarray  # [rows, query_len, heads, head_dim]; of ragged rows [tokens, heads, head_dim]
    k_pages: np.ndarray
    v_pages: np.ndarray  # of latent attention: k_pages
    page_table: np.ndarray
    context_lens: np.ndarray
    sees: list[np.ndarray]  # of each row, [own, own]: own key j is visible to own query i, windows aside
    scale: float
    query_starts: np.ndarray | None = None  # of ragged rows (prefill)
    tree_mask: np.ndarray | None = None
    window: Window | None = None
    soft_cap: float | None = None
    sink_query: np.ndarray | None = None
    sink_logits: np.ndarray | None = None
    k_scales: np.ndarray | None = None
    v_scales: np.ndarray | None = None
    value_dim: int | None = None  # of latent attention

    @property
    def rows(self) -> list[tuple[int, np.ndarray, slice | int]]:
        """Of each row that is no padding: its number, `sees`, and where its queries are in `query`."""
        at: list[slice | int] = list(range(len(self.sees)))
        if self.query_starts is not None:
            starts = self.query_starts.tolist()
            at = [slice(a, b) for a, b in itertools.pairwise(starts)]
        return [(row, self.sees[row], at[row]) for row in range(len(at)) if self.context_lens[row] >= 0]


def run(
    case: Case, implementation: str | None = "xla", blocks: BlockSizes | None = None, params: Any = None
) -> np.ndarray:
    """The case through the public op, jitted; kernels through Pallas' interpreter, with `params`."""
    names = ["scale", "window"]
    if case.value_dim is None:
        names += ["soft_cap", "sink_query", "sink_logits", "k_scales", "v_scales"]
    named = {name: getattr(case, name) for name in names}
    named |= {"layer": LAYER, "implementation": implementation, "block_sizes": blocks}
    pages, rows = (case.k_pages, case.v_pages), (case.page_table, case.context_lens)
    with interpreted(params) if implementation == "mosaic_gpu" else contextlib.nullcontext():
        if case.query_starts is not None:
            return np.asarray(prefill_op(case.query, *pages, case.query_starts, *rows, **named))
        if case.value_dim is not None:
            named |= {"tree_mask": case.tree_mask, "value_dim": case.value_dim}
            return np.asarray(latent_op(case.query, case.k_pages, *rows, **named))
        return np.asarray(decode_op(case.query, *pages, *rows, tree_mask=case.tree_mask, **named))


def check(
    case: Case,
    implementation: str | None = "xla",
    tolerance: float | None = None,
    blocks: BlockSizes | None = None,
    params: Any = None,
) -> np.ndarray:
    """Holds the op to the reference; returns its output."""
    got, want = run(case, implementation, blocks, params), reference(case)
    assert got.dtype == case.query.dtype and got.shape == want.shape
    if tolerance is None:
        tolerance = TOLERANCE[case.query.dtype if case.k_scales is not None else case.k_pages.dtype]
        if implementation == "mosaic_gpu":
            tolerance = MOSAIC_TOLERANCE
    error = np.abs(got.astype(np.float64) - want).max(initial=0)  # (NaN stays NaN, and fails)
    assert error <= tolerance * np.abs(want).max(initial=0), f"off by {error} of {np.abs(want).max()}"
    assert not got[(want == 0).all(-1)].any()  # rows without keys, and padding
    return got


def reference(case: Case) -> np.ndarray:
    """Float64, as the query: row by row, query by query, head by head."""
    out = np.zeros((*case.query.shape[:-1], case.value_dim or case.query.shape[-1]), np.float64)
    sink_query = case.query if case.sink_query is None else case.sink_query
    for row, sees, at in case.rows:
        keys, values = keys_and_values(case, row)
        seen = seen_keys(int(case.context_lens[row]), sees, case.window)
        out[at] = [
            _attend(case, q.astype(np.float64), sink_q.astype(np.float64), keys, values, np.flatnonzero(of_query))
            for q, sink_q, of_query in zip(case.query[at], sink_query[at], seen, strict=True)
        ] or out[at]
    return out


def _attend(
    case: Case, q: np.ndarray, sink_q: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """One query [heads, head_dim] over the keys numbered `seen`."""
    out, group = np.zeros((q.shape[0], values.shape[2])), q.shape[0] // keys.shape[1]
    is_sink = seen < (case.window.sinks if case.window else 0)
    for head in range(q.shape[0] if seen.size else 0):
        k, v = keys[seen, head // group], values[seen, head // group]
        scores = np.where(is_sink, k @ sink_q[head], k @ q[head]) * case.scale
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        top = scores.max()
        if case.sink_logits is not None:
            top = max(top, case.sink_logits[head])
        weights = np.exp(scores - top)
        total = weights.sum()
        if case.sink_logits is not None:
            total += np.exp(case.sink_logits[head] - top)
        out[head] = weights @ v / total
    return out


def keys_and_values(case: Case, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Float64 [keys, kv_heads, head_dim] of a row, slot by slot, scaled; NaN on pages taken from it."""
    size = case.k_pages.shape[3]
    slots = [divmod(p, size) for p in range(case.context_lens[row] + len(case.sees[row]))]
    pages = np.array([case.page_table[row, column] for column, _ in slots], int) % case.k_pages.shape[1]  # (if seen)
    offsets = [offset for _, offset in slots]

    def read(pool: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        got = pool[LAYER, pages, :, np.array(offsets, int)].astype(np.float64)
        return got if scales is None else got * scales[LAYER, pages, :, np.array(offsets, int)][..., None]

    return read(case.k_pages, case.k_scales), read(case.v_pages, case.v_scales)[..., : case.value_dim]


def visible(window: Window, n: int) -> set[int]:
    """The keys that the query at position n sees, by the definition."""
    start = max(0, n + 1 - window.size)
    while start % window.granularity:
        start -= 1
    return {j for j in range(n + 1) if j >= start or j < window.sinks}


def seen_keys(context: int, sees: np.ndarray, window: Window | None) -> np.ndarray:
    """[own, context + own]: what each own query sees. A token's position is the context and its depth in the tree."""
    seen = np.concatenate([np.ones((len(sees), context), bool), sees], axis=1)
    if window is not None:
        positions = np.concatenate([np.arange(context), context + sees.sum(1) - 1])
        for of_query, position in zip(seen, positions[context:].tolist(), strict=True):
            of_query &= np.isin(positions, list(visible(window, position)))
    return seen


def random_trees(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Ancestor matrices [rows, n, n] of random trees whose node 0 is the root."""
    sees = np.zeros((rows, n, n), bool)
    for row in range(rows):
        for i in range(n):
            if i:
                sees[row, i] = sees[row, rng.integers(0, i)]
            sees[row, i, i] = True
    return sees


def packed(sees: np.ndarray) -> np.ndarray:
    """Ancestor matrices in 32-bit words, bit by bit."""
    rows, n, _ = sees.shape
    words = np.zeros((rows, n, -(-n // 32)), np.uint32)
    for row, i, j in np.argwhere(sees):
        words[row, i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    return words


def make_case(
    rng: np.random.Generator,
    *,
    contexts: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    query_len: int = 1,
    tree: bool = False,
    **options: Any,
) -> Case:
    """Decode, or verification of draft trees: one row of query_len tokens for each context (−query_len: padding).

    `options` are those of `_make`.
    """
    rows = len(contexts)
    sees = random_trees(rng, rows, query_len) if tree else np.tril(np.ones((rows, query_len, query_len), bool))
    shape = (rows, query_len, heads, head_dim)
    case = _make(rng, shape, list(sees), contexts, kv_heads, page_size, **options)
    return dataclasses.replace(case, tree_mask=packed(sees) if tree else None)


def make_prefill_case(
    rng: np.random.Generator,
    *,
    lengths: Sequence[int],
    contexts: Sequence[int],
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    **options: Any,
) -> Case:
    """Ragged rows of `lengths` new tokens, and padding up to `tokens`. `options` are those of `_make`."""
    sees = [np.tril(np.ones((length, length), bool)) for length in lengths]
    case = _make(rng, (tokens, heads, head_dim), sees, contexts, kv_heads, page_size, **options)
    return dataclasses.replace(case, query_starts=np.cumsum([0, *lengths], dtype=np.int32))


def permuted(case: Case, rng: np.random.Generator) -> Case:
    """The same rows with every physical page somewhere else (the trash page too)."""
    to = rng.permutation(case.k_pages.shape[1])
    back, table = np.argsort(to), case.page_table
    pools = {name: getattr(case, name) for name in ("k_pages", "v_pages", "k_scales", "v_scales")}
    moved = {name: x[:, back] for name, x in pools.items() if x is not None}
    here = (table >= 0) & (table < to.size)  # (the others are never followed)
    return dataclasses.replace(case, page_table=np.where(here, to[table % to.size], table).astype(np.int32), **moved)


def _make(
    rng: np.random.Generator,
    query_shape: tuple[int, ...],
    sees: list[np.ndarray],
    contexts: Sequence[int],
    kv_heads: int,
    page_size: int,
    *,
    max_keys: int = 320,
    dtype: Any = np.float32,
    query_dtype: Any = None,
    window: Window | None = None,
    soft_cap: float | None = None,
    sink_logits: bool = False,
    scale: float | None = None,
    value_dim: int | None = None,
) -> Case:
    """Standard-normal queries, keys and values.

    max_keys: that a page table can name. dtype: of the pages; with int8 and float8 come scales. query_dtype: None is
    that of the pages, or float32. scale: None is 1/√head_dim. value_dim: of latent attention.
    """
    dtype, heads, head_dim = np.dtype(dtype), *query_shape[-2:]
    quantized = dtype in (INT8, FLOAT8)
    query_dtype = query_dtype or (FLOAT32 if quantized else dtype)
    table = _page_table(rng, [c + len(own) for c, own in zip(contexts, sees)], contexts, page_size, max_keys)
    written = _take_back(table, sees, contexts, page_size, window)
    # Not hanging on the lengths: every case of a geometry runs the same program.
    shape = (LAYERS, table.size + 8, kv_heads, page_size, head_dim)
    pages, scales = [], []
    for _ in range(2):
        wide, scale_of = rng.normal(size=shape), rng.uniform(0.5, 2.0, shape[:-1]).astype(np.float32)
        where = np.broadcast_to((np.arange(LAYERS) == LAYER)[:, None, None, None], shape[:-1]).copy()
        where[LAYER] &= _slots(written, shape[1], page_size)[:, None]
        wide[~where], scale_of[~where] = np.nan, np.nan
        if dtype == INT8:
            wide = np.nan_to_num(np.clip(np.round(wide * 40), -127, 127), nan=127)
        elif dtype == FLOAT8:
            wide = wide * 60  # of at most 448
        pages.append(wide.astype(dtype))
        scales.append(scale_of / (40 if dtype == INT8 else 60))
    sink_query = rng.normal(size=query_shape).astype(query_dtype) if window is not None and window.sinks else None
    return Case(
        query=rng.normal(size=query_shape).astype(query_dtype),
        k_pages=pages[0],
        v_pages=pages[1] if value_dim is None else pages[0],
        page_table=table,
        context_lens=np.asarray(contexts, np.int32),
        sees=sees,
        scale=float(head_dim) ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sink_query=sink_query,
        sink_logits=rng.normal(size=heads).astype(np.float32) if sink_logits else None,
        k_scales=scales[0] if quantized else None,
        v_scales=scales[1] if quantized else None,
        value_dim=value_dim,
    )


def _page_table(
    rng: np.random.Generator, lengths: list[int], contexts: Sequence[int], page_size: int, max_keys: int
) -> np.ndarray:
    """Pages in random order. About half of the rows begin with full pages that an earlier row's context begins with."""
    rows, columns = len(lengths), max_keys // page_size
    if max(lengths, default=0) > max_keys:
        raise ValueError(f"rows of {max(lengths)} keys need max_keys, got {max_keys}")
    table = np.zeros((rows, columns), np.int32)
    free = iter(rng.permutation(np.arange(1, rows * columns + 8)).tolist())
    for row, length in enumerate(lengths):
        shared = 0
        if row and rng.random() < 0.5:
            other = int(rng.integers(row))
            full = min(contexts[row], contexts[other]) // page_size
            shared = int(rng.integers(0, max(full, 0) + 1))
            table[row, :shared] = table[other, :shared]
        for column in range(shared, -(-length // page_size)):
            table[row, column] = next(free)
    return table


def _take_back(
    table: np.ndarray, sees: list[np.ndarray], contexts: Sequence[int], page_size: int, window: Window | None
) -> list[tuple[int, int]]:
    """Sets entries of pages in which a row sees no key to 0; the slots (page, offset) that rows still hold."""
    held: list[tuple[int, int]] = []
    for row, own in enumerate(sees):
        length = contexts[row] + len(own)
        seen = set(range(max(length, 0)))
        if window is not None:
            seen = set(np.flatnonzero(seen_keys(contexts[row], own, window).any(0)).tolist()) if length > 0 else set()
        for column in range(-(-length // page_size)):
            first = column * page_size
            here = range(first, min(first + page_size, length))
            if seen.isdisjoint(here):
                table[row, column] = 0
            else:
                held += [(int(table[row, column]), key - first) for key in here]
    return held


def _slots(held: list[tuple[int, int]], pages: int, page_size: int) -> np.ndarray:
    """[pages, page_size] bool."""
    slots = np.zeros((pages, page_size), bool)
    for page, offset in held:
        slots[page, offset] = True
    return slots
