"""DiskTier: pages that outlive the process, one file per node of the prefix tree (`page_file` has the format).

    engine's thread     submit_write  ──►  writer thread: make room, write "….partial", rename
                        submit_read   ──►  reader thread: header, pages, checksum  ──►  Future
                        drain_evicted ◄──  names whose file is gone: evicted, unreadable, never written

It is a cache: whatever goes wrong with the disk costs a recomputation, a line in the log and one in `errors`, and
never raises into the engine. Nothing is synced; what a power cut leaves half-written, the checksums find.

**Which files go first.** The least recently used. A write, a read or a `touch` is a use, counted when it is asked for.
A node is of no use without its ancestors, so after each the owner touches the path from the node to the root, deepest
first: then ancestors are always more recent than what hangs on them, and leaves go first. Reads also set
the file's modification time, from which `scan` restores this order.

**Several processes** may share a folder: files appear by rename and have unique names before. Each process keeps the
files that it wrote or scanned below its own capacity, and takes a file that another has evicted for a lost one.
Files of another fingerprint or page size are left alone and not counted.

A prompt can be read off its tokens: a folder that is made here is its owner's only (0o700), and so are the files.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import tempfile
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from specax.paged import page_file
from specax.paged.namespaces import Namespace
from specax.paged.page_file import Content, Header, Key, Page, PageFileError

PARTIAL = ".partial"
STALE_SECONDS = 3600  # a partial file of this age was left by a process that died
_NAME = re.compile(r"[0-9a-f]{32}" + re.escape(page_file.SUFFIX))

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A file found by `scan`. `tokens` is int32 [stop]; `present[group][page]` is false for pages given back."""

    name: str
    namespace: Namespace
    tokens: np.ndarray
    start: int
    num_bytes: int
    present: tuple[tuple[bool, ...], ...]


