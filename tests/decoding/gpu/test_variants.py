"""Random inputs of kernel variants: the contract's hostile ground, and what an op has to do at least."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specax.decoding.gpu.variants import (
    LAYER,
    PAGE_DTYPES,
    Rows,
    Variant,
    Work,
    attend,
    in_copy,
    kernel_variants,
    pairs_first,
    random_inputs,
    random_key,
    random_trees,
)
from specax.pallas_kernels.block_sizes import BlockSizes, Shapes, make_plan
from specax.pallas_kernels.dispatch import HEAD_DIMS, PAGE_SIZES


def test_every_geometry_is_there_in_both_bodies() -> None:
    variants = kernel_variants()
    assert len(set(variants)) == len(variants) == len({v.name for v in variants})
    for body in ("keys", "queries"):
        got = {(v.head_dim, v.page_size, v.page_dtype) for v in variants if v.body == body}
        assert got >= {(dim, page, dtype) for dim in HEAD_DIMS for page in PAGE_SIZES for dtype in PAGE_DTYPES}
    assert variants[0] == Variant("decode") and variants[4].op == "latent"


def test_any_two_values_meet_early() -> None:
    """Where there is time for a fifth of the kernels, no pair of sizes or options goes unseen."""

    def pairs(v: Variant) -> set[Any]:
        return set(itertools.combinations(dataclasses.asdict(v).items(), 2))

    variants = [dataclasses.replace(v, window=str(v.window)) for v in kernel_variants()]  # type: ignore[arg-type]
    ordered = pairs_first(variants)
    assert len(ordered) == len(variants) and set(ordered) == set(variants) and ordered[0] == variants[0]
    early = set().union(*map(pairs, ordered[: len(ordered) // 5]))
    assert early == set().union(*map(pairs, variants))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_only_written_slots_hold_numbers(dtype: str) -> None:
    variant, rows = Variant("decode", 64, 8, dtype, kv_heads=1), Rows((20, -1, 7), copies=2)
    inputs = random_inputs(variant, rows, random_key(0))
    written = np.zeros((*inputs.k_pages.shape[:2], 8), bool)
    count = int(np.prod(rows.table(variant)))
    for row, keys in enumerate((21, 0, 8)):
        for key in range(keys):
            page = inputs.page_table[row, key // 8]
            for copy in range(2):
                written[LAYER, page + copy * count, key % 8] = True
    for holds in (inputs.k_scales, inputs.v_scales) if dtype == "int8" else (inputs.k_pages, inputs.v_pages):
        assert holds is not None
        finite = np.isfinite(np.asarray(holds, np.float32)).reshape(*written.shape[:2], 8, -1).all(-1)
        np.testing.assert_array_equal(finite, written)
    assert not np.asarray(inputs.page_table)[1].any() and np.unique(np.asarray(inputs.page_table)).size == 5
    outs = [np.asarray(attend(variant, in_copy(inputs, n, count), implementation="xla"), np.float32) for n in range(2)]
    assert np.isfinite(outs).all() and (outs[0] != outs[1]).any()


def test_trees() -> None:
    sees = np.asarray(random_trees(jax.random.key(1), 3, 20))
    for tree in sees:
        for i in range(20):
            above = np.flatnonzero(tree[i, :i])
            assert tree[i, i] and not tree[i, i + 1 :].any() and (i == 0 or 0 in above)
            if i:  # the nearest one above is the parent: it sees all the others
                np.testing.assert_array_equal(tree[above[-1]], tree[i] & (np.arange(20) != i))


def test_work() -> None:
    decode = Variant("decode", 128, kv_heads=8)
    got = Work.of(decode, Rows((4095,) * 64))
    assert got.bytes == 64 * (4096 * 8 * 2 * 128 * 2 + 2 * 32 * 128 * 2)
    assert got.flops == 4 * 64 * 32 * 4096 * 128
    assert Work.of(decode, Rows((4095, -1))) == Work.of(decode, Rows((4095,)))
    prefill = Work.of(dataclasses.replace(decode, op="prefill"), Rows((0, 10), (4, 1)))
    assert prefill.flops == 4 * 32 * 128 * (1 + 2 + 3 + 4 + 11)
    latent = Work.of(Variant("latent", 576, kv_heads=1, group=16), Rows((99,)))
    assert latent.bytes == 100 * 576 * 2 + 16 * (576 + 512) * 2 and latent.flops == 2 * 100 * 16 * (576 + 512)


def test_latents_have_one_value_part() -> None:
    """Their values are the first columns of the keys: a second part would take those too."""
    shapes = Shapes(3, 1, 1, 16, 256, 256, 16, 512, jnp.dtype("bfloat16").name)
    assert make_plan(shapes, "", None).blocks.value_parts == 2
    shapes = dataclasses.replace(shapes, latent=True)
    assert make_plan(shapes, "", None).blocks.value_parts == 1
    with pytest.raises(ValueError, match="one value part"):
        make_plan(shapes, "", None, BlockSizes(value_parts=2))
