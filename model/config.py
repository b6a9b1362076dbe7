"""ModelConfig: what a decoder network is, read from `config.json` (Hugging Face) or GGUF metadata."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specax.model.errors import CheckpointError

# Architectures of the Llama family that this decoder computes exactly.
HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM")
GGUF_ARCHITECTURES = ("llama",)
HF_SLIDING_WINDOW = 4096  # of Mistral's and Ministral's configuration in transformers, where config.json has none


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3 rotary scaling (the `llama3` rope type of Hugging Face transformers).

    Wavelengths above `original_max_position / low_freq_factor` are stretched by `factor`, those below
    `original_max_position / high_freq_factor` are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Layers that see the same part of the context, and so keep their keys and values for the same positions."""

    layers: tuple[int, ...]
    window: int | None  # keys that each query sees, its own among them; None: the whole context


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama-family decoder. Frozen and hashable: it is static under jit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    # Divides the rotary frequencies, one per pair; from a GGUF `rope_freqs.weight`.
    rope_factors: tuple[float, ...] | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # q, k, v and o projections, as in transformers' Llama
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window of each layer, None for full attention; (): all full
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                    "num_kv_heads", "head_dim", "max_position")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"model config: {name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"model config: head_dim must be even for rotary, got {self.head_dim}")
        if len(self.windows) not in (0, self.num_layers):
            raise CheckpointError(
                f"model config: windows must be one per layer ({self.num_layers}) or none, got {len(self.windows)}"
            )
        if bad := [w for w in self.windows if w is not None and (not isinstance(w, int) or w < 1)]:
            raise CheckpointError(f"model config: a window must be a positive integer or None, got {bad[0]!r}")

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by window: full attention first, then by size. Every layer is in one group."""
        windows = self.windows or (None,) * self.num_layers
        groups = sorted(set(windows), key=lambda window: (window is not None, window or 0))
        return tuple(
            KVGroup(tuple(layer for layer, window in enumerate(windows) if window == group), group)
            for group in groups
        )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def padded(self, kv_heads: int, mlp: int) -> "ModelConfig":
        """The same network with KV heads and MLP width rounded up to multiples, to split them evenly.

        KV heads come with their groups of query heads. With zero weights, what is appended adds exact zeros
        to the output. (The vocabulary is padded by the parameters alone: see `padded_vocab`.)
        """
        kv = _round_up(self.num_kv_heads, kv_heads)
        return dataclasses.replace(
            self,
            num_kv_heads=kv,
            num_heads=kv * self.group_size,
            intermediate_size=_round_up(self.intermediate_size, mlp),
        )

    def padded_vocab(self, multiple: int) -> int:
        """Rows of the embedding and head when the vocabulary is split over `multiple` devices."""
        return _round_up(self.vocab_size, multiple)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a Hugging Face `config.json`.

        Raises:
          CheckpointError: another architecture, an unsupported activation, rope type or layer type, a missing key.
        """
        names = raw.get("architectures") or []
        if (architecture := next((name for name in names if name in HF_ARCHITECTURES), None)) is None:
            raise CheckpointError(
                f"config.json: architectures is {names!r}; supported: {', '.join(HF_ARCHITECTURES)}"
            )
        if (act := raw.get("hidden_act", "silu")) != "silu":
            raise CheckpointError(f"config.json: hidden_act is {act!r}; this decoder computes 'silu' (SwiGLU)")
        need = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [key for key in need if not isinstance(raw.get(key), int)]:
            raise CheckpointError(f"config.json: missing or not an integer: {', '.join(missing)}")
        heads = raw["num_attention_heads"]
        max_position = int(raw.get("max_position_embeddings", 2048))
        theta, scaling = _hf_rope(raw, max_position)
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position=max_position,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            windows=_hf_windows(raw, architecture),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_ids(raw.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_shapes: Mapping[str, tuple[int, ...]],
        rope_factors: tuple[float, ...] | None = None,
    ) -> "ModelConfig":
        """Reads GGUF key/value metadata; `tensor_shapes` (GGUF names, NumPy order) fills in what it lacks.

        `rope_factors` holds the values of `rope_freqs.weight`, as which llama.cpp stores Llama 3 scaling.

        Raises:
          CheckpointError: another architecture or rope type, a missing key, rotary factors that are not
            head_dim / 2 positive numbers.
        """
        arch = metadata.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise CheckpointError(
                f"GGUF: general.architecture is {arch!r}; supported: {', '.join(GGUF_ARCHITECTURES)}"
            )

        def get(key: str, default: Any = None) -> Any:
            value = metadata.get(f"{arch}.{key}", default)
            if value is None:
                raise CheckpointError(f"GGUF: metadata key '{arch}.{key}' is missing")
            return value

        if (kind := metadata.get(f"{arch}.rope.scaling.type", "none")) not in ("none", None):
            raise CheckpointError(f"GGUF: rope scaling type {kind!r} is not supported")
        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
        if rope_factors is not None:
            if len(rope_factors) != head_dim // 2:
                raise CheckpointError(
                    f"GGUF: rope_freqs.weight has {len(rope_factors)} values, "
                    f"not head_dim / 2 = {head_dim // 2}"
                )
            if not all(0 < factor < math.inf for factor in rope_factors):
                raise CheckpointError("GGUF: rope_freqs.weight must hold positive finite numbers")
        embedding = tensor_shapes.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError("GGUF: tensor 'token_embd.weight' is missing")
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        return cls(
            vocab_size=int(embedding[0]),
            hidden_size=hidden,
            intermediate_size=int(get("feed_forward_length")),
            num_layers=int(get("block_count")),
            num_heads=heads,
            num_kv_heads=int(get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            max_position=int(get("context_length")),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            rope_theta=float(get("rope.freq_base", 10000.0)),
            rope_factors=rope_factors,
            tie_embeddings="output.weight" not in tensor_shapes,
            attention_bias="blk.0.attn_q.bias" in tensor_shapes,
            mlp_bias="blk.0.ffn_gate.bias" in tensor_shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=_ids(eos),
        )


def _hf_windows(raw: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """Each layer's sliding window as transformers' models read it; () if no layer has one."""
    if architecture == "LlamaForCausalLM":
        return ()  # (Llama reads neither key.)
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window", HF_SLIDING_WINDOW)
    kinds = raw.get("layer_types") if architecture == "MinistralForCausalLM" else None
    if kinds is None:
        return () if window is None else (window,) * layers
    if bad := sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}):
        raise CheckpointError(
            f"config.json: layer_types has {bad[0]!r}; supported: full_attention, sliding_attention"
        )
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise CheckpointError("config.json: layer_types has 'sliding_attention', but sliding_window is null")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _hf_rope(raw: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(f"config.json: rope type is {kind!r}; supported: default, llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    if missing := [key for key in keys if not isinstance(rope.get(key), int | float)]:
        raise CheckpointError(f"config.json: rope scaling 'llama3' lacks {', '.join(missing)}")
    original = rope.get("original_max_position_embeddings") or max_position
    factor, low, high = (float(rope[key]) for key in keys)
    return theta, RopeScaling(factor, low, high, original_max_position=int(original))


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
