"""Plans: the division of a kernel's work."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from specax.pallas_kernels import BlockSizes, block_sizes
from specax.pallas_kernels.block_sizes import (
    SHARED_MEMORY,
    Shapes,
    heads_together,
    key,
    make_plan,
    max_queries,
)

KIND, CORES = "NVIDIA H200", 132
# Llama 3's: one row of a decode step, 4,096 keys at most.
LLAMA = Shapes(1, 1, heads=8, group=4, head_dim=128, value_dim=128, page_size=16, max_keys=4096, page_dtype="bfloat16")
MLA = dataclasses.replace(LLAMA, heads=8, group=16, head_dim=576, value_dim=512, latent=True)


def shapes(**change: Any) -> Shapes:
    return dataclasses.replace(LLAMA, **change)


class TestSplits:
    @pytest.mark.parametrize(
        ("change", "splits"),
        [
            ({}, 14),  # 85 % of what 64 key blocks allow, 16 splits of 4
            ({"max_keys": 32768}, 29),  # 29 · 8 blocks of the 264 that run at a time
            ({"sequences": 8}, 4),
            ({"sequences": 33}, 1),  # 264 thread blocks
            ({"sequences": 36}, 4),  # 288: one split would leave the second wave nearly empty
            ({"sequences": 64}, 1),
            ({"max_keys": 448}, 1),
            ({"max_keys": 512}, 2),
            ({"heads": 1, "max_keys": 131072}, 225),
            # Queries as rows: one thread block per SM; 4096 tokens are 128 tiles of 32.
            ({"tokens": 4096}, 1),
            ({"tokens": 64}, 7),
        ],
        ids=str,
    )
    def test_as_many_as_fill_the_gpu(self, change: dict[str, Any], splits: int) -> None:
        assert make_plan(shapes(**change), KIND, CORES).splits == splits

    def test_without_a_number_of_cores_it_is_an_h200s(self) -> None:
        assert make_plan(LLAMA, KIND, None) == make_plan(LLAMA, KIND, CORES)
        assert make_plan(shapes(sequences=8), KIND, 66).splits == 2

    def test_the_caller_decides(self) -> None:
        assert make_plan(LLAMA, KIND, CORES, BlockSizes(splits=7)).splits == 7


class TestBody:
    @pytest.mark.parametrize(
        ("change", "body", "queries"),
        [
            ({}, "keys", 8),
            ({"tokens": 3}, "keys", 16),
            ({"tokens": 8}, "keys", 32),
            ({"tokens": 9}, "queries", 64),
            ({"tokens": 5, "head_dim": 256, "value_dim": 256, "page_dtype": "int8"}, "queries", 64),
            ({"tokens": 4, "head_dim": 256, "value_dim": 256, "page_dtype": "int8"}, "keys", 16),
        ],
        ids=str,
    )
    def test_by_packed_queries(self, change: dict[str, Any], body: str, queries: int) -> None:
        plan = make_plan(shapes(**change), KIND, CORES)
        assert (plan.body, plan.queries, plan.keys_are_rows) == (body, queries, body == "keys")

    def test_latents_as_wide_as_deepseeks_have_keys_as_rows(self) -> None:
        plan = make_plan(dataclasses.replace(MLA, tokens=8), KIND, CORES)
        assert (plan.body, plan.queries, plan.value_dim) == ("keys", 16, 512)

    def test_latents_with_wide_values_have_keys_as_rows(self) -> None:
        """With queries as rows their output takes more registers than there are (found by specax-gpu-check)."""
        wide = shapes(tokens=8, group=16, head_dim=256, value_dim=256, latent=True)
        assert (make_plan(wide, KIND, CORES).body, make_plan(wide, KIND, CORES).queries) == ("keys", 32)
        assert heads_together(64, 256, latent=True) == 32 and heads_together(64, 256) == 64

    def test_a_tile_of_one_warpgroup_has_one(self) -> None:
        assert make_plan(shapes(tokens=16), KIND, CORES).blocks.warpgroups == 1
        assert make_plan(shapes(tokens=17), KIND, CORES).blocks.warpgroups == 2

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 48, 64, 65, 72, 96, 128, 67])
    @pytest.mark.parametrize("value_dim", [64, 256, 512])
    def test_heads_together(self, group: int, value_dim: int) -> None:
        together, most = heads_together(group, value_dim), 16 if value_dim == 512 else 64
        assert group % together == 0 and together <= most
        assert not any(group % n == 0 for n in range(together + 1, min(most, group) + 1))


ALL_SHAPES = [
    shapes(tokens=n, head_dim=dim, value_dim=dim, page_size=page, page_dtype=dtype)
    for n, dim, page, dtype in itertools.product(
        (1, 8, 64), (64, 128, 256), (8, 16, 32, 64, 128), ("bfloat16", "int8", "float8_e4m3fn")
    )
] + [dataclasses.replace(MLA, page_size=page) for page in (8, 16, 32, 64, 128)]


@pytest.mark.parametrize("of", ALL_SHAPES, ids=str)
def test_shared_memory_holds_every_plan(of: Shapes) -> None:
    """Counted anew, as the kernel allocates: rings, query, weight and output tiles, widened tiles, scales."""
    plan = make_plan(of, KIND, CORES)
    blocks, wide = plan.blocks, 2
    narrow = 1 if of.quantized else wide
    columns = plan.value_dim // blocks.value_parts
    values = 0 if of.latent else columns  # latents have none of their own
    ring = blocks.stages * blocks.keys * (of.head_dim + values) * narrow
    rows = blocks.warpgroups * plan.queries
    total = ring + rows * (of.head_dim + blocks.keys) * wide
    total += rows * (columns if plan.keys_are_rows else 64) * (wide if plan.splits == 1 else 4)
    if of.quantized:
        total += blocks.keys * (of.head_dim + values) * wide + 2 * blocks.stages * blocks.keys * 4
    total += rows * (2 + math.ceil(of.tokens / 32)) * 4 + rows * 2 * 4
    assert total <= SHARED_MEMORY
    assert blocks.stages >= 1 and (blocks.keys % of.page_size == 0 or of.page_size % blocks.keys == 0)
    assert plan.queries <= (max_queries(of) if plan.keys_are_rows else 64)


@pytest.mark.parametrize(
    ("blocks", "change", "message"),
    [
        ({"keys": 32}, {}, "keys must be at least 64, got 32"),
        ({"stages": 0}, {}, "stages must be at least 1, got 0"),
        ({"stages": 33}, {}, "stages must be at most 32, got 33"),
        ({"warpgroups": 0}, {}, "warpgroups must be at least 1, got 0"),
        ({"value_parts": 0}, {}, "value_parts must be at least 1, got 0"),
        ({"splits": 0}, {}, "splits must be at least 1, got 0"),
        ({"keys": 96}, {}, "keys must be .* page size 16 or a part of it, got BlockSizes.*keys=96"),
        ({"keys": 192}, {"page_size": 128}, "keys must be .* page size 128 or a part of it, got"),
        ({"warpgroups": 2}, {}, "several warpgroups need queries as rows, 16-bit pages"),
        ({"warpgroups": 2}, {"tokens": 64, "page_dtype": "int8"}, "several warpgroups need queries as rows"),
        ({"warpgroups": 2}, {"tokens": 64, "latent": True}, "several warpgroups need .* values of their own"),
        ({"value_parts": 4}, {}, "value_parts must split head dim 128 in 64s"),
    ],
    ids=str,
)
def test_blocks_that_do_not_fit(blocks: dict[str, int], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"block sizes: {message}"):
        make_plan(shapes(**change), KIND, CORES, BlockSizes(**blocks))


class TestTable:
    def test_an_entry_comes_before_the_rule_and_after_the_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rule = make_plan(LLAMA, KIND, CORES).blocks
        name = key(KIND, "keys", LLAMA)
        assert name == "NVIDIA H200/keys/128/16/bfloat16"
        monkeypatch.setattr(block_sizes, "tuned", lambda: {name: {"keys": 128, "stages": 2, "splits": 5}})
        assert make_plan(LLAMA, KIND, CORES).blocks == BlockSizes(keys=128, stages=2, splits=5) != rule
        assert make_plan(LLAMA, KIND, CORES).splits == 5
        assert make_plan(LLAMA, "NVIDIA H100", CORES).blocks == rule
        assert make_plan(shapes(page_size=32), KIND, CORES).blocks != BlockSizes(keys=128, stages=2, splits=5)
        assert make_plan(LLAMA, KIND, CORES, BlockSizes(stages=3)).blocks == BlockSizes(stages=3)

    def test_an_entry_that_does_not_fit_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A latent cache as wide as an ordinary head, whose key it shares."""
        latent = shapes(tokens=64, latent=True)
        entry = {key(KIND, "queries", latent): {"warpgroups": 2, "stages": 3}}
        monkeypatch.setattr(block_sizes, "tuned", lambda: entry)
        assert make_plan(latent, KIND, CORES).blocks.warpgroups == 1
        assert make_plan(shapes(tokens=64), KIND, CORES).blocks == BlockSizes(stages=3, warpgroups=2)

    def test_every_entry_of_the_file_makes_a_plan(self) -> None:
        """Each key names a body, a head dim, a page size and a dtype that blocks of that size serve."""
        for name, entry in block_sizes.tuned().items():
            kind, body, head_dim, page_size, dtype = name.split("/")
            of = MLA if int(head_dim) > 256 else shapes(head_dim=int(head_dim), value_dim=int(head_dim))
            of = dataclasses.replace(
                of, tokens=1 if body == "keys" else 4096, page_size=int(page_size), page_dtype=dtype
            )
            assert make_plan(of, kind, CORES).blocks == BlockSizes(**entry)


def test_more_tiles_than_a_launch_takes() -> None:
    with pytest.raises(ValueError, match="100000 query tiles · 1 splits are more than one launch takes, 65535"):
        make_plan(shapes(tokens=200_000, group=64), KIND, CORES)
