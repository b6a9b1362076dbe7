"""The disk tier's file format: the KV pages of one node of the prefix tree.

    offset         bytes
    0              8       magic, b"SPECAXKV"
    8              4       format version, uint32 (integers and arrays are little-endian)
    12             4       J, bytes of the JSON header, uint32
    16             4       N, number of tokens, uint32
    20             4       CRC-32 of bytes 0 … 19, the JSON header and the tokens
    24             J       JSON header, ASCII, keys below
    24 + J         4 · N   tokens 0 … N − 1 of the sequence, int32; the file holds the pages of start … N − 1
    24 + J + 4·N   …       present pages: group by group, page by page, array by array, in C order, unpadded
    end − 4        4       CRC-32 of all bytes before it but the four at 20

    {"fingerprint": str, "namespace": [[kind, value], …], "page_size": int, "start": int,
     "groups": [{"arrays": [[dtype, [dim, …]], …], "present": "1101"}, …]}

`present` has one digit per page; "0" is a page that a sliding window gave back. All sizes follow from the header,
so a reader compares them with the file's before it allocates anything. Nothing in a file is executed (no pickle).
A file's name is a digest of what its content depends on: see `file_name`.
"""

import dataclasses
import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from specax.paged.namespaces import Namespace

type Page = tuple[np.ndarray, ...]
type Content = Sequence[Sequence[Page | None]]  # [groups][pages]

MAGIC = b"SPECAXKV"
VERSION = 1
SUFFIX = ".specaxkv"
MAX_HEADER_BYTES = 1 << 24
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
_PREFIX = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")


