"""Soft caps, sink logits and quantised pages, alone and together, in both ops, against the naive reference."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specax.pallas_kernels import Window
from tests.pallas_kernels.reference import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    IMPLEMENTATIONS,
    INT8,
    Case,
    check,
    make_case,
    make_prefill_case,
    run,
)

GQA: dict[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 16, "page_size": 8}
STREAMING = Window(24, sinks=4, granularity=8)
OPTIONS: dict[str, dict[str, Any]] = {
    "soft_cap": {"soft_cap": 1.5},
    "sink_logits": {"sink_logits": True},
    "int8": {"dtype": INT8},
    "float8": {"dtype": FLOAT8},
    "int8_bf16": {"dtype": INT8, "query_dtype": BFLOAT16},
    "float8_fp16": {"dtype": FLOAT8, "query_dtype": FLOAT16},
    "gemma2": {"soft_cap": 2.0, "window": Window(20), "dtype": BFLOAT16},
    "gpt_oss": {"sink_logits": True, "window": Window(20), "dtype": BFLOAT16},
    "all": {"soft_cap": 2.0, "sink_logits": True, "window": STREAMING, "dtype": INT8},
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS)
class TestOptions:
    @pytest.mark.parametrize("n", [1, 7])
    def test_decode(self, implementation: str, options: str, n: int, rng: np.random.Generator) -> None:
        contexts = [0, 300, -n, 9, 64, -n, 17, 130]
        check(make_case(rng, contexts=contexts, query_len=n, tree=n > 1, **GQA, **OPTIONS[options]), implementation)

    def test_prefill(self, implementation: str, options: str, rng: np.random.Generator) -> None:
        lengths, contexts = [70, 0, 3, 64, 1], [0, 0, 130, 5, 200]
        case = make_prefill_case(rng, lengths=lengths, contexts=contexts, tokens=160, **GQA, **OPTIONS[options])
        check(case, implementation)


GEOMETRIES: list[dict[str, Any]] = [
    {"heads": 4, "kv_heads": 2, "head_dim": 8, "page_size": 4, "max_keys": 96},
    {"heads": 3, "kv_heads": 1, "head_dim": 16, "page_size": 16, "max_keys": 96},
]
# (Few, as each compiles a program; lengths and contents are free.)
combinations = st.sampled_from([OPTIONS["all"], {"dtype": FLOAT8, "soft_cap": 1.0}])
lengths = st.lists(st.integers(0, 40), min_size=3, max_size=3)
contexts = st.lists(st.integers(0, 56), min_size=3, max_size=3)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(geometry=st.sampled_from(GEOMETRIES), options=combinations, contexts=contexts, padding=st.booleans(), seed=seeds)
def test_drawn_trees(
    implementation: str,
    geometry: dict[str, Any],
    options: dict[str, Any],
    contexts: list[int],
    padding: bool,
    seed: int,
) -> None:
    contexts = [*contexts, -5 if padding else 91]
    case = make_case(np.random.default_rng(seed), contexts=contexts, query_len=5, tree=True, **geometry, **options)
    check(case, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15, deadline=None)
@given(geometry=st.sampled_from(GEOMETRIES), options=combinations, lengths=lengths, contexts=contexts, seed=seeds)
def test_drawn_ragged_rows(
    implementation: str,
    geometry: dict[str, Any],
    options: dict[str, Any],
    lengths: list[int],
    contexts: list[int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    case = make_prefill_case(rng, lengths=lengths, contexts=contexts, tokens=120, **geometry, **options)
    check(case, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("logit", [-np.inf, -1e4, 60.0], ids=str)
def test_extreme_sink_logits(implementation: str, logit: float, rng: np.random.Generator) -> None:
    """−∞ is no sink at all; a large one takes everything."""
    case = make_case(rng, contexts=[0, 200, -1], **GQA)
    got = check(dataclasses.replace(case, sink_logits=np.full(6, logit, np.float32)), implementation)
    if logit < 0:
        np.testing.assert_allclose(got, run(case, implementation), atol=1e-6)
    else:
        assert np.abs(got).max() < 1e-20


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float16_keeps_small_values(implementation: str, rng: np.random.Generator) -> None:
    """Scales of 2⁻¹⁷ times the softmax's weights are less than float16 can hold. (Where it is kept: not on CPUs.)"""
    case = make_case(rng, contexts=[300] * 4, dtype=INT8, query_dtype=FLOAT16, **GQA)
    assert case.v_scales is not None
    check(dataclasses.replace(case, v_scales=case.v_scales * np.float32(2**-12)), implementation)


def quantized(rng: np.random.Generator) -> Case:
    return make_case(rng, contexts=[3], dtype=INT8, **GQA)


def plain(rng: np.random.Generator) -> Case:
    return make_case(rng, contexts=[3], **GQA)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (plain, {"soft_cap": 0.0}, "soft_cap must be a number above 0, or None, got 0.0"),
        (plain, {"soft_cap": float("nan")}, "soft_cap must be a number above 0, or None, got nan"),
        (quantized, {"v_scales": None}, "go together: v_scales is missing"),
        (quantized, {"k_scales": None, "v_scales": None}, "k_pages of int8 need k_scales"),
        (plain, {"k_scales": True, "v_scales": True}, "k_scales are for pages of int8 or float8_e4m3fn, got float32"),
        (quantized, {"k_pages": np.float32}, "k_scales are for pages of int8 or float8_e4m3fn, got float32"),
        (quantized, {"v_pages": FLOAT8}, "one dtype, got int8 keys, float8_e4m3fn values"),
        (quantized, {"k_scales": BFLOAT16}, r"k_scales must be float32 \[2, .*\], got bfloat16"),
        (plain, {"k_pages": np.int32}, "k_pages must be floats, int8 or float8_e4m3fn, got int32"),
    ],
)
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_contradictions(make: Any, change: dict[str, Any], message: str, op: str, rng: np.random.Generator) -> None:
    """A dtype stands for the argument converted to it, True for scales of the right shape."""
    case = make(rng)
    for name, value in change.items():
        if value is True:
            value = np.ones(case.k_pages.shape[:-1], np.float32)
        elif isinstance(value, np.dtype | type):
            value = np.zeros_like(getattr(case, name), value)
        case = dataclasses.replace(case, **{name: value})
    if op == "prefill":
        case = dataclasses.replace(case, query=case.query[:, 0], query_starts=np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match=message):
        run(case)
