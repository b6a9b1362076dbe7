"""KVMemory: who has which pages, in which tier. Everything that the scheduler asks of KV memory goes through here.

    device pages ──evicted──► host memory ──evicted──► files          (write-back; write-through copies at once)
         ▲  page tables            │                     │
         └──────── loaded ─────────┴──── read ahead ─────┘

What the device must do before the next forward pass (copies for copy-on-write, saves to host memory, loads from
it) is appended to `tiers.ops` in the order of the decisions, and must be done in that order: then a page always
holds what the host believes, also when it is evicted, reused and copied within one step.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from specax.paged.disk_tier import DiskTier
from specax.paged.host_tier import HostTier
from specax.paged.namespaces import Namespace
from specax.paged.page_table import PageTable
from specax.paged.pool import TRASH_PAGE, PagePool
from specax.paged.radix_tree import Match, Node, RadixTree
from specax.paged.tiers import CacheCounters, PageOp, Tiers


class WindowLike(Protocol):
    """What paging needs of a sliding window: `start(n)`, the first position that a query at n sees, sinks aside."""

    @property
    def sinks(self) -> int: ...
    def start(self, position: Any) -> Any: ...


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
        self.counters = CacheCounters()
        self.windowed = any(w is not None for w in windows)
        self._tenant_share = tenant_share
        self._start_tree()

    def _start_tree(self, evicted_tokens: int = 0) -> None:
        self.tree = RadixTree(self.pools, self.page_size, self._tenant_share, evicted_tokens)
        for group, pool in enumerate(self.pools):
            pool.reclaim = lambda count, group=group, tree=self.tree: tree.reclaim(group, count)
        self.tiers = Tiers(self.tree, self.host, self.disk, self.counters)

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
        self.tiers.ops += copies
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
            if part.pages is not None:
                continue
            if self.tiers.load(part):
                self.counters.host_hit_tokens += len(part.tokens)
            else:
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
        self.tiers.touch(node)
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
        self,
        table: PageTable,
        tokens: np.ndarray,
        namespace: Namespace,
        tenant: str | None,
        running: bool,
        since: Node | None = None,
    ) -> Node:
        """Puts the KV of `tokens`, int32 [n], which a table's first pages hold, into the cache.

        A table that goes on `running` is given the cache's pages where they hold the same, and `tokens` must end
        with a page, since a shared page can't be written.

        Args:
          since: a node on their path that is locked for the table's sequence, and whose pages it shares.

        Returns:
          The node where they end (the caller locks it, or not).
        """
        tree, size = self.tree, self.page_size
        if since is not None and (since.stop % size or since.parent is None or self.windowed):
            since = None
        match = tree.match(tokens, namespace, since)
        node = tree.node_at(match, match.length) if match.length else tree.root(namespace)
        for part in tree.path(node, since):
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
                self.tiers.write_through(node)
        if running:
            assert len(tokens) % size == 0
            first = since.stop // size if since is not None else 0
            table.replace(first, tree.path_pages(node, len(tokens), since))
        return node

    def forget(self, namespace: Namespace) -> None:
        """Drops what a private namespace holds."""
        for child in self.tree.children(namespace):
            self.tree.remove(child)

    def reset(self, disk: DiskTier | None, keep_files: bool) -> None:
        """Starts over with empty pools and an empty cache, since the weights changed or the device lost it.

        Whatever state the old ones are in, they are dropped as they are: the tables of all sequences must be made
        anew. Files are kept, and found again if `disk` is the same, or deleted.
        """
        if not keep_files:
            self.tiers.remove_files()
        if self.disk is not None and disk is not self.disk:
            self.disk.close()
        self.disk = disk
        if self.host is not None:
            self.host = HostTier(self.host.capacity_bytes, self.host.page_bytes)
        self.pools = tuple(PagePool(pool.num_pages) for pool in self.pools)
        self._start_tree(self.tree.evicted_tokens)

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
            if part.pages is not None:
                lines = part.pages != TRASH_PAGE
            else:
                lines = np.asarray([[page is not None for page in line] for line in part.host or ()])
            for group, have in enumerate(lines):
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

    def mark(self, node: Node, swap: bool) -> None:
        """Decides for a preempted request whether its pages go to host memory, should somebody need them."""
        while node.parent is not None and node.locks == 0 and len(node.children) < 2:  # nobody else's
            node.swap = swap
            node = node.parent

    @property
    def reading(self) -> bool:
        """Whether something is on its way from disk."""
        return self.tiers.reading

    def prefetch(self, match: Match) -> bool:
        """Starts to read what of a match is only on disk; whether some of it is on its way."""
        return self.tiers.prefetch(match)

    def poll(self, wait: bool = False) -> None:
        """Takes in what was read from disk, and what the disk tier evicted. `wait`: for one read at least."""
        self.tiers.poll(wait)

    def take_ops(self) -> list[PageOp]:
        """What the device owes since the last call, in order."""
        return self.tiers.take_ops()
