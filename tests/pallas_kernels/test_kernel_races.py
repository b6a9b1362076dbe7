"""The kernels under the race detector of Pallas' interpreter: barriers where warps share memory.

A race raises. It sees copies, loads, stores and barriers. What wgmma reads it does not (jax 0.12.0.1): that a tile is
complete before it is multiplied shows in the numbers only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from specax.pallas_kernels import BlockSizes, Window
from specax.pallas_kernels.mosaic.page_ring import PageRing
from tests.pallas_kernels.reference import BFLOAT16, FLOAT16, INT8, Case, check, make_case, make_prefill_case

GEOMETRY: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_dim": 64, "page_size": 32, "max_keys": 256}


def decode(rng: np.random.Generator) -> Case:
    return make_case(rng, contexts=[250, -1], dtype=BFLOAT16, **GEOMETRY)


def quantized_tree(rng: np.random.Generator) -> Case:
    return make_case(rng, contexts=[200], query_len=3, tree=True, dtype=INT8, query_dtype=FLOAT16, **GEOMETRY)


def two_warpgroups(rng: np.random.Generator) -> Case:
    """The last block has slots that were never written, which one of the warpgroups clears for both."""
    return make_case(rng, contexts=[170], query_len=24, tree=True, dtype=BFLOAT16, **GEOMETRY)


def prefill(rng: np.random.Generator) -> Case:
    options = {"dtype": BFLOAT16, "window": Window(40), **GEOMETRY}
    return make_prefill_case(rng, lengths=[30, 3], contexts=[130, 0], tokens=34, **options)


def latent(rng: np.random.Generator) -> Case:
    return make_case(rng, contexts=[170], query_len=20, tree=True, dtype=BFLOAT16, value_dim=64, **GEOMETRY)


# Fewer stages than blocks: slots are used again.
@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (decode, BlockSizes(stages=2)),
        (quantized_tree, BlockSizes(stages=1, splits=2)),
        (two_warpgroups, BlockSizes(stages=2, warpgroups=2)),
        (prefill, BlockSizes(stages=1, warpgroups=2)),
        (latent, BlockSizes(stages=2)),
    ],
)
def test_no_races(make: Callable[[np.random.Generator], Case], blocks: BlockSizes, rng: np.random.Generator) -> None:
    check(make(rng), "mosaic_gpu", blocks=blocks, params=plgpu.InterpretGPUParams(detect_races=True))


def test_a_race_is_found(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that does not wait until a slot is free."""
    monkeypatch.setattr(PageRing, "wait_free", lambda self, slot: None)
    monkeypatch.setattr(PageRing, "release", lambda self, slot, refilled: None)
    params = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        check(decode(rng), "mosaic_gpu", blocks=BlockSizes(stages=1), params=params)
