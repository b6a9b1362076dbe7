"""The paged-attention ops against the naive reference (`reference.py`), and the writes into the cache.

`TestAttentionContract` holds for every implementation that takes any shape; a new one is added to `IMPLEMENTATIONS`
and no more. Kernels that take some shapes only have theirs in `test_kernels.py`.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specax.pallas_kernels import copy_pages, paged_attention, paged_prefill_attention, write_kv
from tests.pallas_kernels.reference import (
    BFLOAT16,
    FLOAT16,
    IMPLEMENTATIONS,
    check,
    make_case,
    make_prefill_case,
    permuted,
    run,
)

GQA: dict[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 16, "page_size": 8}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "gqa": GQA,
    "mha_small_pages": {"heads": 4, "kv_heads": 4, "head_dim": 8, "page_size": 4},
    "mqa_large_pages": {"heads": 8, "kv_heads": 1, "head_dim": 32, "page_size": 16},
    "bf16": GQA | {"dtype": BFLOAT16},
    "bf16_cache": GQA | {"dtype": BFLOAT16, "query_dtype": np.float32},
    "fp16": GQA | {"dtype": FLOAT16},
}


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestAttentionContract:
    """What every implementation of both ops owes."""

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("contexts", DECODE_CONTEXTS)
    def test_decode(self, implementation: str, geometry: str, contexts: str, rng: np.random.Generator) -> None:
        g = GEOMETRIES[geometry]
        context = DECODE_CONTEXTS[contexts](g["page_size"])
        got = check(make_case(rng, contexts=context, **g), implementation)
        assert not got[np.array(context) < 0].any()

    @pytest.mark.parametrize("n", [2, 7, 33])
    @pytest.mark.parametrize("geometry", ["gqa", "bf16_cache"])
    def test_tree(self, implementation: str, geometry: str, n: int, rng: np.random.Generator) -> None:
        g = GEOMETRIES[geometry]
        context = [0, 1, g["page_size"], 64 - n, 65, 128, 250, -n]
        got = check(make_case(rng, contexts=context, query_len=n, tree=True, **g), implementation)
        assert not got[-1].any()

    def test_without_a_mask_own_keys_are_causal(self, implementation: str, rng: np.random.Generator) -> None:
        check(make_case(rng, contexts=[0, 1, 60, 64, 121, 200, 13, -7], query_len=7, **GQA), implementation)

    @pytest.mark.parametrize("geometry", GEOMETRIES)
    @pytest.mark.parametrize("rows", PREFILL_ROWS)
    def test_prefill(self, implementation: str, geometry: str, rows: str, rng: np.random.Generator) -> None:
        lengths, contexts = PREFILL_ROWS[rows]
        options = GEOMETRIES[geometry] | {"max_keys": 384, "tokens": 160}
        got = check(make_prefill_case(rng, lengths=lengths, contexts=contexts, **options), implementation)
        assert not got[sum(lengths) :].any()

    @pytest.mark.parametrize("seed", range(6))
    def test_prefill_of_random_rows(self, implementation: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = np.diff([0, *np.sort(rng.integers(0, 161, size=5))]).tolist()
        contexts = [int(rng.integers(0, 384 - length)) for length in lengths]
        case = make_prefill_case(rng, lengths=lengths, contexts=contexts, tokens=160, max_keys=384, **GQA)
        check(case, implementation)

    def test_physical_order_of_pages_changes_no_bit(self, implementation: str, rng: np.random.Generator) -> None:
        lengths, contexts = PREFILL_ROWS["ragged"]
        for case in (
            make_case(rng, contexts=DECODE_CONTEXTS["long"](8), **GQA),
            make_prefill_case(rng, lengths=lengths, contexts=contexts, tokens=160, max_keys=384, **GQA),
        ):
            first = run(case, implementation)
            np.testing.assert_array_equal(first, run(permuted(case, rng), implementation))

    def test_rows_do_not_mix(self, implementation: str, rng: np.random.Generator) -> None:
        """A row's output is the same bits wherever it stands and whoever else is there."""
        case = make_case(rng, contexts=[40, 0, 130, 7, 64, 300, 12, 1], **GQA)
        together = run(case, implementation)
        order = rng.permutation(8)
        moved = dataclasses.replace(
            case, query=case.query[order], page_table=case.page_table[order], context_lens=case.context_lens[order]
        )
        np.testing.assert_array_equal(run(moved, implementation), together[order])
        for row in (0, 2, 5):
            here = np.arange(8) == row
            tables, contexts = np.where(here[:, None], case.page_table, 0), np.where(here, case.context_lens, -1)
            alone = dataclasses.replace(case, page_table=tables, context_lens=contexts)
            np.testing.assert_array_equal(run(alone, implementation)[row], together[row])

    def test_the_query_dtype_is_the_output_dtype(self, implementation: str) -> None:
        cache = jnp.zeros((1, 3, 1, 4, 8), jnp.float32)
        static: Any = {"layer": 0, "scale": 1.0, "implementation": implementation}
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
