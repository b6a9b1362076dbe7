"""Checkpoint readers against files written by the safetensors and gguf packages, and against broken files."""

import json
import struct
import sys
import tracemalloc
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specax.model import checkpoint_gguf
from specax.model.checkpoint import (
    Checkpoint,
    GgufCheckpoint,
    SafetensorsCheckpoint,
    open_checkpoint,
    unpermute,
)
from specax.model.config import ModelConfig
from specax.model.errors import CheckpointError

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 64, 2, 4, 2, 8, 48
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
}
# Hugging Face name -> GGUF name, written out here on its own.
LAYER_LINEARS = {
    "self_attn.q_proj": ("attn_q", HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": ("attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": ("attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": ("ffn_gate", MLP, HIDDEN),
    "mlp.up_proj": ("ffn_up", MLP, HIDDEN),
    "mlp.down_proj": ("ffn_down", HIDDEN, MLP),
}


def hf_tensors(seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A whole tiny model: tensors by Hugging Face name, and GGUF name by Hugging Face name."""
    rng = np.random.default_rng(seed)
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        parts: list[tuple[str, str, tuple[int, ...]]] = [
            ("input_layernorm.weight", "attn_norm.weight", (HIDDEN,)),
            ("post_attention_layernorm.weight", "ffn_norm.weight", (HIDDEN,)),
        ]
        for stem, (short, rows, columns) in LAYER_LINEARS.items():
            parts.append((f"{stem}.weight", f"{short}.weight", (rows, columns)))
            parts.append((f"{stem}.bias", f"{short}.bias", (rows,)))
        for hf, ours, shape in parts:
            shapes[f"model.layers.{layer}.{hf}"] = shape
            names[f"model.layers.{layer}.{hf}"] = f"blk.{layer}.{ours}"
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}, names


def llama_cpp_permute(weights: np.ndarray, n_head: int, n_head_kv: int | None) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    if n_head_kv is not None and n_head != n_head_kv:
        n_head = n_head_kv
    return (
        weights.reshape(n_head, 2, weights.shape[0] // n_head // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_directory(directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({n: t for n, t in tensors.items() if shards[n] == shard}, directory / shard)
    index = {"metadata": {}, "weight_map": shards}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_raw_safetensors(path: Path, header: Any, data: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, Kind]],
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    arch: str = "llama",
) -> Path:
    """`tensors`: already permuted and encoded, by GGUF name."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_token_list(["<s>", "é", "", "tok"])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    edit(writer)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(kind: Kind = Kind.F32) -> dict[str, tuple[np.ndarray, Kind]]:
    """The tiny model as llama.cpp would write it: matrices of type `kind`, vectors in float32."""
    tensors, names = hf_tensors()
    out = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensor = llama_cpp_permute(tensor, HEADS, HEADS)
        if ".k_proj." in name:
            tensor = llama_cpp_permute(tensor, HEADS, KV_HEADS)
        as_kind = kind if tensor.ndim == 2 else Kind.F32
        out[names[name]] = (gguf.quants.quantize(tensor, as_kind), as_kind)
    return out


def decodable_kinds() -> list[Kind]:
    kinds = []
    for kind in Kind:
        try:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            kinds.append(kind)
        except NotImplementedError:
            pass
    return kinds


def writable_kinds() -> list[Kind]:
    kinds = []
    for kind in decodable_kinds():
        try:
            gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
            kinds.append(kind)
        except NotImplementedError:
            pass
    return kinds


def read_all(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.read(name) for name in checkpoint.shapes}


def assert_same(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype and read.flags.writeable
        np.testing.assert_array_equal(read, tensor, err_msg=name)


# --- safetensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("write", [write_directory, write_sharded])
def test_safetensors_round_trip(tmp_path, write, dtype):
    tensors = {name: tensor.astype(dtype) for name, tensor in hf_tensors()[0].items()}
    checkpoint = open_checkpoint(write(tmp_path / "model", tensors))
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert checkpoint.config == ModelConfig.from_hf(HF_CONFIG)
    assert_same(checkpoint, tensors)


@pytest.mark.parametrize(
    "kind, dtype", [("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)]
)
def test_safetensors_fp8_and_unaligned_data(tmp_path, kind, dtype):
    write_directory(tmp_path, {})
    fp8 = np.linspace(-3, 3, 15, dtype=np.float32).astype(dtype).reshape(3, 5)
    wide = np.arange(4, dtype=np.float32)
    header = {
        "a": {"dtype": kind, "shape": [3, 5], "data_offsets": [0, 15]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [15, 31]},  # starts at an odd byte
    }
    write_raw_safetensors(tmp_path / "model.safetensors", header, fp8.tobytes() + wide.tobytes())
    assert_same(open_checkpoint(tmp_path), {"a": fp8, "b": wide})


def test_safetensors_scalar_and_empty(tmp_path):
    tensors = {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float32)}
    assert_same(open_checkpoint(write_directory(tmp_path, tensors)), tensors)


@pytest.mark.parametrize(
    "header, data, message",
    [
        (b"not json", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        ([], b"", "not a JSON object"),
        ({"w": 3}, b"", "'w': corrupt header entry"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"", "'w': corrupt header entry"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4), "'w': corrupt"),
        ({"w": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}}, bytes(4), "'w': corrupt"),
        ({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8), "'w' has dtype 'I64'"),
        ({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "'w' has dtype"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), "'w': F32 of shape"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(7), "'w': truncated"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(9), "its header describes"),
    ],
)
def test_safetensors_corrupt(tmp_path, header, data, message):
    write_directory(tmp_path, {})
    write_raw_safetensors(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "index, message",
    [
        ("{", "can't be read as JSON"),
        ("[]", "must hold a JSON object"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"w": 3}}', "'w': 3 is not a file name"),
        ('{"weight_map": {"w": "../s.safetensors"}}', "'w': '../s.safetensors' is not a file name"),
        ('{"weight_map": {"w": ".."}}', "'w': shard '..' is missing"),
        ('{"weight_map": {"w": "\\u0000"}}', "'w': shard .* is missing"),
        ('{"weight_map": {"w": "gone.safetensors"}}', "'w': shard 'gone.safetensors' is missing"),
        ('{"weight_map": {"w": "s.safetensors"}}', "'w' is not in its shard 's.safetensors'"),
    ],
)
def test_index_errors(tmp_path, index, message):
    write_directory(tmp_path, {}).joinpath("model.safetensors").unlink()
    save_file({"other": np.zeros(2, np.float32)}, tmp_path / "s.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ("{", "can't be read as JSON"),
        ("3", "must hold a JSON object"),
        (json.dumps({"architectures": ["GPT2LMHeadModel"]}), "architectures"),
        (json.dumps(HF_CONFIG | {"num_attention_heads": 0}), "unusable value"),
        (json.dumps(HF_CONFIG | {"rms_norm_eps": "tiny"}), "unusable value"),
    ],
)
def test_config_errors(tmp_path, config, message):
    write_directory(tmp_path, {}).joinpath("config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(tmp_path)
    assert "config.json" in str(error.value)


# --- GGUF ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, heads", [(HEADS * HEAD_DIM, HEADS), (12, 3), (16, 1)])
def test_unpermute_inverts_llama_cpp(rows, heads):
    for tensor in (np.random.default_rng(0).standard_normal((rows, 5)), np.arange(rows)):
        np.testing.assert_array_equal(unpermute(llama_cpp_permute(tensor, heads, heads), heads), tensor)


def test_unpermute_rows():
    # Two heads of four rows; GGUF keeps the two halves of a rotary pair side by side.
    assert unpermute(np.array(["a0", "b0", "a1", "b1", "A0", "B0", "A1", "B1"]), 2).tolist() == [
        "a0", "a1", "b0", "b1", "A0", "A1", "B0", "B1",
    ]  # fmt: skip


def test_gguf_float32_round_trip(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors()))
    assert isinstance(checkpoint, GgufCheckpoint)
    assert_same(checkpoint, hf_tensors()[0])
    assert checkpoint.config == ModelConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_layers=LAYERS, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_position=128, rms_norm_eps=float(np.float32(1e-5)),
        rope_theta=5e5, tie_embeddings=False, attention_bias=True, mlp_bias=True, bos_token_id=1,
        eos_token_ids=(2,),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_gguf_quantised_model(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkpoint_gguf, "CHUNK_ELEMENTS", 5 * HIDDEN)  # several uneven blocks of rows
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors(kind)))
    stored = {Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}.get(kind, np.float32)
    for name, tensor in hf_tensors()[0].items():
        read = checkpoint.read(name)
        if tensor.ndim == 2:
            # Rows permute whole, and blocks lie within rows: quantising commutes with the permutation.
            tensor = gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind)
            assert read.dtype == stored
        np.testing.assert_array_equal(read.astype(np.float32), tensor, err_msg=name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales include NaN and infinity
def test_gguf_every_decodable_type(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_gguf, "CHUNK_ELEMENTS", 700)
    rng = np.random.default_rng(1)
    kinds = decodable_kinds()
    assert {Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS, Kind.MXFP4} <= set(kinds)
    tensors = {"token_embd.weight": (np.zeros((VOCAB, HIDDEN), np.float32), Kind.F32)}
    for i, kind in enumerate(kinds):
        if kind in writable_kinds():
            data = gguf.quants.quantize(rng.standard_normal((6, 256)).astype(np.float32), kind)
        else:  # any bytes are valid blocks
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            data = rng.integers(0, 256, (6, 256 // block * block_bytes), np.uint8)
        tensors[f"blk.{i}.ffn_up.weight"] = (data, kind)
    path = write_gguf(tmp_path / "m.gguf", tensors)
    checkpoint = open_checkpoint(path)
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for i, kind in enumerate(kinds):
        theirs = gguf.quants.dequantize(reference[f"blk.{i}.ffn_up.weight"].data, kind)
        ours = checkpoint.read(f"model.layers.{i}.mlp.up_proj.weight").astype(np.float32)
        assert ours.shape == (6, 256)
        np.testing.assert_array_equal(ours, theirs, err_msg=kind.name)


def test_gguf_metadata_like_gguf_reader(tmp_path):
    def edit(writer: gguf.GGUFWriter) -> None:
        for add in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            getattr(writer, f"add_{add}")(f"x.{add}", 7)
        writer.add_float64("x.float64", 0.1)
        writer.add_array("x.floats", [0.5, 1.5])
        writer.add_array("x.bools", [True, False])
        writer.add_custom_alignment(64)

    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(), edit)
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    ours = checkpoint_gguf.GgufFile(path).metadata
    assert ours == theirs
    assert {key: type(value) for key, value in ours.items()} == {key: type(v) for key, v in theirs.items()}
    assert_same(open_checkpoint(path), hf_tensors()[0])


def test_gguf_rope_factors(tmp_path):
    factors = np.array([1, 1, 4, 8], np.float32)
    tensors = gguf_tensors() | {"rope_freqs.weight": (factors, Kind.F32)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config.rope_factors == (1.0, 1.0, 4.0, 8.0)
    assert_same(checkpoint, hf_tensors()[0])
    for wrong in (factors[:3], np.array([1, 1, 0, 8], np.float32), np.array([1, 1, np.nan, 8], np.float32)):
        tensors["rope_freqs.weight"] = (wrong, Kind.F32)
        with pytest.raises(CheckpointError, match="rope_freqs"):
            open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))


def test_gguf_tied_embeddings(tmp_path):
    tensors = gguf_tensors()
    del tensors["output.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    assert checkpoint.config.tie_embeddings and "lm_head.weight" not in checkpoint.shapes


def test_gguf_refused_contents(tmp_path):
    path = tmp_path / "m.gguf"

    def refused(message: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(CheckpointError, match=message) as error:
            open_checkpoint(write_gguf(path, *arguments, **named))
        assert "m.gguf" in str(error.value)

    vector = (np.zeros(HIDDEN, np.float32), Kind.F32)
    refused("'blk.0.attn_q_norm.weight' has no place", gguf_tensors() | {"blk.0.attn_q_norm.weight": vector})
    refused("'blk.0.attn_q.scale' has no place", gguf_tensors() | {"blk.0.attn_q.scale": vector})
    integers = (np.zeros((4, 4), np.int32), Kind.I32)
    refused("'blk.0.ffn_up.weight' has type I32", gguf_tensors() | {"blk.0.ffn_up.weight": integers})
    q8_1 = (np.zeros((4, gguf.GGML_QUANT_SIZES[Kind.Q8_1][1]), np.uint8), Kind.Q8_1)
    refused("'blk.0.ffn_up.weight' has type Q8_1", gguf_tensors() | {"blk.0.ffn_up.weight": q8_1})
    few = (np.zeros((HEAD_DIM, HIDDEN), np.float32), Kind.F32)
    refused("'blk.0.attn_k.weight' has 8 rows", gguf_tensors() | {"blk.0.attn_k.weight": few})
    refused("general.architecture is 'qwen2'", gguf_tensors(), arch="qwen2")
    refused("split into 3 files", gguf_tensors(), lambda writer: writer.add_uint16("split.count", 3))
    text = "llama.attention.key_length"
    refused("unusable value", gguf_tensors(), lambda writer: writer.add_string(text, "x"))


def patched(data: bytes, old: bytes, new: bytes, shift: int = 0) -> bytes:
    """`data` with the bytes at `shift` after the end of the only `old` replaced."""
    assert data.count(old) == 1
    at = data.index(old) + len(old) + shift
    return data[:at] + new + data[at + len(new) :]


def test_gguf_corrupt_headers(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(Kind.Q8_0), lambda w: w.add_custom_alignment(32))
    good = path.read_bytes()
    up = b"blk.0.ffn_up.weight"  # followed by u32 dimensions, u64 sizes, u32 type, u64 offset
    cases = {
        "not a GGUF file": b"GGML" + good[4:],
        "GGUF version 9": good[:4] + struct.pack("<I", 9) + good[8:],
        "big-endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "truncated or corrupt": good[:8] + struct.pack("<QQ", 1 << 60, 1 << 60) + good[24:],
        "'tokenizer.ggml.scores' at byte": patched(
            good, b"tokenizer.ggml.scores", struct.pack("<Q", 1 << 60), shift=8
        ),
        "'tokenizer.ggml.tokens' at byte": patched(
            good, b"tokenizer.ggml.tokens", struct.pack("<Q", 1 << 60), shift=8
        ),
        "unknown value type 77": patched(good, b"llama.block_count", struct.pack("<I", 77)),
        "key 'general.alignment' is there twice": good.replace(b"llama.block_count", b"general.alignment"),
        "not a power of two": patched(good, b"general.alignment", struct.pack("<I", 48), shift=4),
        "'blk.0.ffn_up.weight' has 9 dimensions": patched(good, up, struct.pack("<I", 9)),
        "rows of 33": patched(good, up, struct.pack("<Q", 33), shift=4),
        "unknown type 999": patched(good, up, struct.pack("<I", 999), shift=20),
        "'blk.0.ffn_up.weight': truncated": patched(good, up, struct.pack("<Q", 1 << 40), shift=24),
        "'blk.1.ffn_up.weight' is there twice": good.replace(up, b"blk.1.ffn_up.weight"),
        "not UTF-8": good.replace(b"llama.block_count", b"llama.block_coun\xff"),
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


# --- both ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory) -> dict[str, tuple[bytes, int]]:
    """Content of two good files, and how many of their bytes are needed."""
    tensors = {name: tensor for name, tensor in hf_tensors()[0].items() if "layers.1" not in name}
    directory = write_directory(tmp_path_factory.mktemp("st"), tensors)
    safetensors = (directory / "model.safetensors").read_bytes()
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", gguf_tensors(Kind.Q4_0))
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)  # padding may follow
    return {"safetensors": (safetensors, len(safetensors)), "gguf": (path.read_bytes(), end)}


def written(directory: Path, form: str, data: bytes) -> Path:
    if form == "gguf":
        (directory / "m.gguf").write_bytes(data)
        return directory / "m.gguf"
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    (directory / "model.safetensors").write_bytes(data)
    return directory


QUICK = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@QUICK
@given(draw=st.data())
def test_any_truncation_is_a_checkpoint_error(tmp_path, whole_files, form, draw):
    data, needed = whole_files[form]
    cut = draw.draw(st.integers(0, needed - 1))
    with pytest.raises(CheckpointError):
        open_checkpoint(written(tmp_path, form, data[:cut]))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # damaged scales may overflow
@QUICK
@given(draw=st.data())
def test_a_damaged_byte_is_a_checkpoint_error_or_harmless(tmp_path, whole_files, form, draw):
    data, needed = whole_files[form]
    # Mostly within the header, as most bytes of data can't be told from good ones.
    at = draw.draw(st.integers(0, min(needed, 4000) - 1))
    damaged = data[:at] + bytes([data[at] ^ draw.draw(st.integers(1, 255))]) + data[at + 1 :]
    try:
        checkpoint = open_checkpoint(written(tmp_path, form, damaged))
        assert {name: tensor.shape for name, tensor in read_all(checkpoint).items()} == checkpoint.shapes
    except CheckpointError:
        pass


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_changes_after_opening(tmp_path, whole_files, form):
    data, _ = whole_files[form]
    path = written(tmp_path, form, data)
    checkpoint = open_checkpoint(path)
    (path / "model.safetensors" if path.is_dir() else path).write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="truncated since it was opened"):
        read_all(checkpoint)
    (path / "model.safetensors" if path.is_dir() else path).unlink()
    with pytest.raises(CheckpointError, match="can't be read"):
        read_all(checkpoint)
    with pytest.raises(CheckpointError, match="there is no tensor 'nothing'"):
        checkpoint.read("nothing")


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_memory_is_one_tensor(tmp_path, monkeypatch, traced, form):
    monkeypatch.setattr(checkpoint_gguf, "CHUNK_ELEMENTS", 1 << 14)
    tensor = np.zeros((1024, 512), np.float32)
    if form == "gguf":
        q8 = (gguf.quants.quantize(tensor, Kind.Q8_0), Kind.Q8_0)
        contents = {f"blk.{i}.ffn_up.weight": q8 for i in range(6)} | {"token_embd.weight": q8}
        path = write_gguf(tmp_path / "m.gguf", contents)
    else:
        path = write_directory(tmp_path, {f"t{i}": tensor for i in range(6)})
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    checkpoint = open_checkpoint(path)
    for name in checkpoint.shapes:
        checkpoint.read(name)
    now, peak = tracemalloc.get_traced_memory()
    assert peak - before < 1.3 * tensor.nbytes
    assert now - before < 0.1 * tensor.nbytes


def test_fingerprint(tmp_path):
    tensors = hf_tensors()[0]
    fingerprint = open_checkpoint(write_directory(tmp_path / "a", tensors)).fingerprint
    assert fingerprint == open_checkpoint(write_directory(tmp_path / "b", tensors)).fingerprint
    others = [
        write_directory(tmp_path / "c", tensors, rope_theta=5e5),
        write_directory(tmp_path / "d", tensors | {"lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float16)}),
        write_sharded(tmp_path / "e", tensors),
        write_gguf(tmp_path / "m.gguf", gguf_tensors()),
    ]
    assert len({fingerprint, *(open_checkpoint(path).fingerprint for path in others)}) == 5


def test_tokenizer_comes_with_the_weights(tmp_path, monkeypatch):
    seen: list[Any] = []
    fake = types.SimpleNamespace(from_directory=seen.append, from_gguf_metadata=seen.append)
    module = types.ModuleType("specax.model.tokenizer")
    module.Tokenizer = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specax.model.tokenizer", module)
    checkpoint = open_checkpoint(write_directory(tmp_path / "a", {}))
    assert checkpoint.tokenizer() is None
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    checkpoint.tokenizer()
    open_checkpoint(write_gguf(tmp_path / "m.gguf", gguf_tensors())).tokenizer()
    assert seen[0] == tmp_path / "a"
    assert seen[1]["tokenizer.ggml.tokens"] == ["<s>", "é", "", "tok"]


def test_paths_that_are_no_checkpoint(tmp_path):
    def refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)

    refused(tmp_path / "gone", "no such file or directory")
    refused(tmp_path, "there is no config.json")
    (tmp_path / "m.gguf").write_bytes(b"")
    refused(tmp_path, "config.json in this directory; to load a GGUF file, give its own path .*m.gguf")
    refused(tmp_path / "m.gguf", "truncated")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    refused(tmp_path, "neither model.safetensors nor")
    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(b"x")
        refused(tmp_path / name, "pickle.*convert it to safetensors")
        refused(tmp_path, "pickle.*convert it to safetensors")
    (tmp_path / "model.onnx").write_bytes(b"x")
    refused(tmp_path / "model.onnx", "not a checkpoint")
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "can't be read")
    refused(tmp_path / "config.json", "not a checkpoint")
    save_file({}, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "give the directory")
