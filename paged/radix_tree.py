"""RadixTree: which token sequences have their KV in which pages. The structure of the prefix cache.

Every node covers tokens start..stop−1 of the sequences that pass through it. Matching is at token granularity,
so a node may start and end in the middle of a page; it holds every page that it has a token in:

    page size 4      tokens   a b c d │ e f g h │ i j         pages [7 │ 2 │ 9]
    a sequence that leaves it after f:  … e f x y              page 5 holds e f x y

    node [a b c d e f]  pages 7 2  ──┬── node [g h i j]  pages 2 9      (page 2 has two owners)
                                     └── node [x y]      pages 5

A child that starts inside a page brings its own copy of that page, which also holds the parent's tokens: along a
path, a later node's page overrides an earlier one's. Nodes in use are locked, with all their ancestors. Eviction
takes unlocked leaves, least recently used first; tenants that hold more than their share lose theirs first.

A node's KV may also lie in a slower tier (`paged.tiers`): then it stays in the tree without pages. A parent is
never in a slower tier than its child. SGLang's radix cache (Zheng et al. 2024) is the model; sub-page matches,
namespaces by kind and shares are ours.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from specax.paged.host_tier import HostPages
from specax.paged.namespaces import Namespace
from specax.paged.pool import TRASH_PAGE, PagePool


class Node:
    """A run of tokens. `pages`, int32 [groups, n], `host` and `file` say where its KV is; None: not in that tier."""

    __slots__ = (
        "access", "children", "device_children", "exclusive", "fetched", "file", "host", "locks", "pages", "parent",
        "reading", "root", "stamp", "start", "swap", "tenant", "tokens",
    )  # fmt: skip

    root: "Root"

    def __init__(self, root: "Root | None", parent: "Node | None", start: int, tokens: np.ndarray, tenant: str | None):
        if root is not None:
            self.root = root
        self.parent, self.start, self.tokens, self.tenant = parent, start, tokens, tenant
        self.children: dict[int, Node] = {}  # by first token
        self.device_children = 0
        self.pages: np.ndarray | None = None
        self.host: HostPages | None = None
        self.file: str | None = None
        self.reading = False  # its file is on the way to host memory
        self.fetched = False  # it came from there, and nobody has used it since
        self.swap: bool | None = None  # of a preempted request: whether eviction keeps it in host memory
        self.exclusive: tuple[int, ...] = ()  # pages per group that evicting it frees
        self.locks = 0
        self.access = 0
        self.stamp = 0  # changes whenever a match that ends here could have become longer; −1: gone

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Root(Node):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace):
        super().__init__(None, None, 0, np.zeros(0, np.int32), None)
        self.root, self.namespace = self, namespace


class Match(NamedTuple):
    """The longest cached prefix of a token sequence: it ends in `node`, perhaps before the node does."""

    node: Node
    length: int  # tokens, in whatever tier
    stamp: int  # of the node, when it was matched

    @property
    def fresh(self) -> bool:
        """Whether matching again would give the same."""
        return self.node.stamp == self.stamp


EVICT_PAGES = 32  # of a long node, its last so many pages go at a time

type Entry = tuple[int, int, Node]  # (access, tie-break, node) in a heap; stale once the node was used again


class RadixTree:
    """The tree over all namespaces, and the order of eviction from the device."""

    def __init__(
        self, pools: tuple[PagePool, ...], page_size: int, tenant_share: float = 1.0, evicted_tokens: int = 0
    ):
        self.pools, self.page_size = pools, page_size
        self.tenant_share = tenant_share
        self.evictable = [0] * len(pools)  # pages per group that evicting all unlocked nodes would free
        self.cached_tokens = 0  # tokens of nodes on the device
        self.num_nodes = 0
        # What the slower tiers do: before a node's pages are released; when it leaves the tree; after a split.
        self.demote: Callable[[Node], None] = lambda node: None
        self.dropped: Callable[[Node], None] = lambda node: None
        self.was_split: Callable[[Node, Node], None] = lambda upper, lower: None
        self.evicted_tokens = evicted_tokens  # since the start, of earlier trees too
        self._roots: dict[Namespace, Root] = {}
        self._ticks = itertools.count(1)
        self._heap: list[Entry] = []  # evictable leaves
        self._tenant_heaps: dict[str, list[Entry]] = {}
        self._tenant_pages: dict[str, int] = {}
        self._over_share: set[str] = set()

    # --- matching

    def match(self, tokens: np.ndarray, namespace: Namespace, since: Node | None = None) -> Match:
        """The longest prefix of `tokens`, int32 [n], that the tree knows. Changes nothing.

        `since`: a node that is known to lie on its path.
        """
        node = since or self._roots.get(namespace)
        if node is None:
            return Match(Root(namespace), 0, -1)
        at, end = node.stop, len(tokens)
        while at < end and (child := node.children.get(int(tokens[at]))) is not None:
            node = child
            same = common_prefix(node.tokens, tokens[at:])
            at += same
            if same < len(node.tokens):
                break
        return Match(node, at, node.stamp)

    def root(self, namespace: Namespace) -> Root:
        """The root of a namespace, made if need be."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
            root.stamp = next(self._ticks)
        return root

    def namespaces(self) -> list[Namespace]:
        return list(self._roots)

    def children(self, namespace: Namespace) -> list[Node]:
        """The top nodes of a namespace."""
        root = self._roots.get(namespace)
        return [] if root is None else list(root.children.values())

    def path(self, node: Node, since: Node | None = None) -> list[Node]:
        """From the node below the root, or below `since`, down to `node`."""
        nodes = []
        while node.parent is not None and node is not since:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_pages(self, node: Node, length: int, since: Node | None = None) -> np.ndarray:
        """Pages of the first `length` tokens of the path to `node`, int32 [groups, n]; 0 where there are none.

        `since`: only those after that node, which must end with a page.
        """
        begin = since.stop // self.page_size if since is not None else 0
        out = np.zeros((len(self.pools), -(-node.stop // self.page_size) - begin), np.int32)
        for part in self.path(node, since):
            if part.pages is None:
                break
            first = part.start // self.page_size - begin
            out[:, first : first + part.pages.shape[1]] = part.pages
        return out[:, : -(-length // self.page_size) - begin]

    # --- growing

    def split(self, node: Node, at: int) -> Node:
        """Cuts a node before token `at`; returns the new upper part. A page under the cut gets two owners."""
        cut = at - node.start
        assert node.parent is not None and 0 < cut < len(node.tokens)
        upper = Node(node.root, node.parent, node.start, node.tokens[:cut], node.tenant)
        upper.locks, upper.access = node.locks, node.access
        upper.swap, upper.device_children = node.swap, int(node.pages is not None)
        upper.children = {int(node.tokens[cut]): node}
        node.parent.children[int(node.tokens[0])] = upper
        node.parent, node.tokens, node.start = upper, node.tokens[cut:], at
        keep = -(-at // self.page_size) - upper.start // self.page_size
        drop = at // self.page_size - upper.start // self.page_size
        if node.pages is not None:
            upper.pages, node.pages = node.pages[:, :keep].copy(), node.pages[:, drop:].copy()
            if keep > drop:
                for group, pool in enumerate(self.pools):
                    if page := int(upper.pages[group, -1]):
                        pool.share([page])
            upper.exclusive, node.exclusive = self._exclusive(upper), self._exclusive(node)
        self.num_nodes += 1
        upper.stamp = node.stamp = next(self._ticks)
        self.was_split(upper, node)
        return upper

    def node_at(self, match: Match, length: int) -> Node:
        """The node that ends exactly at `length` ≤ match.length, made by a split if need be."""
        node = match.node
        while node.start >= length and node.parent is not None:
            node = node.parent
        return self.split(node, length) if node.stop > length else node

    def add(self, parent: Node, tokens: np.ndarray, pages: np.ndarray | None, tenant: str | None) -> Node:
        """Appends a child, which becomes a further owner of `pages`, int32 [groups, n]."""
        node = Node(parent.root, parent, parent.stop, tokens, tenant)
        parent.children[int(tokens[0])] = node
        parent.stamp = next(self._ticks)
        node.stamp = node.access = next(self._ticks)
        self.num_nodes += 1
        if pages is not None:
            for pool, line in zip(self.pools, pages, strict=True):
                pool.share(line[line != TRASH_PAGE])
            self.settle(node, pages.copy())
        return node

    def settle(self, node: Node, pages: np.ndarray) -> None:
        """Gives a node without pages its pages, int32 [groups, n], whose references it takes over."""
        assert node.pages is None and node.parent is not None
        node.pages = pages
        node.parent.device_children += 1
        self.cached_tokens += len(node.tokens)
        node.exclusive = self._exclusive(node)
        self._count(node, +1)
        parent = node.parent
        if node.start % self.page_size and parent.pages is not None:
            last = parent.pages[:, -1].tolist()
            if not any(page and self._owned_elsewhere(parent, group, page) for group, page in enumerate(last)):
                self._use_page_of(parent, node)
        self._note_evictable(node)

    def _use_page_of(self, parent: Node, child: Node) -> bool:
        """The first page of a child holds all that its parent's last one does: one copy is enough for both."""
        assert parent.pages is not None and child.pages is not None
        mine, theirs = parent.pages[:, -1].copy(), child.pages[:, 0]
        groups = np.flatnonzero((mine != theirs) & (mine != TRASH_PAGE) & (theirs != TRASH_PAGE)).tolist()
        if not groups:
            return False
        nodes = [parent, *[c for c in parent.children.values() if c.pages is not None]]
        for node in nodes:
            self._count(node, -1)
        for group in groups:
            self.pools[group].share([theirs[group]])
            self.pools[group].release([mine[group]])
            parent.pages[group, -1] = theirs[group]
        for node in nodes:
            node.exclusive = self._exclusive(node)
            self._count(node, +1)
        return True

    def drop_copies(self) -> bool:
        """A last resort: locked nodes give up copies of pages of which what is locked below them has its own.

        Then a sequence that holds all locks holds no more than one page per `page_size` tokens, the others are
        free or evictable. Looks at every node. Returns whether that changed anything.
        """
        changed = False
        for node in reversed(list(self.nodes())):  # children before parents
            if node.locks and node.pages is not None and node.stop % self.page_size:
                below = next((c for c in node.children.values() if c.locks and c.pages is not None), None)
                changed |= below is not None and self._use_page_of(node, below)
        return changed

    def _owned_elsewhere(self, node: Node, group: int, page: int) -> bool:
        """Whether a child, or the node above, holds the node's last page too."""
        above = node.parent.pages if node.parent is not None else None
        if above is not None and above.shape[1] and page == int(above[group, -1]):
            return True
        return any(c.pages is not None and page == int(c.pages[group, 0]) for c in node.children.values())

    # --- locks and eviction

    def lock(self, node: Node) -> None:
        """Keeps a node and its ancestors on the device."""
        while node.parent is not None:
            if node.locks == 0:
                for group, count in enumerate(node.exclusive):
                    self.evictable[group] -= count
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        tick = next(self._ticks)
        while node.parent is not None:
            node.locks -= 1
            node.access = tick
            if node.locks == 0:
                for group, count in enumerate(node.exclusive):
                    self.evictable[group] += count
                self._note_evictable(node)
            node = node.parent

    def unlocked_pages(self, node: Node, group: int) -> int:
        """Evictable pages on the path to a node: what locking it would take from `evictable`."""
        count = 0
        while node.parent is not None and node.locks == 0:
            count += node.exclusive[group] if node.exclusive else 0
            node = node.parent
        return count

    def reclaim(self, group: int, count: int) -> None:
        """Evicts until `count` more pages of a group are free; nothing, if that can't be reached."""
        if self.evictable[group] < count:
            return
        pool = self.pools[group]
        target = pool.num_free + count
        while (short := target - pool.num_free) > 0 and (victim := self._next_victim()) is not None:
            assert victim.pages is not None
            whole, tail = victim.pages.shape[1], max(short, EVICT_PAGES)
            if whole > 2 * tail:  # its beginning is still of use
                self.split(victim, (victim.start // self.page_size + whole - tail) * self.page_size)
            self.evict(victim)

    def evict(self, node: Node) -> None:
        """Takes an unlocked node without children on the device from the device."""
        assert node.pages is not None and node.locks == 0 and node.device_children == 0 and node.parent is not None
        self.demote(node)
        self.evicted_tokens += len(node.tokens)
        self.unsettle(node)
        if node.host is None and node.file is None:
            self.remove(node)

    def unsettle(self, node: Node) -> None:
        """Releases a node's pages."""
        assert node.pages is not None and node.parent is not None
        self._count(node, -1)
        self.cached_tokens -= len(node.tokens)
        for pool, line in zip(self.pools, node.pages, strict=True):
            pool.release(line[line != TRASH_PAGE])
        node.pages, node.exclusive = None, ()
        node.parent.device_children -= 1
        self._note_evictable(node.parent)

    def remove(self, node: Node) -> None:
        """Cuts a node with all below it out of the tree."""
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]
        node.parent.stamp = next(self._ticks)
        gone = list(self.below(node))
        for part in reversed(gone):  # children before parents
            if part.pages is not None:
                self.unsettle(part)
            part.stamp = -1
            self.dropped(part)
        self.num_nodes -= len(gone)
        root = node.root
        if not root.children and self._roots.get(root.namespace) is root:
            del self._roots[root.namespace]
            root.stamp = -1

    def below(self, node: Node) -> Iterator[Node]:
        """A node and all below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        for root in list(self._roots.values()):
            for node in self.below(root):
                if node is not root:
                    yield node

    def _exclusive(self, node: Node) -> tuple[int, ...]:
        """Pages that evicting the node, after all below it, frees: all but one that it shares with its parent."""
        assert node.pages is not None
        above = node.parent.pages if node.parent is not None else None
        counts = []
        for group, line in enumerate(node.pages):
            count = int(np.count_nonzero(line))
            inside = node.start % self.page_size and above is not None and above.shape[1]
            if inside and line[0] != TRASH_PAGE and line[0] == above[group, -1]:  # type: ignore[index]
                count -= 1
            counts.append(count)
        return tuple(counts)

    def _count(self, node: Node, sign: int) -> None:
        if node.locks == 0:
            for group, count in enumerate(node.exclusive):
                self.evictable[group] += sign * count
        if (tenant := node.tenant) is not None:
            held = self._tenant_pages.get(tenant, 0) + sign * node.exclusive[0]
            self._tenant_pages[tenant] = held
            if held > self.tenant_share * (self.pools[0].num_pages - 1):
                self._over_share.add(tenant)
            else:
                self._over_share.discard(tenant)
                if held == 0:
                    del self._tenant_pages[tenant]
                    self._tenant_heaps.pop(tenant, None)

    def _note_evictable(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf on the device."""
        if not _is_victim(node):
            return
        entry = (node.access, next(self._ticks), node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * self.num_nodes:  # mostly stale entries
            _compact(self._heap)
        if node.tenant is not None and self.tenant_share < 1:
            heap = self._tenant_heaps.setdefault(node.tenant, [])
            heapq.heappush(heap, entry)
            if len(heap) > 64 + 4 * self.num_nodes:
                _compact(heap)

    def _next_victim(self) -> Node | None:
        if self._over_share:
            for tenant in sorted(self._over_share, key=lambda t: -self._tenant_pages[t]):
                if (node := self._pop(self._tenant_heaps.get(tenant, []))) is not None:
                    return node
        return self._pop(self._heap)

    def _pop(self, heap: list[Entry]) -> Node | None:
        while heap:
            entry = heapq.heappop(heap)
            if _is_live(entry):
                return entry[2]
        return None


def _compact(heap: list[Entry]) -> None:
    """Drops stale and double entries."""
    heap[:] = {id(entry[2]): entry for entry in heap if _is_live(entry)}.values()
    heapq.heapify(heap)


def _is_live(entry: Entry) -> bool:
    return entry[0] == entry[2].access and _is_victim(entry[2])


def _is_victim(node: Node) -> bool:
    return node.pages is not None and node.locks == 0 and node.device_children == 0 and node.parent is not None


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading entries of two arrays are the same."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n
