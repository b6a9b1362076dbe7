"""Checkpoints on disk, read one tensor at a time under the names of Hugging Face's Llama.

    open_checkpoint(path) -> Checkpoint      .config  .shapes  .fingerprint  .read(name)  .tokenizer()

      directory with config.json   SafetensorsCheckpoint   model.safetensors, or an index and its shards
      file.gguf                    GgufCheckpoint          names mapped, q and k un-permuted, de-quantised

All of it is host-side NumPy. A reader keeps no tensor, so that loading takes about one tensor's memory
above what the caller keeps. What can be checked without reading the weights (that every byte is there,
that every type can be decoded) is checked when opening.
"""

import abc
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specax.model.checkpoint_gguf import GgufFile
from specax.model.checkpoint_safetensors import SafetensorsFile
from specax.model.config import ModelConfig
from specax.model.errors import CheckpointError

if TYPE_CHECKING:
    from specax.model.tokenizer import Tokenizer

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
ROPE_FREQS = "rope_freqs.weight"

# GGUF to Hugging Face names (gguf-py/gguf/tensor_mapping.py, for the `llama` architecture).
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Checkpoint(abc.ABC):
    """A model on disk.

    Attributes:
      config: what the network is.
      shapes: shape of every tensor by its Hugging Face name (`model.layers.0.self_attn.q_proj.weight`);
        linear weights are [out, in]. `lm_head.weight` may be absent when the embeddings are tied.
      fingerprint: hexadecimal hash of the configuration, names, shapes and file sizes. It tells models
        apart cheaply; weights that changed in place it does not see.
    """

    def __init__(
        self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], file_sizes: Mapping[str, int]
    ):
        self.config = config
        self.shapes = shapes
        described = repr((config, sorted(shapes.items()), sorted(file_sizes.items())))
        self.fingerprint = hashlib.sha256(described.encode()).hexdigest()

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """One tensor, in an array that the caller owns: float32, float16, bfloat16 or fp8 as stored;
        block-quantised types as float32.

        Raises:
          CheckpointError: no such tensor, or the file changed since it was opened.
        """

    @abc.abstractmethod
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that is stored with the weights; None if there is none.

        Raises:
          CheckpointError: it can't be used.
        """


class SafetensorsCheckpoint(Checkpoint):
    """A Hugging Face directory: `config.json`, and `model.safetensors` or `model.safetensors.index.json`."""

    def __init__(self, directory: str | os.PathLike[str]):
        """Raises CheckpointError: a missing or corrupt file, a tensor that is not in its shard, an
        architecture that `ModelConfig` refuses."""
        self.directory = Path(directory)
        raw = _read_json(self.directory / "config.json")
        config = _config(self.directory / "config.json", lambda: ModelConfig.from_hf(raw))
        self._files = self._open_files()
        shapes = {name: file.tensors[name].shape for name, file in self._files.items()}
        sizes = {os.path.basename(file.path): file.size for file in self._files.values()}
        super().__init__(config, shapes, sizes)

    def _open_files(self) -> dict[str, SafetensorsFile]:
        """The file of every tensor, by name."""
        single, index = self.directory / "model.safetensors", self.directory / "model.safetensors.index.json"
        if single.exists():
            file = SafetensorsFile(single)
            return dict.fromkeys(file.tensors, file)
        if not index.exists():
            raise _no_weights(self.directory)
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files, got {weight_map!r}")
        shards: dict[str, SafetensorsFile] = {}
        files: dict[str, SafetensorsFile] = {}
        for name, shard in weight_map.items():
            # A shard lies beside its index: an index must not reach other files of this machine.
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index}: tensor '{name}': {shard!r} is not a file name")
            if shard not in shards:
                if not (self.directory / shard).is_file():
                    raise CheckpointError(f"{index}: tensor '{name}': shard {shard!r} is missing")
                shards[shard] = SafetensorsFile(self.directory / shard)
            if name not in shards[shard].tensors:
                raise CheckpointError(f"{index}: tensor '{name}' is not in its shard {shard!r}")
            files[name] = shards[shard]
        return files

    def read(self, name: str) -> np.ndarray:
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: there is no tensor '{name}'")
        return self._files[name].read(name)

    def tokenizer(self) -> "Tokenizer | None":
        from specax.model.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.directory) if (self.directory / "tokenizer.json").exists() else None


class GgufCheckpoint(Checkpoint):
    """A GGUF file of the `llama` architecture, as llama.cpp's convert_hf_to_gguf.py writes it."""

    def __init__(self, path: str | os.PathLike[str]):
        """Raises CheckpointError: a corrupt file, a type that can't be de-quantised, a tensor that this
        decoder has no place for, an architecture that `ModelConfig` refuses."""
        file = GgufFile(path)
        factors = None
        if ROPE_FREQS in file.tensors:
            factors = tuple(file.read(ROPE_FREQS).astype(np.float32).ravel().tolist())
        config = _config(
            file.path, lambda: ModelConfig.from_gguf(file.metadata, file.shapes, rope_factors=factors)
        )
        self._file = file
        self._sources = {_hf_name(file, name): name for name in file.tensors if name != ROPE_FREQS}
        shapes = {name: file.tensors[source].shape for name, source in self._sources.items()}
        for name, shape in shapes.items():
            heads = _rotary_heads(config, name)
            if heads and shape[0] != heads * config.head_dim:
                raise CheckpointError(
                    f"{file.path}: tensor '{self._sources[name]}' has {shape[0]} rows, not "
                    f"{heads} heads x {config.head_dim}"
                )
        super().__init__(config, shapes, {os.path.basename(file.path): file.size})

    def read(self, name: str) -> np.ndarray:
        if name not in self._sources:
            raise CheckpointError(f"{self._file.path}: there is no tensor '{name}'")
        tensor = self._file.read(self._sources[name])
        heads = _rotary_heads(self.config, name)
        return unpermute(tensor, heads) if heads else tensor

    def tokenizer(self) -> "Tokenizer | None":
        from specax.model.tokenizer import Tokenizer

        metadata = self._file.metadata
        return Tokenizer.from_gguf_metadata(metadata) if "tokenizer.ggml.tokens" in metadata else None


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face directory with safetensors weights, or a `.gguf` file.

    Raises:
      CheckpointError: the path is missing or neither of these, the weights are a pickle, or a file is
        corrupt; the message names the file and, where there is one, the tensor.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; to load a GGUF file, give its own path ({path / found[0]})" if found else ""
            raise CheckpointError(f"{path}: there is no config.json in this directory{hint}")
        return SafetensorsCheckpoint(path)
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return GgufCheckpoint(path)
    if suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(path)
    if suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the directory that holds this file and its config.json")
    raise CheckpointError(f"{path}: not a checkpoint: give a safetensors directory or a .gguf file")


def unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rotary order of q and k: llama.cpp's interleaved pairs back to Hugging Face's two halves of a head.

    Inverts `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py. `tensor` is a weight
    [heads * head_dim, in] or a bias [heads * head_dim]; the shape is kept.

      row within a head, GGUF   0    1       2    3        ...     (pair by pair)
      row within a head, HF     0    d/2     1    d/2 + 1  ...
    """
    pairs = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, pairs, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _rotary_heads(config: ModelConfig, name: str) -> int:
    """Heads of a tensor (by its Hugging Face name) whose rows llama.cpp permutes; 0 for all others."""
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else 0


def _hf_name(file: GgufFile, name: str) -> str:
    if match := re.fullmatch(r"(\w+)\.(weight|bias)", name):
        stem, kind = match.groups()
        if stem in GGUF_NAMES:
            return f"{GGUF_NAMES[stem]}.{kind}"
    elif match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, stem, kind = match.groups()
        if stem in GGUF_LAYER_NAMES:
            return f"model.layers.{int(layer)}.{GGUF_LAYER_NAMES[stem]}.{kind}"
    # Leaving out a weight (experts, norms of q and k) would compute another model without a word.
    raise CheckpointError(f"{file.path}: tensor '{name}' has no place in this decoder")


def _config(source: str | Path, build: Callable[[], ModelConfig]) -> ModelConfig:
    """`build()`; values of a wrong kind (a string for a number, no heads at all) become a CheckpointError."""
    try:
        return build()
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{source}: the model configuration has an unusable value: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _no_weights(directory: Path) -> CheckpointError:
    for file in sorted(directory.iterdir()):
        if file.suffix.lower() in PICKLE_SUFFIXES:
            return _pickle_refused(file)
    return CheckpointError(f"{directory}: holds neither model.safetensors nor its .index.json")


def _pickle_refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a pickle checkpoint can run code when it is read and is refused; convert it to safetensors"
    )