class DiskTier:
    """KV pages in files under `folder`, at most `capacity_bytes` of them (while one is replaced, it counts once).

    Args:
      folder: made if absent.
      fingerprint: says what else the KV depends on (weights, dtype, layout); other fingerprints' files are not read.
      capacity_bytes: sum of the file sizes.
      page_size: tokens per page.
      max_pending_writes: writes beyond this many in the queue are given up at once (they hold memory).

    Raises:
      OSError: the folder can't be made.
      ValueError: a setting is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fingerprint: str,
        capacity_bytes: int,
        page_size: int,
        max_pending_writes: int = 256,
    ):
        for what, value in (("capacity_bytes", capacity_bytes), ("max_pending_writes", max_pending_writes)):
            if value < 0:
                raise ValueError(f"{what} is {value}; give 0 or more")
        if page_size < 1:
            raise ValueError(f"page size is {page_size}; it must be 1 or more")
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.fingerprint, self.page_size, self.capacity_bytes = fingerprint, page_size, capacity_bytes
        self.errors = 0
        self._max_pending_writes = max_pending_writes
        self._lock = threading.Lock()  # guards all below; never held during input or output
        self._sizes: OrderedDict[str, int] = OrderedDict()  # name → bytes, least recently used first; 0: to be written
        self._num_bytes = 0
        self._pending: Counter[str] = Counter()  # writes asked for and not done
        self._lost: dict[str, None] = {}  # an ordered set
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "disk-tier-write")  # all changes, in order
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "disk-tier-read")  # need not queue behind writes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files known to this process."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        """Whether the file is there, or will be when the queue is done."""
        return name in self._sizes

    def name(self, key: Key) -> str:
        """Name of the file for a key; whether it exists is another matter."""
        return page_file.file_name(self.fingerprint, self.page_size, key)

    # Asked for on the engine's thread.

    def submit_write(self, key: Key, provider: Callable[[], Content], done: Callable[[], None] | None = None) -> str:
        """Writes a node in the background. `provider` is called there and gives, per KV group, the pages
        start // page_size … ceil(stop / page_size) − 1; None for a page that is not there. `done` is called once
        they are not needed any more, on whatever thread.

        Returns:
          The file's name. If nothing comes of it, `drain_evicted` names it.
        """
        name = self.name(key)
        with self._lock:
            full = self._pending.total() >= self._max_pending_writes
            if not full:
                self._pending[name] += 1
                self._lost.pop(name, None)
                self._sizes.setdefault(name, 0)
                self._sizes.move_to_end(name)
        if full:
            self._discard(name, f"{self._max_pending_writes} writes are waiting already")
            if done is not None:
                done()
        else:
            self._writer.submit(self._write, name, key, provider, done)
        return name

    def write(self, key: Key, content: Content) -> bool:
        """`submit_write`, and waits; whether the file is there now.

        Raises:
          ValueError: the content does not fit the key, as for `page_file.describe`.
        """
        page_file.describe(self.fingerprint, self.page_size, key, content)
        name = self.submit_write(key, lambda: content)
        self.flush()
        return name in self

    def submit_read(self, name: str) -> concurrent.futures.Future[list[list[Page | None]] | None]:
        """`read` in the background."""
        self._check(name)
        self.touch(name)
        return self._reader.submit(self._read, name)

    def read(self, name: str) -> list[list[Page | None]] | None:
        """Pages per group, None for those that were not there when it was written. A write under way is waited for.

        None instead of a list: the file is gone, corrupt or unreadable; `drain_evicted` names it, too.
        """
        self._check(name)
        self.touch(name)
        return self._read(name)

    def touch(self, name: str) -> None:
        """Makes a file the most recently used one, if it is there. See the contract at the top of this file."""
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)

    def remove(self, name: str) -> None:
        """Deletes a file, once earlier writes are done; `drain_evicted` does not name it."""

        known = self._forget(name, lost=False)
        self._writer.submit(self._remove, name, known)

    def drain_evicted(self) -> list[str]:
        """Names whose file is no more (or never was: the write failed), since the last call; one may come again."""
        with self._lock:
            lost, self._lost = list(self._lost), {}
        return lost

    def flush(self) -> None:
        """Waits for all writes and removals asked for so far."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Finishes what was asked for and ends the threads; nothing can be read or written afterwards."""
        self._reader.shutdown()
        self._writer.shutdown()

    # Start-up.

    def scan(self) -> Iterator[Entry]:
        """Takes over the files of earlier runs: reads their headers, not their pages. To be called once, at the start.

        Files that can't be used are skipped with a warning; damaged ones, and what dead processes left
        half-written, are deleted. What is beyond the capacity is evicted.

        Returns:
          The files taken over, ordered by `start`: a prefix comes before its extensions. Lazily, since each
          holds all tokens of its sequence.
        """
        found: list[_Found] = []
        skipped: dict[str, list[str]] = defaultdict(list)
        with os.scandir(self.folder) as items:
            listing = list(items)
        for item in listing:
            if _NAME.match(item.name) and item.name.endswith(PARTIAL):
                self._remove_stale(item)
            elif _NAME.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                try:
                    with open(item.path, "rb") as file:
                        header, status = self._header(item.name, file), os.fstat(file.fileno())
                except (OSError, PageFileError) as error:
                    skipped[str(error)].append(item.name)
                    if isinstance(error, PageFileError) and error.damaged:
                        self._unlink(item.name)
                    continue
                found.append(_Found(item.name, header, status))
        for reason, names in skipped.items():
            logger.warning("%s: skipped %d files, %s first: %s", self.folder, len(names), names[0], reason)
        with self._lock:
            for file_ in _least_recent_first(found):
                self._num_bytes += file_.num_bytes - self._sizes.pop(file_.name, 0)
                self._sizes[file_.name] = file_.num_bytes
        self._make_room(0)
        return self._entries([file_.name for file_ in sorted(found, key=lambda f: (f.start, f.name))])

    def _entries(self, names: list[str]) -> Iterator[Entry]:
        for name in names:
            if name not in self:
                continue  # evicted
            try:
                with open(self.folder / name, "rb") as file:
                    header = self._header(name, file)
            except (OSError, PageFileError) as error:  # it was all right a moment ago
                self._discard(name, error)
                continue
            present = tuple(group.present for group in header.groups)
            key = header.key
            yield Entry(name, key.namespace, key.tokens, key.start, page_file.file_bytes(header), present)

    def _header(self, name: str, file: BinaryIO) -> Header:
        """The header of an open file, which must be the one that its name promises."""
        header = page_file.read_header(file)
        if header.fingerprint != self.fingerprint:
            raise PageFileError("it has another fingerprint", damaged=False)
        if header.page_size != self.page_size:
            raise PageFileError(f"its page size is {header.page_size}, not {self.page_size}", damaged=False)
        if header.name != name:
            raise PageFileError("it was renamed", damaged=False)
        return header

    def _remove_stale(self, item: os.DirEntry[str]) -> None:
        with contextlib.suppress(OSError), open(item.path, "rb") as file:
            if time.time() - item.stat(follow_symlinks=False).st_mtime > STALE_SECONDS and page_file.is_ours(file):
                os.unlink(item.path)

    # On the writer's thread.

    def _write(
        self, name: str, key: Key, provider: Callable[[], Content], done: Callable[[], None] | None = None
    ) -> None:
        try:
            content = provider()
            header = page_file.describe(self.fingerprint, self.page_size, key, content)
            size = page_file.file_bytes(header)
            self._make_room(size, name)
            self._store(self.folder / name, header, content)
            with self._lock:
                self._num_bytes += size - self._sizes.get(name, 0)
                self._sizes[name] = size  # keeps its place in the order
                self._lost.pop(name, None)
        except Exception as error:  # whatever it was, the engine goes on without this file
            self._discard(name, error)
        finally:
            with self._lock:
                self._pending[name] -= 1
                if not self._pending[name]:
                    del self._pending[name]
            if done is not None:
                done()

    def _store(self, path: pathlib.Path, header: Header, content: Content) -> None:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if not page_file.is_ours(file):
                raise FileExistsError(f"{path} is there and is not ours")
        descriptor, partial = tempfile.mkstemp(PARTIAL, path.name + ".", self.folder)  # mode 0o600
        try:
            with open(descriptor, "wb") as file:
                page_file.write(file, header, content)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise

    def _make_room(self, size: int, name: str = "") -> None:
        """Deletes least recently used files until one of `size` bytes fits in the place of file `name`."""
        with self._lock:
            excess = self._num_bytes - self._sizes.get(name, 0) + size - self.capacity_bytes
            victims = []
            for victim, num_bytes in self._sizes.items():
                if excess <= 0:
                    break
                if victim not in self._pending:
                    victims.append(victim)
                    excess -= num_bytes
            if excess > 0:
                raise OSError(f"{size} bytes do not fit in a capacity of {self.capacity_bytes}")
            for victim in victims:
                self._num_bytes -= self._sizes.pop(victim)
                self._lost[victim] = None
        for victim in victims:
            self._unlink(victim)

    def _remove(self, name: str, known: int) -> None:
        if self._forget(name, lost=False) or known:  # (a write that was under way has put it back)
            self._unlink(name)

    # On the reader's thread.

    def _read(self, name: str) -> list[list[Page | None]] | None:
        if name in self._pending:
            self.flush()
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                content = page_file.read_content(file, self._header(name, file))
        except FileNotFoundError:  # evicted, perhaps by another process
            self._forget(name)
            return None
        except (OSError, MemoryError, PageFileError) as error:
            self._discard(name, error, always_say=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    # On any thread.

    def _check(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name that `name(key)` gives")

    def _forget(self, name: str, lost: bool = True) -> int:
        """Takes a file out of the books; its size, or 0 if it was not in them."""
        with self._lock:
            size = self._sizes.pop(name, 0)
            self._num_bytes -= size
            self._lost.pop(name, None)
            if lost:
                self._lost[name] = None
        return size

    def _discard(self, name: str, reason: Exception | str, always_say: bool = False) -> None:
        """Goes on without a file, and deletes what is there if it is ours."""
        known = self._forget(name)
        if reason.damaged if isinstance(reason, PageFileError) else known:
            self._unlink(name)
        self._count_error(name, reason, always_say)

    def _unlink(self, name: str) -> None:
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                ours = page_file.is_ours(file)
            if ours:
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._count_error(name, error)

    def _count_error(self, name: str, reason: Exception | str, always_say: bool = False) -> None:
        with self._lock:
            self.errors += 1
            first = self.errors == 1
        if first or always_say:
            rest = "" if always_say else "; later errors are only counted"
            logger.warning("%s: the disk tier goes on without %s: %s%s", self.folder, name, reason, rest)


class _Found:
    """What `scan` keeps of a file: digests in the place of its tokens, which may be long."""

    def __init__(self, name: str, header: Header, status: os.stat_result):
        self.name, self.start = name, header.key.start
        self.num_bytes, self.last_use = status.st_size, status.st_mtime_ns
        namespace, tokens = header.key.namespace, header.key.tokens
        self.prefix = hash((namespace, tokens.tobytes()))
        self.parent = hash((namespace, tokens[: self.start].tobytes()))


def _least_recent_first(found: list[_Found]) -> list[_Found]:
    """A use of a node is a use of its ancestors, so none of them comes before it."""
    last_use: dict[int, int] = {}
    for file in sorted(found, key=lambda f: -f.start):
        last_use[file.prefix] = max(file.last_use, last_use.get(file.prefix, 0))
        last_use[file.parent] = max(last_use[file.prefix], last_use.get(file.parent, 0))
    return sorted(found, key=lambda f: (last_use[f.prefix], -f.start))
