"""KVMemory: who has which pages, in which tier. Everything that the scheduler asks of KV memory goes through here.

    device pages ──evicted──► host memory ──evicted──► files          (write-back; write-through copies at once)
         ▲  page tables            │                     │
         └──────── loaded ─────────┴──── read ahead ─────┘

What the device must do before the next forward pass (copies for copy-on-write, saves to host memory, loads from
it) is appended to `ops` in the order of the decisions, and must be done in that order: then a page always holds
what the host believes, also when it is evicted, reused and copied within one step.
"""

import dataclasses
import hashlib
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from specax.paged.disk_tier import DiskTier, Key
from specax.paged.host_tier import HostPage, HostPages, HostTier, PageLoad, PageSave
from specax.paged.page_table import PageCopy, PageTable
from specax.paged.pool import TRASH_PAGE, PagePool
from specax.paged.radix_tree import Match, Namespace, Node, RadixTree

type PageOp = PageCopy | PageSave | PageLoad

MAX_READS = 16  # nodes on their way from disk at a time


class WindowLike(Protocol):
    """What paging needs of a sliding window: `start(n)`, the first position that a query at n sees, sinks aside."""

    @property
    def sinks(self) -> int: ...
    def start(self, position: Any) -> Any: ...


@dataclasses.dataclass
class CacheCounters:
    """In tokens, since the start. Queries and hits count once per request, when it is first admitted."""

    query_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0  # part of hit_tokens that came from host memory, or from disk through it
    recovered_tokens: int = 0  # found again by preempted requests
    saved_pages: int = 0
    loaded_pages: int = 0


class Admission(NamedTuple):
    """What a waiting sequence would get: the deepest node it can use, so many tokens, and its need of pages."""

    node: Node
    length: int
    needed: tuple[int, ...]  # new pages per KV group until all known tokens have one
    available: tuple[int, ...]  # free or evictable without taking from what it shares

    @property
    def fits(self) -> bool:
        return all(need <= have for need, have in zip(self.needed, self.available, strict=True))


