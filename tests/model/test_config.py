"""ModelConfig from `config.json` and GGUF metadata: what it reads, and what it refuses by name."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from specax import CheckpointError
from specax.model.config import KVGroup, ModelConfig, RopeScaling
from specax.model.layers import rotary_frequencies

HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 5],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_from_hf() -> None:
    config = ModelConfig.from_hf(HF)
    assert (config.num_kv_heads, config.group_size, config.head_dim) == (3, 2, 8)
    assert config.eos_token_ids == (2, 5) and config.rope_theta == 10000.0 and config.rope_scaling is None
    assert not config.tie_embeddings and not config.attention_bias and not config.mlp_bias
    assert ModelConfig.from_hf({**HF, "num_key_value_heads": None}).num_kv_heads == 6
    assert ModelConfig.from_hf({**HF, "head_dim": 16}).head_dim == 16


def test_rope_in_both_spellings() -> None:
    old = ModelConfig.from_hf({**HF, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = ModelConfig.from_hf({**HF, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old == new and old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64) and old.rope_theta == 5e5


def test_rope_factors_divide_the_frequencies() -> None:
    plain = ModelConfig.from_hf(HF)
    factors = (1.0, 2.0, 4.0, 8.0)
    divided = ModelConfig(**{**plain.__dict__, "rope_factors": factors})
    np.testing.assert_allclose(
        rotary_frequencies(divided), np.asarray(rotary_frequencies(plain)) / np.asarray(factors), rtol=1e-12
    )


def test_windows() -> None:
    mistral = {**HF, "architectures": ["MistralForCausalLM"], "num_hidden_layers": 4}
    config = ModelConfig.from_hf({**mistral, "sliding_window": 100})
    assert config.windows == (100,) * 4 and config.max_position == 256
    assert config.kv_groups == (KVGroup((0, 1, 2, 3), 100),)
    assert ModelConfig.from_hf({**mistral, "sliding_window": None}).windows == ()
    assert ModelConfig.from_hf(mistral).windows == (4096,) * 4  # transformers' default
    assert ModelConfig.from_hf({**HF, "sliding_window": 100}).windows == ()  # Llama has none
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    mixed = {**mistral, "architectures": ["MinistralForCausalLM"], "sliding_window": 100, "layer_types": kinds}
    config = ModelConfig.from_hf(mixed)
    assert config.windows == (100, 100, None, 100)
    assert config.kv_groups == (KVGroup((2,), None), KVGroup((0, 1, 3), 100))
    assert ModelConfig.from_hf({**mixed, "layer_types": None}).windows == (100,) * 4
    full = {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    assert ModelConfig.from_hf({**mixed, **full}).windows == ()
    for change, message in (
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'; supported: full_attention, sliding"),
        ({"layer_types": kinds[:3]}, "3 entries for 4 layers"),
        ({"sliding_window": None}, "sliding_window is null"),
        ({"sliding_window": 0}, "positive integer or None, got 0"),
        ({"sliding_window": "8"}, "positive integer or None, got '8'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            ModelConfig.from_hf({**mixed, **change})


def test_kv_groups() -> None:
    plain = ModelConfig.from_hf(HF)
    assert plain.kv_groups == (KVGroup((0, 1), None),)
    three = dataclasses.replace(plain, num_layers=5, windows=(64, None, 16, 64, None))
    assert three.kv_groups == (KVGroup((1, 4), None), KVGroup((2,), 16), KVGroup((0, 3), 64))
    with pytest.raises(CheckpointError, match=r"one per layer \(2\) or none, got 1"):
        dataclasses.replace(plain, windows=(8,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"architectures": None}, "supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'; supported: default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor, high_freq_factor"),
        ({"num_key_value_heads": 4}, r"num_heads \(6\) must be a multiple of num_kv_heads \(4\)"),
        ({"head_dim": 7}, "head_dim must be even for rotary, got 7"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive integer, got 0"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf({**HF, **change})


def test_padding_for_a_mesh() -> None:
    config = ModelConfig.from_hf({**HF, "intermediate_size": 66, "vocab_size": 130})
    padded = config.padded(kv_heads=4, mlp=4)
    assert (padded.num_kv_heads, padded.num_heads, padded.group_size, padded.intermediate_size) == (4, 8, 2, 68)
    assert config.padded_vocab(4) == 132 and config.padded(1, 1) == config
