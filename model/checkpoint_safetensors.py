"""The safetensors file format: a checked table of tensors, and reads of one tensor at a time.

The header is parsed here rather than by `safetensors.safe_open`, because that reader can't give bfloat16
or fp8 to NumPy, and its message about a truncated file doesn't say which tensor is cut.
Format: https://github.com/huggingface/safetensors#format
"""

import dataclasses
import json
import math
import os
import struct
from typing import Any

import ml_dtypes
import numpy as np

from specax.model.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies in its file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One `.safetensors` file, opened and checked: every tensor's bytes lie within the file.

    Raises:
      CheckpointError: the file can't be read, its header is corrupt or cut, a tensor's data lies outside
        the file, or a tensor has a dtype other than those of `DTYPES`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            self.size = os.path.getsize(self.path)
            with open(self.path, "rb") as file:
                header_bytes, header = self._header(file)
        except OSError as error:
            raise CheckpointError(f"{self.path}: can't be read: {error}") from error
        data_start = 8 + header_bytes
        self.tensors = {
            name: self._entry(name, entry, data_start)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        end = max((t.offset + t.nbytes for t in self.tensors.values()), default=data_start)
        if end != self.size:
            raise CheckpointError(f"{self.path}: the file has {self.size} bytes, its header describes {end}")

    def _header(self, file: Any) -> tuple[int, dict[str, Any]]:
        if self.size < 8:
            raise CheckpointError(f"{self.path}: truncated: {self.size} bytes can't hold a header")
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(self.size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: truncated, or not a safetensors file: a header of {length} bytes "
                f"in a file of {self.size}"
            )
        try:
            header = json.loads(file.read(length).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: the header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the safetensors header is not a JSON object")
        return length, header

    def _entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        where = f"{self.path}: tensor '{name}'"
        try:
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: corrupt header entry {entry!r}") from error
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise CheckpointError(f"{where}: corrupt header entry {entry!r}")
        if not isinstance(kind, str) or kind not in DTYPES:
            raise CheckpointError(f"{where} has dtype {kind!r}; supported: {', '.join(DTYPES)}")
        tensor = StoredTensor(shape, DTYPES[kind], data_start + begin)
        if tensor.nbytes != end - begin:
            raise CheckpointError(
                f"{where}: {kind} of shape {shape} takes {tensor.nbytes} bytes, not {end - begin}"
            )
        if data_start + end > self.size:
            raise CheckpointError(
                f"{where}: truncated: its data ends at byte {data_start + end} of a file of {self.size}"
            )
        return tensor

    def read(self, name: str) -> np.ndarray:
        """One tensor as stored, in an array of its own.

        Raises:
          CheckpointError: the file changed since it was opened.
        """
        tensor = self.tensors[name]
        return read_bytes(self.path, tensor.offset, tensor.nbytes).view(tensor.dtype).reshape(tensor.shape)


def read_bytes(path: str, offset: int, count: int) -> np.ndarray:
    """`uint8[count]` from byte `offset` of a file.

    A plain read, not a memory map: mapped pages would count as resident memory until unmapped, and a file
    that shrinks while mapped kills the process instead of raising.

    Raises:
      CheckpointError: the file can't be read or is shorter than that.
    """
    try:
        data = np.fromfile(path, dtype=np.uint8, count=count, offset=offset)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    if data.size != count:
        raise CheckpointError(
            f"{path}: truncated since it was opened: {data.size} of {count} bytes at byte {offset} are left"
        )
    return data
