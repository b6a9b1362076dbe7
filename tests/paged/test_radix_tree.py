"""RadixTree against a naive model: a set of prefixes, a memory that is written and read through pages, and LRU ticks.

What a page holds is named by the whole prefix of the token (its KV depends on no less), so that pages of other
sequences, positions or namespaces are never taken for the right ones.
"""

import copy
import itertools
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specax.paged import Match, Namespace, Node, PagePool, PageTable, RadixTree

type Prefix = tuple[Namespace, tuple[int, ...]]

NAMESPACES: list[Namespace] = [(), (("salt", "a"),), (("adapter", "a"),)]
KINDS = [
    *["insert"] * 6, *["extend"] * 3, *["end"] * 3, *["match"] * 3, "reclaim", "remove", "drop_copies",
    "evict_everything_of_a_copy",
]  # fmt: skip


def some_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Mostly the same, so that prefixes are shared and end anywhere."""
    return tuple([rng.choice([0, 0, 0, 0, 0, 1, 2]) for _ in range(count)])


def a_sequence(rng: random.Random) -> Prefix:
    return rng.choice(NAMESPACES[:1] * 4 + NAMESPACES), some_tokens(rng, rng.randint(1, 14))


def nothing(*nodes: Node) -> None:
    pass


class Holder(NamedTuple):
    """A running sequence: it holds a lock and a table, whose first `length` tokens are computed."""

    node: Node
    table: PageTable
    prefix: Prefix


def prefix_of(tree: RadixTree, node: Node) -> Prefix:
    return node.root.namespace, tuple(int(t) for part in tree.path(node) for t in part.tokens)


class Tree(RuleBasedStateMachine):
    """Sequences that are computed, cached, shared, evicted; each rule leaves nothing for the device to do."""

    @initialize(
        groups=st.integers(1, 2),
        num_pages=st.integers(3, 14),
        size=st.integers(1, 4),
        share=st.sampled_from([1.0, 0.3]),
    )
    def start(self, groups: int, num_pages: int, size: int, share: float) -> None:
        self.pools = tuple(PagePool(num_pages) for _ in range(groups))
        self.size, self.share = size, share
        self.tree = RadixTree(self.pools, size, share)
        self.tree.demote, self.tree.dropped, self.tree.was_split = self.demoted, self.left, self.was_split
        self.connect()
        self.memory: list[dict[int, Prefix]] = [{} for _ in self.pools]
        self.cached: set[Prefix] = set()
        self.holders: list[Holder] = []
        self.used: dict[Node, int] = {}  # when a node was last used, by our own clock
        self.clock = itertools.count(1)
        self.most_nodes = 0
        self.matches: list[tuple[np.ndarray, Namespace, Match]] = []

    # What the tree tells the tiers.

    def demoted(self, node: Node) -> None:
        """Checks the order of eviction by looking at all nodes."""
        victims = [n for n in self.tree.nodes() if n.locks == 0 and not n.children]
        assert node in victims
        held = self.pages_of_tenants()
        over = [t for t, count in held.items() if count > self.share * (self.pools[0].num_pages - 1)]
        if candidates := [n for n in victims if n.tenant in over]:
            assert node.tenant is not None and held[node.tenant] == max(held[n.tenant] for n in candidates if n.tenant)
            victims = [n for n in candidates if n.tenant == node.tenant]
        assert self.used[node] == min(self.used[n] for n in victims)

    def left(self, node: Node) -> None:
        """Called for children before their parents; a node's own path is still known."""
        namespace, tokens = prefix_of(self.tree, node)
        for stop in range(node.start, node.stop):
            self.cached.remove((namespace, tokens[: stop + 1]))
        del self.used[node]

    def was_split(self, upper: Node, lower: Node) -> None:
        self.used[upper] = self.used[lower]

    def pages_of_tenants(self) -> Counter[str]:
        """A page with several owners counts for the topmost."""
        held: Counter[str] = Counter()
        seen: set[int] = set()
        for node in self.tree.nodes():  # parents first
            assert node.pages is not None
            new = {page for page in node.pages[0].tolist() if page} - seen
            seen |= new
            if node.tenant is not None and new:
                held[node.tenant] += len(new)
        return held

    def use(self, node: Node) -> None:
        tick = next(self.clock)
        for part in self.tree.path(node):
            self.used[part] = tick

    # What may happen. One rule for all, since Hypothesis leaves out some of several rules in most runs.

    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 9999))
    def act(self, kind: str, seed: int) -> None:
        getattr(self, kind)(random.Random(seed))

    def insert(self, rng: random.Random) -> None:
        """Computes a sequence on top of what is cached and caches it; perhaps it goes on running."""
        namespace, ids = a_sequence(rng)
        match = self.tree.match(np.asarray(ids, np.int32), namespace)
        node = self.tree.node_at(match, match.length)
        table, tenant = PageTable(self.pools, self.size), rng.choice([None, "a", "b"])
        self.compute(table, node, match.length, (namespace, ids), tenant, rng.random() < 0.3)

    def extend(self, rng: random.Random) -> None:
        """Goes on where a running sequence is, under its old lock."""
        if not self.holders:
            return
        holder = self.holders.pop(rng.randrange(len(self.holders)))
        namespace, ids = holder.prefix
        tokens = (*ids, *some_tokens(rng, rng.randint(1, 4)))
        match = self.tree.match(np.asarray(tokens, np.int32), namespace)
        assert match.length >= len(ids) and holder.node in self.tree.path(match.node)
        holder.table.release()
        node = self.tree.node_at(match, match.length)
        self.compute(holder.table, node, node.stop, (namespace, tokens), None, rng.random() < 0.5)
        self.unlock_at(holder.node)

    def compute(
        self, table: PageTable, node: Node, length: int, prefix: Prefix, tenant: str | None, keep: bool
    ) -> None:
        tree, (namespace, ids) = self.tree, prefix
        tree.lock(node)
        table.adopt(tree.path_pages(node, length))
        if length == len(ids):
            leaf = node
        else:
            wanted = -(-len(ids) // self.size) - length // self.size
            possible = all(p.num_free + e >= wanted for p, e in zip(self.pools, tree.evictable, strict=True))
            copies = table.reserve(length, len(ids))
            assert (copies is not None) == possible
            if copies is None:
                table.release()
                self.unlock_at(node)
                return
            for group, source, target in copies:
                self.copy_page(group, source, target)
            for group, slots in enumerate(table.slots(length, len(ids)).tolist()):
                for position, slot in enumerate(slots, length):
                    self.memory[group][slot] = namespace, ids[: position + 1]
            parent = tree.root(namespace) if node.parent is None else node
            pages = table.pages[:, length // self.size :]
            leaf = tree.add(parent, np.asarray(ids[length:], np.int32), pages, tenant)
            self.used[leaf] = next(self.clock)
            self.cached |= {(namespace, ids[: stop + 1]) for stop in range(length, len(ids))}
        if keep:
            tree.lock(leaf)
            self.holders.append(Holder(leaf, table, prefix))
        else:
            table.release()
        self.unlock_at(node)

    def copy_page(self, group: int, source: int, target: int) -> None:
        memory = self.memory[group]
        for offset in range(self.size):
            memory.pop(target * self.size + offset, None)
            if (held := memory.get(source * self.size + offset)) is not None:
                memory[target * self.size + offset] = held

    def unlock_at(self, node: Node) -> None:
        self.tree.unlock(node)
        self.use(node)

    def end(self, rng: random.Random) -> None:
        if self.holders:
            holder = self.holders.pop(rng.randrange(len(self.holders)))
            holder.table.release()
            self.unlock_at(holder.node)

    def match(self, rng: random.Random) -> None:
        """Compares with brute force, and cuts the path at some token of the match."""
        ns, ids = a_sequence(rng)
        tokens = np.asarray(ids, np.int32)
        match = self.tree.match(tokens, ns)
        longest = max([n for n in range(1, len(ids) + 1) if (ns, ids[:n]) in self.cached], default=0)
        assert match.length == longest
        assert match.node.start < match.length <= match.node.stop or match.length == match.node.stop == 0
        assert self.tree.match(tokens, ns) == match or match.stamp == -1
        if rng.random() < 0.5:
            at = rng.randint(0, match.length)
            node = self.tree.node_at(match, at)
            assert node.stop == at and prefix_of(self.tree, node) == (ns, ids[:at])
        self.matches = [*self.matches[-7:], (tokens, ns, match)]

    def reclaim(self, rng: random.Random) -> None:
        group, count = rng.randrange(len(self.pools)), rng.randint(1, 6)
        pool, nodes = self.pools[group], self.tree.num_nodes
        free, possible = pool.num_free, self.tree.evictable[group] >= count
        self.tree.reclaim(group, count)
        if possible:
            assert pool.num_free >= free + count
        else:
            assert pool.num_free == free and self.tree.num_nodes == nodes

    def remove(self, rng: random.Random) -> None:
        unlocked = [n for n in self.tree.nodes() if n.locks == 0]
        if unlocked:
            node = rng.choice(unlocked)
            gone = list(self.tree.below(node))
            self.tree.remove(node)
            assert all(n.stamp == -1 and n.pages is None for n in gone)

    def drop_copies(self, rng: random.Random) -> None:
        """Afterwards a running sequence, if it is alone, holds one page per column of its path."""
        available = [p.num_free + e for p, e in zip(self.pools, self.tree.evictable, strict=True)]
        changed = self.tree.drop_copies()
        more = [p.num_free + e for p, e in zip(self.pools, self.tree.evictable, strict=True)]
        assert all(b >= a for a, b in zip(available, more, strict=True))
        assert changed or more == available
        assert not self.tree.drop_copies()
        if len(self.holders) == 1:
            node = self.holders[0].node
            for group in range(len(self.pools)):
                held = {page for n in self.tree.path(node) if n.pages is not None for page in n.pages[group].tolist()}
                assert len(held) == -(-node.stop // self.size)

    def evict_everything_of_a_copy(self, rng: random.Random) -> None:
        """`evictable` is what becomes free, leaf by leaf."""
        tree = self.a_copy()
        before, promised = [pool.num_free for pool in tree.pools], list(tree.evictable)
        while leaves := [n for n in tree.nodes() if n.locks == 0 and n.device_children == 0]:
            tree.evict(rng.choice(leaves))
        assert [p.num_free - b for p, b in zip(tree.pools, before, strict=True)] == promised
        assert tree.evictable == [0] * len(self.pools)
        assert all(n.locks for n in tree.nodes())

    def a_copy(self) -> RadixTree:
        """Without the hooks that lead to us."""
        hooks = self.tree.demote, self.tree.dropped, self.tree.was_split
        self.tree.demote = self.tree.dropped = nothing
        self.tree.was_split = nothing
        for pool in self.pools:
            pool.reclaim = None
        tree = copy.deepcopy(self.tree)
        self.tree.demote, self.tree.dropped, self.tree.was_split = hooks
        self.connect()
        return tree

    def connect(self) -> None:
        for group, pool in enumerate(self.pools):
            pool.reclaim = lambda count, group=group: self.tree.reclaim(group, count)

    # Invariants.

    @invariant()
    def counts(self) -> None:
        tree, nodes = self.tree, list(self.tree.nodes())
        self.most_nodes = max(self.most_nodes, len(nodes))
        assert tree.num_nodes == len(nodes)
        assert tree.cached_tokens == sum(len(n.tokens) for n in nodes) == len(self.cached)
        assert dict(self.pages_of_tenants()) == tree._tenant_pages
        locked = Counter(part for holder in self.holders for part in tree.path(holder.node))
        for node in nodes:
            assert node.pages is not None and node.parent is not None
            assert node.start == node.parent.stop and node.parent.children[int(node.tokens[0])] is node
            assert node.device_children == len(node.children)
            assert node.locks == locked[node]
            assert node.stamp >= 0
        for heap in (tree._heap, *tree._tenant_heaps.values()):
            assert len(heap) <= 65 + 4 * self.most_nodes
        for namespace in tree.namespaces():
            assert tree.children(namespace)  # no empty roots

    @invariant()
    def references_equal_owners(self) -> None:
        nodes = list(self.tree.nodes())
        for group, pool in enumerate(self.pools):
            lines = [n.pages[group].tolist() for n in nodes if n.pages is not None]
            lines += [h.table.pages[group].tolist() for h in self.holders]
            owners = Counter(itertools.chain.from_iterable(lines))
            assert all(pool.references(page) == owners[page] for page in range(pool.num_pages))
            assert pool.num_free + len(owners) == pool.num_pages - 1

    @invariant()
    def everyone_reads_its_own_prefix(self) -> None:
        for node in self.tree.nodes():
            self.reads(self.tree.path_pages(node, node.stop), prefix_of(self.tree, node))
        for holder in self.holders:
            self.reads(holder.table.pages, holder.prefix)

    def reads(self, pages: np.ndarray, prefix: Prefix) -> None:
        namespace, ids = prefix
        assert pages.shape == (len(self.pools), -(-len(ids) // self.size))
        for memory, line in zip(self.memory, pages.tolist(), strict=True):
            for at in range(len(ids)):
                assert memory[line[at // self.size] * self.size + at % self.size] == (namespace, ids[: at + 1])

    @invariant()
    def fresh_matches_are_those_of_now(self) -> None:
        for tokens, namespace, match in self.matches:
            now = self.tree.match(tokens, namespace)
            assert not match.fresh or now == match
            if now.length > match.length:
                assert not match.fresh

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for holder in self.holders:
            holder.table.release()
            self.unlock_at(holder.node)
        for pool, evictable in zip(self.pools, self.tree.evictable, strict=True):
            assert pool.num_free + evictable == pool.num_pages - 1
        for group, pool in enumerate(self.pools):
            self.tree.reclaim(group, self.tree.evictable[group])
            assert pool.num_free == pool.num_pages - 1
        assert self.tree.num_nodes == self.tree.cached_tokens == 0 and self.tree.namespaces() == []


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True)