class PageFileError(ValueError):
    """A file can't be used. `damaged`: it is one of ours and broken, so that nobody can; else it is someone else's."""

    def __init__(self, message: str, damaged: bool):
        super().__init__(message)
        self.damaged = damaged


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """Which KV: positions start … stop − 1 of a sequence, which depend on all tokens before them.

    Attributes:
      namespace: (kind, value) pairs that tell apart sequences with equal tokens (adapter, tenant, image, …).
      tokens: int32 [stop], the whole prefix from position 0; must not change afterwards.
      start: the first position.
    """

    namespace: Namespace
    tokens: np.ndarray
    start: int

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int32:
            raise ValueError(f"tokens are {self.tokens.dtype} {self.tokens.shape}; give int32 [stop]")
        if not 0 <= self.start < len(self.tokens):
            raise ValueError(f"start is {self.start}; it must lie in 0 … {len(self.tokens) - 1} (stop is exclusive)")

    @property
    def stop(self) -> int:
        return len(self.tokens)

    def num_pages(self, page_size: int) -> int:
        """Pages that positions start … stop − 1 touch; the first and the last may be shared with neighbours."""
        return -(-self.stop // page_size) - self.start // page_size


@dataclasses.dataclass(frozen=True)
class Group:
    """What the pages of one KV group look like: (dtype's name, shape) of a page's arrays; which pages are present."""

    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    present: tuple[bool, ...]

    @property
    def num_bytes(self) -> int:
        return sum(self.present) * sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Header:
    """All that a file says before its pages."""

    fingerprint: str
    page_size: int
    key: Key
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page size is {self.page_size}; it must be 1 or more")
        for group in self.groups:
            if len(group.present) != self.key.num_pages(self.page_size):
                raise ValueError(
                    f"a group has {len(group.present)} pages; positions {self.key.start} … {self.key.stop - 1} with "
                    f"page size {self.page_size} take {self.key.num_pages(self.page_size)}"
                )
            for dtype, shape in group.arrays:
                if dtype not in DTYPES or len(shape) > 32 or min(shape, default=1) < 1:
                    raise ValueError(f"a page holds {dtype} {shape}; can store {', '.join(DTYPES)}, no empty arrays")

    @property
    def data_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def name(self) -> str:
        return file_name(self.fingerprint, self.page_size, self.key)

    def encode(self) -> bytes:
        """Everything before the pages."""
        fields = {
            "fingerprint": self.fingerprint,
            "namespace": self.key.namespace,
            "page_size": self.page_size,
            "start": self.key.start,
            "groups": [{"arrays": g.arrays, "present": "".join("01"[here] for here in g.present)} for g in self.groups],
        }
        raw, tokens = json.dumps(fields).encode("ascii"), np.ascontiguousarray(self.key.tokens).tobytes()
        if len(raw) > MAX_HEADER_BYTES:
            raise ValueError(f"the header takes {len(raw)} bytes, at most {MAX_HEADER_BYTES} are read back")
        prefix = _PREFIX.pack(MAGIC, VERSION, len(raw), self.key.stop)
        return prefix + _CRC.pack(zlib.crc32(prefix + raw + tokens)) + raw + tokens


def file_name(fingerprint: str, page_size: int, key: Key) -> str:
    """32 hexadecimal digits (BLAKE2b, RFC 7693) and `SUFFIX`; equal names mean equal KV."""
    said = json.dumps([VERSION, fingerprint, key.namespace, page_size, key.start]).encode("ascii")
    digest = hashlib.blake2b(said + b"\0", digest_size=16)
    digest.update(np.ascontiguousarray(key.tokens).data)
    return digest.hexdigest() + SUFFIX


def describe(fingerprint: str, page_size: int, key: Key, content: Content) -> Header:
    """The header of a file with this content.

    Raises:
      ValueError: a wrong number of pages, pages of one group that differ in shape or dtype, or another dtype than
        those of `DTYPES`.
    """
    groups = []
    for number, pages in enumerate(content):
        kinds = [tuple((a.dtype.name, a.shape) for a in page) for page in pages if page is not None]
        foreign = [a.dtype for page in pages if page is not None for a in page if a.dtype not in DTYPES.values()]
        if foreign:  # (a big-endian float32 is called float32, too)
            raise ValueError(f"a page of group {number} holds {foreign[0]!r}; can store {', '.join(DTYPES)}")
        if len(set(kinds)) > 1:
            raise ValueError(f"pages of group {number} differ: {' and '.join(map(str, sorted(set(kinds))[:2]))}")
        groups.append(Group(kinds[0] if kinds else (), tuple(page is not None for page in pages)))
    return Header(fingerprint, page_size, key, tuple(groups))


def file_bytes(header: Header) -> int:
    """Size of the file."""
    return len(header.encode()) + header.data_bytes + _CRC.size


def write(file: BinaryIO, header: Header, content: Content) -> None:
    """Writes a file; `header` comes from `describe` with the same content."""
    prefix = header.encode()
    file.write(prefix)
    (checksum,) = _CRC.unpack_from(prefix, _PREFIX.size)
    for array in _arrays(content):
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        checksum = zlib.crc32(view, checksum)
        file.write(view)
    file.write(_CRC.pack(checksum))


def _arrays(content: Content) -> Iterator[np.ndarray]:
    for pages in content:
        for page in pages:
            if page is not None:
                yield from page


def is_ours(file: BinaryIO) -> bool:
    """Whether a file starts with the magic, or is a cut-off beginning of it. Leaves the position after it."""
    return MAGIC.startswith(file.read(len(MAGIC)))


def read_header(file: BinaryIO) -> Header:
    """Reads and checks all but the pages.

    Raises:
      PageFileError: another format or version, or a header that is cut or corrupt, or a file of the wrong size.
    """
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    if not is_ours(file):
        raise PageFileError("not a KV page file", damaged=False)
    file.seek(0)
    prefix, crc = file.read(_PREFIX.size), file.read(_CRC.size)
    if len(crc) < _CRC.size:
        raise PageFileError("cut off", damaged=True)
    _, version, header_bytes, num_tokens = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise PageFileError(f"format version {version}, not {VERSION}", damaged=False)
    rest = size - _PREFIX.size - _CRC.size - header_bytes - 4 * num_tokens - _CRC.size
    if header_bytes > MAX_HEADER_BYTES or rest < 0:
        raise PageFileError("cut off, or a corrupt header", damaged=True)
    raw, tokens = file.read(header_bytes), file.read(4 * num_tokens)
    if crc != _CRC.pack(zlib.crc32(tokens, zlib.crc32(raw, zlib.crc32(prefix)))):
        raise PageFileError("a corrupt header", damaged=True)
    try:
        header = _parse(json.loads(raw), np.frombuffer(tokens, np.int32))
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:  # its checksum is right
        raise PageFileError(f"a malformed header ({error!r})", damaged=True) from error
    if rest != header.data_bytes:
        raise PageFileError("cut off, or too long", damaged=True)
    return header


def _parse(fields: Any, tokens: np.ndarray) -> Header:
    groups = []
    for group in fields["groups"]:
        arrays = tuple((str(dtype), tuple(int(dim) for dim in shape)) for dtype, shape in group["arrays"])
        groups.append(Group(arrays, tuple(bool(int(digit)) for digit in group["present"])))
    namespace = tuple((str(kind), str(value)) for kind, value in fields["namespace"])
    key = Key(namespace, tokens, int(fields["start"]))
    return Header(str(fields["fingerprint"]), int(fields["page_size"]), key, tuple(groups))


def read_content(file: BinaryIO, header: Header) -> list[list[Page | None]]:
    """The pages of a file whose header was just read; each array has memory of its own.

    Raises:
      PageFileError: the checksum does not match, or the file was cut meanwhile.
    """
    file.seek(_PREFIX.size)
    (checksum,) = _CRC.unpack(file.read(_CRC.size))
    file.seek(-(header.data_bytes + _CRC.size), os.SEEK_END)
    content: list[list[Page | None]] = []
    for group in header.groups:
        pages: list[Page | None] = []
        for here in group.present:
            page = tuple(np.empty(shape, DTYPES[dtype]) for dtype, shape in group.arrays) if here else None
            for array in page or ():
                view = array.reshape(-1).view(np.uint8).data
                if file.readinto(view) != len(view):  # type: ignore[attr-defined]
                    raise PageFileError("cut off", damaged=True)
                checksum = zlib.crc32(view, checksum)
            pages.append(page)
        content.append(pages)
    if file.read(_CRC.size + 1) != _CRC.pack(checksum):
        raise PageFileError("corrupt pages: the checksum does not match", damaged=True)
    return content
