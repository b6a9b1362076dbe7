"""Makes the golden checkpoints: tiny random networks and what Hugging Face transformers computes with them.

Usage, from the repository root, with an interpreter that has torch and transformers:

    PEER_PYTHON tests/goldens/make_goldens.py

Rewrites every case's directory beside this file; README.md says what the arrays are.
"""

import dataclasses
import math
import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
BATCH, PROMPT, STEPS = 3, 24, 32
COMMON = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# SmolLM2's odd head counts; its head_dim would be hidden_size / heads, but that is too large to keep here.
SMOLLM2 = {
    "hidden_size": 54,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 32, "vocab_size": 96, "num_key_value_heads": 1}
INTERLEAVED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 8,
    "head_dim": 8,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden checkpoint: `changes` to COMMON, and how it is saved and recorded."""

    name: str
    changes: dict[str, Any]
    family: str = "llama"
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    layer_hidden: bool = False


CASES = (
    Case("llama2_mha", {"num_key_value_heads": 4}, layer_hidden=True),
    Case("llama3_gqa", {"num_hidden_layers": 3, "vocab_size": 144, "rope_parameters": LLAMA3_ROPE}),
    Case("smollm2_tied", SMOLLM2, layer_hidden=True),
    Case("biases", {"attention_bias": True, "mlp_bias": True}),
    Case("mistral", {"num_key_value_heads": 1, "sliding_window": None}, family="mistral"),
    Case("sharded", {}, max_shard_size="60KB"),
    Case("head_dim", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}),
    Case("bf16", {"tie_word_embeddings": True}, dtype=torch.bfloat16),
    Case("mistral_window", SMALL | {"sliding_window": 8}, family="mistral"),
    Case("ministral", SMALL | INTERLEAVED, family="ministral"),
)


def save_checkpoint(case: Case, seed: int, folder: pathlib.Path) -> None:
    """Saves a random network; biases and norm weights, constants in a fresh model, are made random too."""
    settings = COMMON | case.changes
    configs, models = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM),
    }[case.family]
    config = configs(**settings)
    model = models(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # One generator in the order of names, so that the weights do not hang on how a model initialises.
        for name, weight in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0.0, config.initializer_range, generator=generator)
    model.to(case.dtype).save_pretrained(folder, max_shard_size=case.max_shard_size)
    (folder / "generation_config.json").unlink()


def load_checkpoint(folder: pathlib.Path) -> torch.nn.Module:
    """The network in float32 from what the disk holds, with eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def forward(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Logits, hidden states after the final norm, and each decoder layer's output, over whole prompts."""
    layers: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        layers.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    logits = model.lm_head(hidden)
    return {"logits": logits.numpy(), "hidden": hidden.numpy(), "layer_hidden": torch.stack(layers).numpy()}


def greedy(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Greedy continuation, the whole sequence computed again at every step (no cache to be wrong)."""
    gaps = []
    for _ in range(STEPS):
        logits = model(tokens, use_cache=False).logits[:, -1]
        top = logits.topk(2).values
        gaps.append(top[:, 0] - top[:, 1])
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return {"greedy": tokens[:, PROMPT:].to(torch.int32).numpy(), "greedy_gap": torch.stack(gaps, 1).numpy()}


def check_llama3_bands(config: transformers.PretrainedConfig) -> None:
    """Fails unless some wavelengths are kept, some interpolated and some stretched."""
    head_dim = config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    waves = [2 * math.pi * rope["rope_theta"] ** (i / head_dim) for i in range(0, head_dim, 2)]
    short, long = original / rope["high_freq_factor"], original / rope["low_freq_factor"]
    kept, stretched = sum(w < short for w in waves), sum(w > long for w in waves)
    if not (kept and stretched and kept + stretched < len(waves)):
        raise SystemExit(f"llama3 rope: wavelengths {waves} do not fill all three bands ({short}, {long})")


@torch.inference_mode()
def record(case: Case, seed: int, folder: pathlib.Path) -> None:
    """Writes golden.npz for the checkpoint in `folder` and prints what shows whether it is a good test."""
    model = load_checkpoint(folder)
    if model.config.rope_parameters["rope_type"] == "llama3":
        check_llama3_bands(model.config)
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1000 + seed))
    arrays = {"tokens": tokens.to(torch.int32).numpy(), **forward(model, tokens), **greedy(model, tokens)}
    if not case.layer_hidden:
        del arrays["layer_hidden"]
    np.savez_compressed(folder / "golden.npz", **arrays)
    distinct = [len(set(row.tolist())) for row in arrays["greedy"]]
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(
        f"{case.name:14}{size / 1e3:7.0f} kB  logits std {arrays['logits'].std():.2f}  "
        f"distinct greedy ids {distinct}  smallest gap {arrays['greedy_gap'].min():.4f}"
    )


def main() -> None:
    """Makes every case afresh."""
    torch.set_num_threads(1)
    for seed, case in enumerate(CASES):
        folder = HERE / case.name
        shutil.rmtree(folder, ignore_errors=True)
        save_checkpoint(case, seed, folder)
        record(case, seed, folder)


if __name__ == "__main__":
    main()