class KVMemory:
    """Pools, prefix cache and tiers of one engine."""

    def __init__(
        self,
        num_pages: tuple[int, ...],
        page_size: int,
        windows: tuple[WindowLike | None, ...] = (None,),
        max_chunk: int = 1 << 30,
        prefix_cache: bool = True,
        tenant_share: float = 1.0,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        write_through: bool = False,
    ):
        self.page_size, self.windows, self.max_chunk = page_size, windows, max_chunk
        self.prefix_cache, self.host, self.disk, self.write_through = prefix_cache, host, disk, write_through
        self.pools = tuple(PagePool(n) for n in num_pages)
        self.ops: list[PageOp] = []
        self.counters = CacheCounters()
        self.windowed = any(w is not None for w in windows)
        self._tenant_share = tenant_share
        self._start_tree()

    def _start_tree(self) -> None:
        self.tree = RadixTree(self.pools, self.page_size, self._tenant_share)
        self.tree.demote, self.tree.dropped, self.tree.was_split = self._demote, self._dropped, self._was_split
        for group, pool in enumerate(self.pools):
            pool.reclaim = lambda count, group=group, tree=self.tree: tree.reclaim(group, count)
        self._host_lru: OrderedDict[Node, None] = OrderedDict()
        self._files: dict[str, tuple[int, list[Node]]] = {}  # name → first token, nodes whose pages it holds
        self._reads: dict[str, Future[Any]] = {}
        self._unwritten: dict[str, tuple[Key, HostPages]] = {}  # by name: files to write
        if self.disk is not None:
            for entry in self.disk.scan():
                self._found(entry)

    # --- tables

    def new_table(self) -> PageTable:
        return PageTable(self.pools, self.page_size)

    def reserve(self, table: PageTable, start: int, stop: int) -> bool:
        """Makes positions start..stop−1 of a table writable, evicting cached pages if need be."""
        evicted = self.tree.evicted_tokens
        while (copies := table.reserve(start, stop)) is None:
            # Eviction may have freed no page, but left this table the only owner of one that it must write.
            if evicted == self.tree.evicted_tokens:
                return False
            evicted = self.tree.evicted_tokens
        self.ops += copies
        return True

    def squeeze(self) -> bool:
        """For a sequence that is short of pages and can't wait for others: whether to try `reserve` once more."""
        return self.tree.drop_copies()

    def leave_behind(self, table: PageTable, computed: int) -> None:
        """Gives back the pages that no query from position `computed` on sees."""
        for group, window in enumerate(self.windows):
            if window is not None:
                stop = int(window.start(computed)) // self.page_size
                table.give_back(group, -(-window.sinks // self.page_size), min(stop, len(table)))

    def pages_needed(self, group: int, tokens: int) -> int:
        """Pages of a group that a sequence of `tokens` holds at the most, at any one time."""
        whole = -(-tokens // self.page_size)
        window = self.windows[group]
        if window is None:
            return whole
        # The window before the chunk, the chunk itself, and one page at either end.
        seen = tokens - int(window.start(tokens)) + window.sinks + min(self.max_chunk, tokens)
        return min(whole, -(-seen // self.page_size) + 2)

    def pages_shared(self, group: int, tokens: int) -> int:
        """Pages of a group that forks of a sequence of `tokens` share for as long as they grow."""
        return 0 if self.windows[group] is not None else tokens // self.page_size

    def available(self, group: int = 0) -> int:
        """Pages that are free or would be after eviction."""
        return self.pools[group].num_free + self.tree.evictable[group]

    def in_use(self, group: int = 0) -> int:
        """Pages that running sequences hold, or that are locked for them."""
        return self.pools[group].num_used - self.tree.evictable[group]

    def take_ops(self) -> list[PageOp]:
        ops, self.ops = self.ops, []
        return ops

    # --- the prefix cache

    def match(self, tokens: np.ndarray, namespace: Namespace) -> Match:
        """The longest cached prefix, in any tier."""
        return self.tree.match(tokens, namespace)

    def consider(self, match: Match, known: int, limit: int) -> Admission:
        """What admitting a sequence of `known` tokens would take, if at most `limit` of them come from the cache.

        A cached prefix can take more pages than its tokens need: its last page is copied if it isn't full, and
        nodes that meet inside a page may have a copy each. If only that keeps the sequence from fitting (it may
        be alone, and wait for nobody), less of the cache is used.
        """
        best = self._admission(match, known, limit)
        if best.fits or best.length == 0 or not self._admission(match, known, 0).fits:
            return best
        match = Match(best.node, best.length, best.node.stamp)
        fewer = self._admission(match, known, best.length // self.page_size * self.page_size)
        return fewer if fewer.fits else self._admission(match, known, 0)

    def _admission(self, match: Match, known: int, limit: int) -> Admission:
        length = self._usable(match, limit)
        node = self.tree.node_at(match, length)
        on_device = node
        while on_device.parent is not None and on_device.pages is None:
            on_device = on_device.parent
        shared = on_device.stop // self.page_size
        copied = int(on_device is not node and length % self.page_size > 0)  # after it was loaded
        needed, available = [], []
        for group in range(len(self.pools)):
            held = shared
            if self.windows[group] is not None:
                held = int(np.count_nonzero(self.tree.path_pages(on_device, on_device.stop)[group, :shared]))
            needed.append(max(0, self.pages_needed(group, known) - held) + copied)
            available.append(self.available(group) - self.tree.unlocked_pages(on_device, group))
        return Admission(node, length, tuple(needed), tuple(available))

    def admit(self, table: PageTable, admission: Admission) -> tuple[Node, int]:
        """Shares the cached prefix with an empty table, loading from host memory what isn't on the device.

        Returns:
          The node that is locked for the sequence now, and how many tokens need not be computed.
        """
        tree, (node, length, *_) = self.tree, admission
        tree.lock(node)
        for part in tree.path(node):
            part.swap, part.fetched = None, False
            if part.pages is None and not self._load(part):
                above = part.parent
                assert above is not None
                tree.lock(above)
                tree.unlock(node)
                node, length = above, self._usable(Match(above, above.stop, above.stamp), above.stop)
                break
        if length < node.stop:  # (a window asks for less than the node that could be loaded)
            upper = tree.node_at(Match(node, node.stop, node.stamp), length)
            tree.lock(upper)
            tree.unlock(node)
            node = upper
        table.adopt(tree.path_pages(node, length))
        self.leave_behind(table, length)
        self._touch(node)
        return node, length

    def relax(self, node: Node, length: int) -> Node:
        """Locks no more of a sequence's prefix than whole pages, once its copy of the partial one is owed."""
        if length % self.page_size == 0:
            return node
        whole = length // self.page_size * self.page_size
        keep = self.tree.node_at(Match(node, length, node.stamp), whole)
        self.tree.lock(keep)
        self.tree.unlock(node)
        return keep

    def store(
        self, table: PageTable, tokens: np.ndarray, namespace: Namespace, tenant: str | None, running: bool
    ) -> Node:
        """Puts the KV of `tokens`, int32 [n], which a table's first pages hold, into the cache.

        A table that goes on `running` is given the cache's pages where they hold the same, and `tokens` must end
        with a page, since a shared page can't be written.

        Returns:
          The node where they end (the caller locks it, or not).
        """
        tree, size = self.tree, self.page_size
        match = tree.match(tokens, namespace)
        node = tree.node_at(match, match.length) if match.length else tree.root(namespace)
        for part in tree.path(node):
            mine = table.pages[:, part.start // size : -(-part.stop // size)]
            if part.pages is None:
                for pool, line in zip(self.pools, mine, strict=True):
                    pool.share(line[line != TRASH_PAGE])
                tree.settle(part, mine.copy())
                part.fetched = False
        if match.length < len(tokens):
            pages = table.pages[:, match.length // size : -(-len(tokens) // size)]
            node = tree.add(node, tokens[match.length :].copy(), pages, tenant)
            if self.write_through:
                self._write_through(node)
        if running:
            assert len(tokens) % size == 0
            table.replace(0, tree.path_pages(node, len(tokens)))
        return node

    def forget(self, namespace: Namespace) -> None:
        """Drops what a private namespace holds."""
        for child in self.tree.children(namespace):
            self.tree.remove(child)

    def reset(self, disk: DiskTier | None = None) -> None:
        """Empties the cache, since the weights changed or the device lost it; `disk` is for the new weights.

        No sequence may hold a lock or pages. Files of other weights stay for those who still have them.
        """
        for node in list(self.tree.nodes()):
            node.file = None  # it stays on disk
        for namespace in self.tree.namespaces():
            self.forget(namespace)
        self.ops.clear()
        self._unwritten.clear()
        if self.disk is not None and disk is not self.disk:
            self.disk.close()
        self.disk = disk
        self._start_tree()

    def _usable(self, match: Match, limit: int) -> int:
        """How much of a match can be shared: what is on the device or in host memory, and what windows allow."""
        length = min(match.length, limit)
        path = self.tree.path(match.node)
        for part in path:
            if part.pages is None and part.host is None:
                length = min(length, part.start)
                break
        return self._windowed_length(path, length) if self.windowed else length

    def _windowed_length(self, path: list[Node], length: int) -> int:
        """The longest prefix whose last window (and sinks) no window has given back, at most `length`."""
        size = self.page_size
        there = np.zeros((len(self.pools), -(-length // size) + 1), np.bool_)
        for part in path:
            if part.start >= length:
                break
            first = part.start // size
            lines = part.pages if part.pages is not None else part.host
            assert lines is not None
            for group, line in enumerate(lines):
                have = np.asarray([p is not None and (not isinstance(p, int | np.integer) or p != 0) for p in line])
                stop = min(first + len(have), there.shape[1])
                there[group, first:stop] = have[: stop - first]
        for at in [length, *range(length // size * size, 0, -size)]:
            if all(self._sees_all(there[g], w, at) for g, w in enumerate(self.windows) if w is not None):
                return at
        return 0

    def _sees_all(self, there: np.ndarray, window: WindowLike, length: int) -> bool:
        first, size = int(window.start(length)) // self.page_size, self.page_size
        sinks = min(window.sinks, length)
        return bool(there[first : -(-length // size)].all() and there[: -(-sinks // size)].all())

    # --- tiers

    def _demote(self, node: Node) -> None:
        """Called when a node is about to lose its pages."""
        if self.host is not None and node.host is None and node.swap is not False:
            self._save(node)

    def _save(self, node: Node) -> bool:
        """Copies a node's pages to host memory, making room there; False if there is none."""
        assert self.host is not None and node.pages is not None
        cells = tuple([HostPage() if page else None for page in line.tolist()] for line in node.pages)
        if not self._make_room(self.host.size(cells)):
            return False
        self.host.take(cells)
        node.host = cells
        self._host_lru[node] = None
        self._touch(node)
        for group, (line, targets) in enumerate(zip(node.pages.tolist(), cells, strict=True)):
            for page, target in zip(line, targets, strict=True):
                if target is not None:
                    self.ops.append(PageSave(group, page, target))
                    self.counters.saved_pages += 1
        return True

    def _load(self, node: Node) -> bool:
        """Brings a node from host memory to the device; False if pages are short.

        Where it begins inside a page that its parent alone owns, that page is overwritten: it gets the same
        tokens and those that follow.
        """
        if node.host is None:
            return False
        assert node.parent is not None
        above = node.parent.pages if node.start % self.page_size else None
        pages = np.zeros((len(self.pools), len(node.host[0])), np.int32)
        taken: list[list[int]] = []
        for group, (pool, line) in enumerate(zip(self.pools, node.host, strict=True)):
            if above is not None and line[0] is not None and pool.references(above[group, -1]) == 1:
                pages[group, 0] = above[group, -1]
            new = pool.allocate(sum(cell is not None for cell in line) - int(pages[group, 0] != TRASH_PAGE))
            if new is None:
                for other, got in zip(self.pools, taken):
                    other.release(got)
                return False
            taken.append(new)
        for group, (pool, line, new) in enumerate(zip(self.pools, node.host, taken, strict=True)):
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

    def _make_room(self, num_bytes: int) -> bool:
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

    def _write_through(self, node: Node) -> None:
        if self.host is not None and self._save(node) and self.disk is not None:
            self._write(node)

    def _write(self, node: Node) -> None:
        """Writes a node's pages, which are in host memory, to a file in the background."""
        assert self.disk is not None and node.host is not None
        namespace = node.root.namespace
        if any(kind in ("private", "adapter") for kind, _ in namespace):
            return  # these mean nothing to another process
        key = Key(namespace, np.concatenate([part.tokens for part in self.tree.path(node)]), node.start)
        node.file = self.disk.name(key)
        self._files[node.file] = (node.start, [node])
        self._unwritten[node.file] = key, node.host

    def _submit_writes(self) -> None:
        """Hands files to the disk tier, once the device was asked for all of their pages."""
        for name, (key, cells) in list(self._unwritten.items()):
            if all(cell is None or cell.content is not None for line in cells for cell in line):
                assert self.disk is not None
                del self._unwritten[name]
                self.disk.submit_write(key, partial(_arrays, cells))

    def mark(self, node: Node, swap: bool) -> None:
        """Decides for a preempted request whether its pages go to host memory, should somebody need them."""
        while node.parent is not None and node.locks == 0:
            node.swap = swap
            node = node.parent

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
                first = node.start // self.page_size - start // self.page_size
                count = -(-node.stop // self.page_size) - node.start // self.page_size
                parts = [line[first : first + count] for line in content]
                cells = tuple([None if c is None else HostPage(c) for c in part] for part in parts)
                if self._make_room(self.host.size(cells)) and node.stamp >= 0:
                    self.host.take(cells)
                    node.host = cells
                    self._host_lru[node] = None
                    self._touch(node)
        if content is None:
            self._lost(name)

    def _lost(self, name: str) -> None:
        """A file is gone: nodes that were nowhere else go too."""
        for node in list(self._files.pop(name, (0, []))[1]):
            node.file, node.reading = None, False
            if node.stamp >= 0 and node.pages is None and node.host is None:
                self.tree.remove(node)

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
                self._unwritten.pop(node.file, None)
                self.disk.remove(node.file)
            node.file = None

    def _was_split(self, upper: Node, lower: Node) -> None:
        """A page under the cut belongs to both parts; so does a file."""
        if lower.host is not None and self.host is not None:
            keep = -(-upper.stop // self.page_size) - upper.start // self.page_size
            drop = lower.start // self.page_size - upper.start // self.page_size
            upper.host = tuple(line[:keep] for line in lower.host)
            lower.host = tuple(line[drop:] for line in lower.host)
            if keep > drop:
                for line in upper.host:
                    if line[-1] is not None:
                        self.host.share(line[-1])
            self._host_lru[upper] = None
            self._touch(upper)
        if lower.file is not None:
            upper.file, upper.reading, upper.fetched = lower.file, lower.reading, lower.fetched
            self._files[lower.file][1].append(upper)

    def _touch(self, node: Node) -> None:
        """Deepest first, so that ancestors are younger and eviction takes leaves first."""
        while node.parent is not None:
            if node in self._host_lru:
                self._host_lru.move_to_end(node)
            if node.file is not None and self.disk is not None:
                self.disk.touch(node.file)
            node = node.parent

    def _found(self, entry: Any) -> None:
        """A file of an earlier process: its node joins the tree if all of its prefix is there."""
        match = self.tree.match(entry.tokens, entry.namespace)
        if match.length == len(entry.tokens) or match.length < entry.start:
            return  # it is there already, or a part of its prefix is missing
        node = self.tree.node_at(match, match.length) if match.length else self.tree.root(entry.namespace)
        child = self.tree.add(node, entry.tokens[match.length :].copy(), None, None)
        child.file = entry.name
        self._files[entry.name] = (entry.start, [child])

    def save_all(self) -> None:
        """Puts what is on the device or in host memory on disk too, for a later process, parents first.

        The device has to save pages for it (`ops`); `finish_writes` then waits for the disk.
        """
        for node in list(self.tree.nodes()):
            if self.disk is None or self.host is None or node.stamp < 0 or node.file is not None:
                continue
            if node.host is None and node.pages is not None:
                self._save(node)
            if node.host is not None:
                self._write(node)

    def finish_writes(self) -> None:
        """Waits until all files are written."""
        if self.disk is not None:
            unwritten, self._unwritten = self._unwritten, {}
            for key, cells in unwritten.values():
                self.disk.submit_write(key, partial(_arrays, cells))
                self.disk.flush()  # one by one: its queue is bounded


def _arrays(cells: HostPages) -> list[list[Any]]:
    """Pages in host memory as NumPy arrays."""
    return [[None if p is None else tuple(np.asarray(a) for a in p.resolve()) for p in line] for line in cells]


def private_namespace(request_id: str) -> Namespace:
    """KV that nobody else may find: of a request that bypasses the prefix cache."""
    return (("private", request_id),)


def make_namespace(salt: str | None = None, adapter: str | None = None) -> Namespace:
    """The namespace of requests that share a cache salt and an adapter (by load generation, not by name)."""
    pairs: list[tuple[str, str]] = []
    if adapter is not None:
        pairs.append(("adapter", adapter))
    if salt is not None:  # hashed: it may be a secret, and goes to disk
        pairs.append(("salt", hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()))
    return tuple(pairs)
