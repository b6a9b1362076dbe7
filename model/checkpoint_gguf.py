"""The GGUF file format: metadata as plain Python values, and reads of one de-quantised tensor at a time.

The header is parsed here and not by `gguf.GGUFReader`: that keeps one NumPy view for every element of
every metadata array (170 MB and 3 s for a vocabulary of 49k tokens), and loops without end over an array
length that was corrupted. De-quantisation is the gguf package's own.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import os
import struct
from typing import Any, BinaryIO

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from specax.model.checkpoint_safetensors import read_bytes
from specax.model.errors import CheckpointError

VERSIONS = (2, 3)
MAX_DIMS = 4  # ggml's GGML_MAX_DIMS
CHUNK_ELEMENTS = 1 << 20  # de-quantised at a time: temporaries stay small beside the tensor

# Returned as stored; every other type goes through gguf.quants.dequantize.
PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
SCALAR_DTYPES: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in its file."""

    shape: tuple[int, ...]  # NumPy order: rows first, the reverse of the file's
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class GgufFile:
    """One `.gguf` file, opened and checked: every tensor's bytes lie within the file and can be decoded.

    `metadata` maps keys to plain Python values, `tensors` maps GGUF names to where they lie.

    Raises:
      CheckpointError: the file can't be read, is no GGUF file of version 2 or 3, is big-endian, is one part
        of a split model, is cut or corrupt, or holds a tensor of a type that can't be de-quantised.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            with open(self.path, "rb") as file:
                cursor = _Cursor(file, self.path)
                self.size = cursor.size
                self.metadata, self.tensors = self._parse(cursor)
        except OSError as error:
            raise CheckpointError(f"{self.path}: can't be read: {error}") from error
        decodable = {kind for kind in {t.kind for t in self.tensors.values()} if _can_decode(kind)}
        for name, tensor in self.tensors.items():
            if tensor.kind not in decodable:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}' has type {tensor.kind.name}, which can't be de-quantised"
                )

    def _parse(self, cursor: "_Cursor") -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if (magic := cursor.take(4, "magic")) != b"GGUF":
            raise CheckpointError(f"{self.path}: not a GGUF file: it starts with {magic!r}")
        version = cursor.unpack("<I", "version")
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self.path}: this GGUF file is big-endian; supported: little-endian")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version}; supported: {VERSIONS}")
        tensor_count = cursor.unpack("<Q", "tensor count")
        metadata: dict[str, Any] = {}
        for _ in range(cursor.unpack("<Q", "metadata count")):
            key = cursor.string("metadata key")
            if key in metadata:
                raise CheckpointError(f"{self.path}: metadata key '{key}' is there twice")
            metadata[key] = cursor.value(f"metadata '{key}'")
        if metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{self.path}: one part of a model split into {metadata['split.count']} files; "
                "join them with `llama-gguf-split --merge`"
            )
        infos = [cursor.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, not a power of two")
        data_start = math.ceil(cursor.position / alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dims, kind, offset in infos:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor '{name}' is there twice")
            tensors[name] = self._locate(name, dims, kind, data_start + offset)
        return metadata, tensors

    def _locate(self, name: str, dims: tuple[int, ...], raw_kind: int, offset: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor '{name}' has the unknown type {raw_kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if dims[0] % block:
            raise CheckpointError(
                f"{self.path}: tensor '{name}': rows of {dims[0]} values don't divide into "
                f"{kind.name} blocks of {block}"
            )
        nbytes = math.prod(dims) // block * block_bytes
        if offset + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: tensor '{name}': truncated: its data ends at byte {offset + nbytes} "
                f"of a file of {self.size}"
            )
        return GgufTensor(dims[::-1], kind, offset, nbytes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor in an array of its own: as stored (F32, F16, BF16) or de-quantised to float32.

        Raises:
          CheckpointError: the file changed since it was opened.
        """
        tensor = self.tensors[name]
        if (dtype := PLAIN_DTYPES.get(tensor.kind)) is not None:
            return read_bytes(self.path, tensor.offset, tensor.nbytes).view(dtype).reshape(tensor.shape)
        out = np.empty(tensor.shape, np.float32)
        if not out.size:
            return out
        # By blocks of rows, as gguf.quants.dequantize makes a second copy of all it returns.
        rows = out.reshape(-1, tensor.shape[-1])
        row_bytes = tensor.nbytes // len(rows)
        step = max(1, CHUNK_ELEMENTS // rows.shape[1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            raw = read_bytes(self.path, tensor.offset + start * row_bytes, len(part) * row_bytes)
            part[...] = gguf.quants.dequantize(raw.reshape(len(part), row_bytes), tensor.kind)
        return out


class _Cursor:
    """Reads a GGUF header front to back. Every read is checked against the file's size first, so that a
    corrupt length raises and neither allocates nor loops."""

    def __init__(self, file: BinaryIO, path: str):
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt: {what} at byte {self.position} takes {count} bytes "
                f"in a file of {self.size}"
            )
        self.position += count
        return self.file.read(count)

    def unpack(self, layout: str, what: str) -> int:
        (number,) = struct.unpack(layout, self.take(struct.calcsize(layout), what))
        return number

    def string(self, what: str) -> str:
        raw = self.take(self.unpack("<Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: corrupt: {what} is not UTF-8: {raw[:40]!r}") from error

    def value(self, what: str) -> Any:
        kind = self.unpack("<I", what)
        if kind != GGUFValueType.ARRAY:
            return self._values(kind, 1, what)[0]
        kind = self.unpack("<I", what)
        return self._values(kind, self.unpack("<Q", what), what)

    def _values(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == GGUFValueType.STRING:
            return [self.string(what) for _ in range(count)]
        if kind not in SCALAR_DTYPES:  # arrays of arrays are refused too, as by llama.cpp
            raise CheckpointError(f"{self.path}: corrupt: {what} has the unknown value type {kind}")
        dtype = np.dtype(SCALAR_DTYPES[GGUFValueType(kind)])
        return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions (innermost first), type and offset within the data of the next tensor."""
        name = self.string("tensor name")
        what = f"the description of tensor '{name}'"
        count = self.unpack("<I", what)
        if not 1 <= count <= MAX_DIMS:
            raise CheckpointError(f"{self.path}: corrupt: tensor '{name}' has {count} dimensions")
        dims = tuple(self.unpack("<Q", what) for _ in range(count))
        return name, dims, self.unpack("<I", what), self.unpack("<Q", what)


def _can_decode(kind: GGMLQuantizationType) -> bool:
    """Whether `GgufFile.read` has a decoder for this type; tried on one block of zeros."""
    if kind in PLAIN_DTYPES:
        return True
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
