"""Tiers: what host memory and files hold of the prefix cache, and how KV moves between them and the device.

The nodes of the radix tree say where their KV lies (`pages`, `host`, `file`). The tree calls back here before it
releases a node's pages, after it has split a node, and when it drops one.
"""

import dataclasses
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from specax.paged.disk_tier import DiskTier, Key
from specax.paged.host_tier import HostPage, HostPages, HostTier, PageLoad, PageSave
from specax.paged.namespaces import is_portable
from specax.paged.page_table import PageCopy
from specax.paged.pool import TRASH_PAGE
from specax.paged.radix_tree import Match, Node, RadixTree

logger = logging.getLogger(__name__)

type PageOp = PageCopy | PageSave | PageLoad

MAX_READS = 16  # nodes on their way from disk at a time
WRITING = 2  # times the capacity of host memory that may be on its way to disk beside it


@dataclasses.dataclass
class CacheCounters:
    """In tokens, since the start. Queries and hits count once per request, when it is first admitted."""

    query_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0  # hits and recoveries that came from host memory, or from disk through it
    recovered_tokens: int = 0  # found again by preempted requests
    saved_pages: int = 0
    loaded_pages: int = 0


class Tiers:
    """Host memory and files under one tree, if there are any (`host`, `disk`).

    `ops` is what the device owes, in order; `KVMemory` appends its copies to the same list.
    """

    def __init__(self, tree: RadixTree, host: HostTier | None, disk: DiskTier | None, counters: CacheCounters):
        self.tree, self.host, self.disk, self.counters = tree, host, disk, counters
        self.ops: list[PageOp] = []
        self._host_lru: OrderedDict[Node, None] = OrderedDict()
        self._files: dict[str, tuple[int, list[Node]]] = {}  # name → first token, nodes whose pages it holds
        self._reads: dict[str, Future[Any]] = {}
        self._unwritten: dict[str, tuple[Key, HostPages, Node]] = {}  # by name: files to write
        self._writing_bytes = 0  # on their way to disk
        self._written: deque[int] = deque()  # bytes that the disk's thread doesn't need any more
        tree.demote, tree.dropped, tree.was_split = self._demote, self._dropped, self._was_split
        if disk is not None:
            try:
                for entry in disk.scan():
                    self._found(entry)
            except OSError as error:
                logger.warning("%s can't be read: %s", disk.folder, error)

    def take_ops(self) -> list[PageOp]:
        ops, self.ops = self.ops, []
        return ops

    # --- host memory

    def _save(self, node: Node) -> bool:
        """Copies a node's pages to host memory, making room there; False if there is none."""
        assert self.host is not None and node.pages is not None
        cells = tuple([HostPage() if page else None for page in line.tolist()] for line in node.pages)
        if not self.make_room(self.host.size(cells)):
            return False
        self.host.take(cells)
        node.host = cells
        self._host_lru[node] = None
        self.touch(node)
        for group, (line, targets) in enumerate(zip(node.pages.tolist(), cells, strict=True)):
            for page, target in zip(line, targets, strict=True):
                if target is not None:
                    self.ops.append(PageSave(group, page, target))
                    self.counters.saved_pages += 1
        return True

    def load(self, node: Node) -> bool:
        """Brings a node from host memory to the device; False if pages are short.

        Where it begins inside a page that its parent alone owns, that page is overwritten: it gets the same
        tokens and those that follow.
        """
        if node.host is None:
            return False
        assert node.parent is not None
        above = node.parent.pages if node.start % self.tree.page_size else None
        pages = np.zeros((len(self.tree.pools), len(node.host[0])), np.int32)
        taken: list[list[int]] = []
        for group, (pool, line) in enumerate(zip(self.tree.pools, node.host, strict=True)):
            if above is not None and line[0] is not None and pool.references(above[group, -1]) == 1:
                pages[group, 0] = above[group, -1]
            new = pool.allocate(sum(cell is not None for cell in line) - int(pages[group, 0] != TRASH_PAGE))
            if new is None:
                for other, got in zip(self.tree.pools, taken):
                    other.release(got)
                return False
            taken.append(new)
        for group, (pool, line, new) in enumerate(zip(self.tree.pools, node.host, taken, strict=True)):
            if pages[group, 0] != TRASH_PAGE:
                pool.share([pages[group, 0]])
            for column, source in enumerate(line):
                if source is not None:
                    if pages[group, column] == TRASH_PAGE:
                        pages[group, column] = new.pop()
                    self.ops.append(PageLoad(group, source, int(pages[group, column])))
                    self.counters.loaded_pages += 1
        self.tree.settle(node, pages)
        return True

    def make_room(self, num_bytes: int) -> bool:
        """Makes room in host memory, oldest first. Those move to disk if there is one."""
        assert self.host is not None
        if num_bytes > self.host.capacity_bytes:
            return False
        while not self.host.fits(num_bytes):
            # (Ancestors are younger than what is below them: the oldest has nothing below it in host memory alone.)
            node = next((n for n in self._host_lru if n.pages is not None or not n.locks), None)
            if node is None:  # the rest is about to be loaded
                return False
            del self._host_lru[node]
            self._leave_host(node)
        return True

    def _leave_host(self, node: Node) -> None:
        assert self.host is not None and node.host is not None
        if node.file is None and self.disk is not None and node.pages is None:
            self._write(node)
        self.host.release(node.host)
        node.host = None
        if node.pages is None and node.file is None:
            self.tree.remove(node)

    def touch(self, node: Node) -> None:
        """Deepest first, so that ancestors are younger and eviction takes leaves first."""
        while node.parent is not None:
            if node in self._host_lru:
                self._host_lru.move_to_end(node)
            if node.file is not None and self.disk is not None:
                self.disk.touch(node.file)
            node = node.parent

    # --- files

    def write_through(self, node: Node) -> None:
        """Copies a node that is on the device to the slower tiers now, and not when it is evicted."""
        if self.host is not None and self._save(node) and self.disk is not None:
            self._write(node)

    def _write(self, node: Node) -> None:
        """Writes a node's pages, which are in host memory, to a file in the background."""
        assert self.disk is not None and self.host is not None and node.host is not None
        namespace = node.root.namespace
        if not is_portable(namespace):
            return
        while self._written:
            self._writing_bytes -= self._written.popleft()
        size = self.host.size(node.host)
        if self._writing_bytes + size > WRITING * self.host.capacity_bytes:
            return  # the disk is too slow: what waits for it takes memory
        key = Key(namespace, np.concatenate([part.tokens for part in self.tree.path(node)]), node.start)
        node.file = self.disk.name(key)
        self._files[node.file] = (node.start, [node])
        self._unwritten[node.file] = key, node.host, node
        self._writing_bytes += size

    def _submit_writes(self) -> None:
        """Hands files to the disk tier, once the device was asked for all of their pages."""
        for name, (key, cells, node) in list(self._unwritten.items()):
            if all(cell is None or cell.content is not None for line in cells for cell in line):
                del self._unwritten[name]
                self._submit(key, cells, node)

    def _submit(self, key: Key, cells: HostPages, node: Node) -> None:
        assert self.disk is not None and self.host is not None
        size = self.host.size(cells)
        self.disk.submit_write(key, partial(_arrays, cells), partial(self._written.append, size))
        if node.stamp >= 0:
            self.touch(node)  # the disk's order: ancestors after what hangs on them

    @property
    def reading(self) -> bool:
        """Whether something is on its way from disk."""
        return bool(self._reads)

    def prefetch(self, match: Match) -> bool:
        """Starts to read what is only on disk; whether some of the match is on its way.

        What came already, and left host memory before somebody could use it, is not read a second time: whoever
        needs more than host memory holds, or waits too long, would read in vain again and again.
        """
        if self.disk is None:
            return False
        self._submit_writes()
        path = self.tree.path(match.node)
        for part in path:
            if part.pages is None and part.host is None and part.file is not None and not part.reading:
                if part.fetched or part.file in self._unwritten or len(self._reads) >= MAX_READS:
                    break
                if part.file not in self._reads:
                    self._reads[part.file] = self.disk.submit_read(part.file)
                for other in self._files[part.file][1]:
                    other.reading = True
        return any(part.reading for part in path)

    def poll(self, wait: bool = False) -> None:
        """Takes in what was read from disk, and what the disk tier evicted. `wait`: for one read at least."""
        if self.disk is None:
            return
        self._submit_writes()
        if wait and self._reads:
            next(iter(self._reads.values())).exception()
        for name in [name for name, read in self._reads.items() if read.done()]:
            self._arrived(name, self._reads.pop(name))
        for name in self.disk.drain_evicted():
            self._lost(name)

    def _arrived(self, name: str, read: Future[Any]) -> None:
        content = None if read.cancelled() or read.exception() is not None else read.result()
        if name not in self._files:
            return
        start, nodes = self._files[name]
        for node in list(nodes):
            node.reading = False
            if content is None:
                continue
            node.fetched = True
            if self.host is not None and node.host is None and node.stamp >= 0:
                first = node.start // self.tree.page_size - start // self.tree.page_size
                count = -(-node.stop // self.tree.page_size) - node.start // self.tree.page_size
                parts = [line[first : first + count] for line in content]
                cells = tuple([None if c is None else HostPage(c) for c in part] for part in parts)
                if self.make_room(self.host.size(cells)) and node.stamp >= 0:
                    self.host.take(cells)
                    node.host = cells
                    self._host_lru[node] = None
                    self.touch(node)
        if content is None:
            self._lost(name)

    def _lost(self, name: str) -> None:
        """A file is gone: nodes that were nowhere else go too."""
        for node in list(self._files.pop(name, (0, []))[1]):
            node.file, node.reading = None, False
            if node.stamp >= 0 and node.pages is None and node.host is None:
                self.tree.remove(node)

    def _found(self, entry: Any) -> None:
        """A file of an earlier process: its node joins the tree if all of its prefix is there."""
        match = self.tree.match(entry.tokens, entry.namespace)
        if match.length == len(entry.tokens) or match.length < entry.start:
            return  # it is there already, or a part of its prefix is missing
        node = self.tree.node_at(match, match.length) if match.length else self.tree.root(entry.namespace)
        child = self.tree.add(node, entry.tokens[match.length :].copy(), None, None)
        child.file = entry.name
        self._files[entry.name] = (entry.start, [child])

    def save_all(self) -> Iterator[None]:
        """Puts what is on the device or in host memory on disk too, for a later process: children first, so that
        the most recent files are the prefixes.

        Node by node: after each, the device must do what it owes (`ops`), and then `finish_writes` is due.
        """
        for node in reversed(list(self.tree.nodes())):
            if self.disk is None or self.host is None or node.stamp < 0 or node.file is not None:
                continue
            if node.host is None and node.pages is not None:
                self._save(node)
            if node.host is not None:
                self._write(node)
                yield

    def finish_writes(self) -> None:
        """Waits until all files are written."""
        if self.disk is not None:
            self.disk.flush()  # its queue is bounded
            for name in list(self._unwritten):
                self._submit(*self._unwritten.pop(name))
                self.disk.flush()
            self._submit_writes()

    def remove_files(self) -> None:
        """Deletes the files of this tree."""
        if self.disk is not None:
            for name in self._files:
                self.disk.remove(name)
            self._files.clear()

    # --- what the tree tells

    def _demote(self, node: Node) -> None:
        """Called when a node is about to lose its pages."""
        worth_it = node.swap is not False or node.children  # (they would be lost with it)
        if self.host is not None and node.host is None and worth_it:
            self._save(node)

    def _dropped(self, node: Node) -> None:
        """A node left the tree."""
        if node.host is not None and self.host is not None:
            self.host.release(node.host)
            self._host_lru.pop(node, None)
            node.host = None
        if node.file is not None and self.disk is not None:
            nodes = self._files.get(node.file, (0, []))[1]
            if node in nodes:
                nodes.remove(node)
            if not nodes:
                self._files.pop(node.file, None)
                if (unwritten := self._unwritten.pop(node.file, None)) and self.host is not None:
                    self._writing_bytes -= self.host.size(unwritten[1])
                self.disk.remove(node.file)
            node.file = None

    def _was_split(self, upper: Node, lower: Node) -> None:
        """A page under the cut belongs to both parts; so does a file."""
        if lower.host is not None and self.host is not None:
            keep = -(-upper.stop // self.tree.page_size) - upper.start // self.tree.page_size
            drop = lower.start // self.tree.page_size - upper.start // self.tree.page_size
            upper.host = tuple(line[:keep] for line in lower.host)
            lower.host = tuple(line[drop:] for line in lower.host)
            if keep > drop:
                for line in upper.host:
                    if line[-1] is not None:
                        self.host.share(line[-1])
            self._host_lru[upper] = None
            self.touch(upper)
        if lower.file is not None:
            upper.file, upper.reading, upper.fetched = lower.file, lower.reading, lower.fetched
            self._files[lower.file][1].append(upper)


def _arrays(cells: HostPages) -> list[list[Any]]:
    """Pages in host memory as NumPy arrays."""
    return [[None if p is None else tuple(np.asarray(a) for a in p.resolve()) for p in line] for line in cells]
