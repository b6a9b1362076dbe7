"""Which implementation serves a call, and what a named one says when it can't."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from specax.pallas_kernels import Window, dispatch, interpreted
from specax.pallas_kernels.attention_options import AttentionOptions
from tests.pallas_kernels.reference import BFLOAT16, FLOAT16, FLOAT32, INT8, make_case, make_prefill_case, run

SERVED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": BFLOAT16}
PLAIN = AttentionOptions(layer=0, scale=1.0)
QUERY = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16)
PAGES = jax.ShapeDtypeStruct((1, 4, 2, 16, 64), jnp.bfloat16)


def choose(name: Any, *, kind: str, platform: str = "gpu", monkeypatch: pytest.MonkeyPatch, **shapes: Any) -> str:
    monkeypatch.setattr(dispatch, "device", lambda: (platform, kind, 132))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # (structs stand for arrays)
    return dispatch.choose(name, shapes.get("query", QUERY), shapes.get("pages", PAGES), PLAIN)


@pytest.mark.parametrize(
    ("platform", "kind", "want"),
    [
        ("gpu", "NVIDIA H200", "mosaic_gpu"),
        ("cuda", "NVIDIA H100 80GB HBM3", "mosaic_gpu"),
        ("gpu", "NVIDIA GH200 480GB", "mosaic_gpu"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "xla"),
        ("gpu", "NVIDIA B200", "xla"),
        ("gpu", "NVIDIA RTX 4090", "xla"),
        ("tpu", "TPU v5", "xla"),
        ("cpu", "H200", "xla"),
    ],
)
def test_by_device(platform: str, kind: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(None, kind=kind, platform=platform, monkeypatch=monkeypatch) == want
    assert choose("xla", kind=kind, platform=platform, monkeypatch=monkeypatch) == "xla"


def test_what_kernels_do_not_serve_falls_back_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.float32)
    assert choose(None, kind="NVIDIA H200", query=wide, monkeypatch=monkeypatch) == "xla"


def test_on_a_cpu_that_is_xla(rng: np.random.Generator) -> None:
    case = make_case(rng, contexts=[40, 0, -1], **SERVED)
    np.testing.assert_array_equal(run(case, None), run(case, "xla"))
    assert jax.devices()[0].platform == "cpu"
    prefill = make_prefill_case(rng, lengths=[3], contexts=[5], tokens=4, **SERVED)
    for each in (case, prefill):
        arguments = (jnp.asarray(each.query), jnp.asarray(each.k_pages), PLAIN)
        with pytest.raises(NotImplementedError, match=r"needs a Hopper GPU \(H100, H200\), the device is 'cpu'"):
            dispatch.choose("mosaic_gpu", *arguments)
        with interpreted():
            assert dispatch.choose(None, *arguments) == "mosaic_gpu"
            assert dispatch.choose("xla", *arguments) == "xla"
        assert dispatch.choose(None, *arguments) == "xla"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": FLOAT32}, "it takes bfloat16 or float16 queries, got float32"),
        ({"dtype": INT8}, "it takes bfloat16 or float16 queries, got float32"),
        ({"query_dtype": FLOAT16}, "pages must have the query's dtype or be 8-bit"),
        ({"page_size": 4}, "page size must be one of (8, 16, 32, 64, 128), got 4"),
        ({"head_dim": 96}, "head_dim must be one of (64, 128, 256), got 96"),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_reasons(op: str, change: dict[str, Any], reason: str, rng: np.random.Generator) -> None:
    geometry = SERVED | change
    if op == "decode":
        case = make_case(rng, contexts=[0], **geometry)
    else:
        case = make_prefill_case(rng, lengths=[1], contexts=[0], tokens=1, **geometry)
    message = f"implementation 'mosaic_gpu' can't serve this call: {reason}"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        run(case, "mosaic_gpu")
    with interpreted():
        run(case, None)  # XLA takes it


@pytest.mark.parametrize(
    ("width", "value_dim", "message"),
    [(96, 64, "got 96 and 64"), (128, 96, "got 128 and 96"), (640, 512, "got 640 and 512"), (576, 576, "and 576")],
)
def test_latent_reasons(width: int, value_dim: int, message: str, rng: np.random.Generator) -> None:
    case = make_case(rng, contexts=[3], **SERVED | {"kv_heads": 1, "head_dim": width, "value_dim": value_dim})
    with pytest.raises(NotImplementedError, match=message):
        run(case, "mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value_dim": 0}, "value_dim must be from 1 to the latents' width 64, got 0"),
        ({"value_dim": 65}, "value_dim must be from 1 to the latents' width 64, got 65"),
        ({"window": Window(20, sinks=2)}, "latent attention has windows without sinks only, got Window"),
    ],
)
def test_latent_nonsense(change: dict[str, Any], message: str, rng: np.random.Generator) -> None:
    case = make_case(rng, contexts=[3], **SERVED | {"kv_heads": 1, "value_dim": 64})
    with pytest.raises(ValueError, match=message):
        run(dataclasses.replace(case, **change))


def test_an_unknown_name(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # (which would refuse it first)
    for change in ({}, {"kv_heads": 1, "value_dim": 64}):
        with pytest.raises(NotImplementedError, match="'triton' is not there: take 'xla', 'mosaic_gpu' or None"):
            run(make_case(rng, contexts=[3], **SERVED | change), "triton")


def test_the_device_of_a_mesh_comes_first() -> None:
    """So a program that is compiled for an H200 without one takes its kernels."""
    kind = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    axes = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), axes, abstract_device=kind)):
        assert dispatch.device() == ("gpu", "NVIDIA H200", 132)
        query, pages = (jnp.zeros(x.shape, x.dtype) for x in (QUERY, PAGES))
        assert dispatch.choose(None, query, pages, PLAIN) == "mosaic_gpu"
    assert dispatch.device()[0] == "cpu"
