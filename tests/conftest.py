"""Shared set-up: the CPU with four virtual devices, a persistent compilation cache, shape checks, tiny models."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

from jaxtyping import install_import_hook

# Shape annotations are checked at run time in the modules that are all device code.
CHECKED = (
    "specax.pallas_kernels",
    "specax.model.layers",
    "specax.model.decoder",
    "specax.decoding.sampler",
)
_hook = install_import_hook(list(CHECKED), "beartype.beartype")

import pathlib

import numpy as np
import pytest
from flax import nnx

from specax import LLM, EngineConfig
from specax.decoding.compile_cache import enable_compile_cache
from specax.model import Decoder, ModelConfig
from specax.sharding import Layout

enable_compile_cache()

GOLDENS = pathlib.Path(__file__).parent / "goldens"

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    eos_token_ids=(1,),
)


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """A random two-layer model whose greedy outputs vary."""
    return Decoder(TINY, rngs=nnx.Rngs(7), layout=Layout())


@pytest.fixture(scope="session")
def golden_llm() -> LLM:
    """A tiny checkpoint with transformers' numbers beside it (tests/goldens), no tokenizer."""
    config = EngineConfig(page_size=8, num_pages=64, max_rows=8, max_batched_tokens=32)
    return LLM.from_pretrained(GOLDENS / "smollm2_tied", dtype="float32", engine=config)


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "smollm2_tied" / "golden.npz") as data:
        return dict(data)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


