"""KVMemory against a device that is played: pages are arrays of names, and ops are applied in their order.

The KV of a token is named by its weights, namespace and whole prefix; pages that nobody owns are overwritten
after every step. So a page that is read too late, too early, or for another sequence has the wrong names in it.
"""

import dataclasses
import pathlib
import random
import shutil
import tempfile
from collections import Counter
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from specax.paged import KVMemory, Match, Namespace, Node, PageOp, PageTable
from specax.paged.disk_tier import DiskTier
from specax.paged.host_tier import HostTier, PageLoad, PageSave
from specax.paged.memory import Admission
from specax.paged.namespaces import make_namespace
from specax.paged.page_file import SUFFIX
from specax.pallas_kernels import Window

NAMESPACES = [(), make_namespace(salt="s"), make_namespace(adapter="a#1")]
KINDS = [
    *["admit"] * 5, *["step"] * 5, *["extend"] * 3, *["leave"] * 4, *["press"] * 2, "fork", "hold_a_match",
    "use_a_stale_match", "grow_alone", "check", "poll", "reset", "restart", "lose_a_file", "prefetch", "prefetch",
]  # fmt: skip
PAGE_BYTES = (10, 7)
WRONG = -1.0


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Mostly the same, so that prefixes are shared and end anywhere."""
    return [int(rng.random() < 0.12) for _ in range(count)]


def a_sequence(rng: random.Random) -> tuple[Namespace, list[int]]:
    return rng.choice(NAMESPACES[:1] * 6 + NAMESPACES), some_tokens(rng, rng.randint(1, 16))


@dataclasses.dataclass(eq=False)
class Running:
    """A sequence: `computed` of its tokens have KV, those before `planned` have slots."""

    namespace: Namespace
    tokens: list[int]
    table: PageTable
    computed: int
    planned: int
    node: Node | None
    tenant: str | None = None


class Device:
    """The cache arrays, float32 [pages, page_size] per group, and the names of KV."""

    def __init__(self, memory: KVMemory, weights: int = 0):
        self.memory, self.weights = memory, weights
        self.names: dict[Any, float] = {}
        self.renew(memory)

    def renew(self, memory: KVMemory) -> None:
        self.memory = memory
        self.pages = [np.full((p.num_pages, memory.page_size), WRONG, np.float32) for p in memory.pools]

    def name(self, namespace: Namespace, tokens: tuple[int, ...]) -> float:
        return self.names.setdefault((self.weights, namespace, tokens), float(len(self.names) + 1))

    def expected(self, namespace: Namespace, tokens: list[int]) -> list[float]:
        return [self.name(namespace, tuple(tokens[: i + 1])) for i in range(len(tokens))]

    def run(self, ops: list[PageOp]) -> None:
        for op in ops:
            pages = self.pages[op.group]
            if isinstance(op, PageSave):
                copied = (pages[op.page].copy(),)
                op.target.content = (lambda c=copied: c) if op.page % 2 else copied
            elif isinstance(op, PageLoad):
                pages[op.page] = op.source.resolve()[0]
            else:
                pages[op.target] = pages[op.source]
        for pages, pool in zip(self.pages, self.memory.pools, strict=True):
            pages[[p for p in range(pool.num_pages) if pool.references(p) == 0]] = WRONG

    def forward(self, sequence: Running) -> None:
        """Writes the KV of the planned tokens."""
        names = self.expected(sequence.namespace, sequence.tokens[: sequence.planned])
        for pages, slots in zip(self.pages, sequence.table.slots(sequence.computed, sequence.planned), strict=True):
            assert (slots >= self.memory.page_size).all()  # not the trash page
            pages.reshape(-1)[slots] = names[sequence.computed :]
        sequence.computed = sequence.planned


def admit(memory: KVMemory, namespace: Namespace, tokens: list[int], chunk: int = 1 << 30) -> Running | None:
    """As the scheduler does it; None if pages are short."""
    table, known = memory.new_table(), np.asarray(tokens, np.int32)
    admission = memory.consider(memory.match(known, namespace), len(tokens), len(tokens) - 1)
    node, cached = memory.admit(table, admission)
    assert cached <= admission.length and node.stop == cached
    stop = min(len(tokens), cached + chunk)
    if not memory.reserve(table, cached, stop):
        memory.tree.unlock(node)
        table.release()
        return None
    if memory.windowed:
        memory.tree.unlock(node)
    return Running(namespace, tokens, table, cached, stop, None if memory.windowed else node)


def leave(memory: KVMemory, sequence: Running, keep: bool = True, swap: bool | None = None) -> None:
    """As the scheduler ends or preempts a sequence."""
    if keep and sequence.computed:
        tokens = np.asarray(sequence.tokens[: sequence.computed], np.int32)
        node = memory.store(sequence.table, tokens, sequence.namespace, sequence.tenant, running=False)
        if swap is not None:
            memory.mark(node, swap)
    if sequence.node is not None:
        memory.tree.unlock(sequence.node)
    sequence.table.release()


def share(memory: KVMemory, sequence: Running) -> None:
    """As the scheduler shares the full pages of a running sequence."""
    count = sequence.computed // memory.page_size * memory.page_size
    if not count or (sequence.node is not None and sequence.node.stop >= count):
        return
    tokens = np.asarray(sequence.tokens[:count], np.int32)
    node = memory.store(sequence.table, tokens, sequence.namespace, sequence.tenant, running=True)
    memory.tree.lock(node)
    if sequence.node is not None:
        memory.tree.unlock(sequence.node)
    sequence.node = node


def tokens_of(memory: KVMemory, node: Node) -> list[int]:
    return [int(t) for part in memory.tree.path(node) for t in part.tokens]


class Memory(RuleBasedStateMachine):
    """Everything that a scheduler may do, in any order; the device works off what it owes in `step`."""

    groups: tuple[str, ...] = ("whole",)
    disk_tier = False

    @initialize(
        size=st.integers(1, 4),
        num_pages=st.integers(5, 16),
        window=st.builds(Window, st.integers(1, 6), st.integers(0, 3), st.sampled_from([1, 4])),
        host=st.sampled_from([0, 30, 60, 100, 1000]),
        through=st.booleans(),
        tenant_share=st.sampled_from([1.0, 0.3]),
        disk=st.sampled_from([2500, 1 << 20]),
        queue=st.sampled_from([2, 256]),
    )
    def start(
        self,
        size: int,
        num_pages: int,
        window: Window,
        host: int,
        through: bool,
        tenant_share: float,
        disk: int,
        queue: int,
    ) -> None:
        windows = tuple([window if group == "window" else None for group in self.groups])
        self.folder = pathlib.Path(tempfile.mkdtemp()) if self.disk_tier else None
        self.size, self.weights, self.disk_limits = size, 0, (disk, queue)
        if self.disk_tier:
            host = host or 80

        def make() -> KVMemory:
            tier = HostTier(host, PAGE_BYTES[: len(windows)]) if host else None
            pages = (num_pages,) * len(windows)
            return KVMemory(pages, size, windows, 4, True, tenant_share, tier, self.open_disk(), through)

        self.make = make
        self.memory = make()
        self.device = Device(self.memory)
        self.running: list[Running] = []
        self.held: list[tuple[Match, Admission]] = []
        self.lost_files = disk < 1 << 20 or queue < 256

    def open_disk(self) -> DiskTier | None:
        if self.folder is None:
            return None
        capacity, queue = self.disk_limits
        return DiskTier(self.folder, f"weights {self.weights}", capacity, self.size, queue)

    # What may happen. One rule for all, since Hypothesis leaves out some of several rules in most runs.

    @rule(kind=st.sampled_from(KINDS), seed=st.integers(0, 9999))
    def act(self, kind: str, seed: int) -> None:
        if kind in ("restart", "lose_a_file", "prefetch") and not self.disk_tier:
            kind = "admit"
        getattr(self, kind)(random.Random(seed))

    def admit(self, rng: random.Random) -> None:
        memory, (ns, ids) = self.memory, a_sequence(rng)
        if len(self.running) > 3:
            return self.leave(rng)
        known = np.asarray(ids, np.int32)
        tries = 0
        while memory.prefetch(memory.match(known, ns)):
            memory.poll(wait=True)
            tries += 1
            assert tries < 40, "it reads again and again"
        exact, alone = self.tables_hold_only_what_is_locked(), not self.running
        admission = memory.consider(memory.match(known, ns), len(ids), len(ids) - 1)
        fits = admission.fits
        sequence = admit(memory, ns, ids, rng.choice([2, 4, 4 if memory.windowed else 100]))
        if sequence is not None:
            sequence.tenant = rng.choice(["a", "b"])
            self.running.append(sequence)
        elif exact and not memory.windowed:
            assert not fits, "pages that were promised are not there"
        if sequence is None and alone:
            assert -(-len(ids) // self.size) > min(p.num_pages for p in memory.pools) - 1, "alone, and does not fit"

    def tables_hold_only_what_is_locked(self) -> bool:
        """Otherwise `evictable` counts pages that eviction would not free."""
        for group in range(len(self.memory.pools)):
            held = {p for s in self.running for p in s.table.pages[group].tolist() if p}
            for node in self.memory.tree.nodes():
                if node.pages is not None and not node.locks and held & set(node.pages[group].tolist()):
                    return False
        return True

    def extend(self, rng: random.Random) -> None:
        """A sequence that has caught up decodes further tokens; another goes on with its prompt."""
        for sequence in self.running:
            if sequence.planned > sequence.computed or len(sequence.tokens) > 30:
                continue
            if sequence.computed == len(sequence.tokens):
                sequence.tokens = [*sequence.tokens, *some_tokens(rng, rng.randint(1, 3))]
            stop = min(len(sequence.tokens), sequence.computed + 4)
            if self.memory.reserve(sequence.table, sequence.computed, stop):
                sequence.planned = stop
            elif len(self.running) == 1 and -(-stop // self.size) < min(p.num_pages for p in self.memory.pools):
                # Alone, it must get its pages: others' copies of its pages are given up, or were just evicted.
                self.memory.squeeze()
                assert self.memory.reserve(sequence.table, sequence.computed, stop)
                sequence.planned = stop

    def grow_alone(self, rng: random.Random) -> None:
        """One sequence takes the whole pool, page by page."""
        while len(self.running) > 1:
            self.leave(rng)
        most = min(p.num_pages for p in self.memory.pools) - 1
        while self.running and len(self.running[0].tokens) <= min(30, most * self.size - 3):
            self.step(rng)
            self.extend(rng)

    def fork(self, rng: random.Random) -> None:
        parents = [s for s in self.running if s.planned == s.computed]
        if not parents or len(self.running) > 3:
            return
        parent = rng.choice(parents)
        if parent.node is not None:
            self.memory.tree.lock(parent.node)
        self.running.append(dataclasses.replace(parent, tokens=list(parent.tokens), table=parent.table.fork()))

    def leave(self, rng: random.Random) -> None:
        """Finish, abort or preempt, also with work that was planned and is not done."""
        if self.running:
            sequence = self.running.pop(rng.randrange(len(self.running)))
            leave(self.memory, sequence, rng.random() < 0.9, rng.choice([None, None, True, False]))

    def press(self, rng: random.Random) -> None:
        """Somebody needs pages for a moment."""
        pool = rng.choice(self.memory.pools)
        if (pages := pool.allocate(rng.randint(1, max(1, self.memory.available())))) is not None:
            pool.release(pages)

    def hold_a_match(self, rng: random.Random) -> None:
        """A sequence waits with a match, and asks what it would take."""
        ns, ids = a_sequence(rng)
        match = self.memory.match(np.asarray(ids, np.int32), ns)
        self.held = [*self.held[-3:], (match, self.memory.consider(match, len(ids), rng.randint(0, len(ids))))]

    def use_a_stale_match(self, rng: random.Random) -> None:
        if not self.held:
            return
        match, admission = self.held.pop(rng.randrange(len(self.held)))
        if rng.random() < 0.5:
            admission = self.memory.consider(match, match.length + 1, match.length)
        tokens = tokens_of(self.memory, admission.node)[: admission.length]
        namespace = admission.node.root.namespace
        table = self.memory.new_table()
        node, cached = self.memory.admit(table, admission)
        assert cached == node.stop <= len(tokens)
        if self.memory.windowed:
            self.memory.tree.unlock(node)
        kept = None if self.memory.windowed else node
        self.running.append(Running(namespace, tokens[:cached], table, cached, cached, kept))

    def step(self, rng: random.Random) -> None:
        """What is owed, then the forward pass; then everything is compared."""
        memory = self.memory
        self.device.run(memory.take_ops())
        for sequence in self.running:
            self.device.forward(sequence)
        self.everybody_reads_the_right_kv()
        for sequence in self.running:
            if memory.windowed:
                memory.leave_behind(sequence.table, sequence.computed)
            else:
                share(memory, sequence)

    def check(self, rng: random.Random) -> None:
        """A step without a forward pass: what is planned stays so."""
        self.device.run(self.memory.take_ops())
        self.everybody_reads_the_right_kv()

    def poll(self, rng: random.Random) -> None:
        self.memory.poll()

    def reset(self, rng: random.Random) -> None:
        """The device lost its cache, or the weights changed."""
        if rng.random() < 0.7:
            return
        self.end_all()
        if self.memory.disk is not None:
            self.device.run(self.memory.take_ops())
            self.memory.tiers.finish_writes()
        other, old = rng.random() < 0.5, self.memory.disk
        self.weights += other
        self.memory.reset(self.open_disk() if other else old, keep_files=rng.random() < 0.5)
        self.device.weights = self.weights
        self.device.renew(self.memory)
        assert self.memory.tree.cached_tokens == 0 and (old is not None or self.memory.tree.num_nodes == 0)

    def restart(self, rng: random.Random) -> None:
        """Another process finds what this one saved."""
        self.end_all()
        self.device.run(self.memory.take_ops())
        for _ in self.memory.tiers.save_all():
            self.device.run(self.memory.take_ops())
            self.memory.tiers.finish_writes()
        self.memory.poll()
        assert self.memory.disk is not None
        nodes = list(self.memory.tree.nodes())
        saved = [(n.root.namespace, tokens_of(self.memory, n)) for n in nodes if self.is_on_disk(n)]
        self.memory.disk.close()
        self.memory = self.make()
        self.device.renew(self.memory)
        for namespace, tokens in saved:
            assert self.memory.match(np.asarray(tokens, np.int32), namespace).length == len(tokens)

    def is_on_disk(self, node: Node) -> bool:
        assert self.folder is not None
        path = self.memory.tree.path(node)
        return all(part.file is not None and (self.folder / part.file).exists() for part in path)

    def lose_a_file(self, rng: random.Random) -> None:
        """Perhaps while it is read."""
        assert self.folder is not None
        self.lost_files = True
        if files := sorted(self.folder.glob("*" + SUFFIX)):
            rng.choice(files).unlink(missing_ok=True)

    def prefetch(self, rng: random.Random) -> None:
        """Starts to read, and leaves it in flight."""
        ns, ids = a_sequence(rng)
        self.memory.prefetch(self.memory.match(np.asarray(ids, np.int32), ns))

    def end_all(self) -> None:
        for sequence in self.running:
            leave(self.memory, sequence)
        self.running.clear()
        self.held.clear()

    # What must hold.

    def everybody_reads_the_right_kv(self) -> None:
        memory, device = self.memory, self.device
        assert not memory.tiers.ops
        for s in self.running:
            names = device.expected(s.namespace, s.tokens[: s.computed])
            for group, window in enumerate(memory.windows):
                slots = s.table.slots(0, s.computed)[group]
                first, sinks = (0, 0) if window is None else (int(window.start(s.computed)), window.sinks)
                seen = [i for i in range(s.computed) if i >= first or i < sinks]
                assert device.pages[group].reshape(-1)[slots[seen]].tolist() == [names[i] for i in seen]
        for node in memory.tree.nodes():
            names = device.expected(node.root.namespace, tokens_of(memory, node))
            for group in range(len(memory.pools)):
                if node.pages is not None:
                    line = [device.pages[group][p] if p else None for p in node.pages[group].tolist()]
                    self.holds(line, names, node.start)
                if node.host is not None:
                    cells = node.host[group]
                    assert all(c is None or c.content is not None for c in cells)
                    self.holds([None if c is None else c.resolve()[0] for c in cells], names, node.start)

    def holds(self, pages: list[np.ndarray | None], names: list[float], start: int) -> None:
        """Pages from that of token `start` on hold these names, also of the tokens before it in its page."""
        size = self.memory.page_size
        assert len(pages) == -(-len(names) // size) - start // size
        for column, page in enumerate(pages, start // size):
            want = names[column * size : (column + 1) * size]
            assert page is None or page.tolist()[: len(want)] == want

    @invariant()
    def references_equal_owners(self) -> None:
        tree = self.memory.tree
        for group, pool in enumerate(self.memory.pools):
            nodes = [n for n in tree.nodes() if n.pages is not None]
            lines = [n.pages[group].tolist() for n in nodes if n.pages is not None]
            lines += [s.table.pages[group].tolist() for s in self.running]
            owners = Counter(page for line in lines for page in line if page)
            assert all(pool.references(page) == owners[page] for page in range(pool.num_pages))
            assert pool.num_free + len(owners) == pool.num_pages - 1
            pages = {lock: set[int]() for lock in (False, True)}
            for node in nodes:
                assert node.pages is not None
                pages[node.locks > 0].update(p for p in node.pages[group].tolist() if p)
            assert tree.evictable[group] == len(pages[False] - pages[True])

    @invariant()
    def tiers_agree_with_their_books(self) -> None:
        memory, tree = self.memory, self.memory.tree
        nodes = list(tree.nodes())
        locked = Counter(p for s in self.running if s.node is not None for p in tree.path(s.node))
        assert tree.num_nodes == len(nodes)
        assert tree.cached_tokens == sum(len(n.tokens) for n in nodes if n.pages is not None)
        cells: Counter[Any] = Counter()
        sizes: dict[Any, int] = {}
        for node in nodes:
            assert node.pages is not None or node.host is not None or node.file is not None
            assert node.locks == locked[node] and (not node.locks or node.pages is not None)
            assert node.parent is not None and node.stamp >= 0
            assert node.parent.device_children >= (node.pages is not None)
            if node.pages is not None and node.parent.parent is not None:
                assert node.parent.pages is not None
            for group, line in enumerate(node.host or ()):
                cells.update(c for c in line if c is not None)
                sizes.update({c: PAGE_BYTES[group] for c in line if c is not None})
        assert all(cell.owners == count for cell, count in cells.items())
        in_host = [n for n in nodes if n.host is not None]
        if memory.host is not None:
            assert memory.host.used_bytes == sum(sizes.values()) <= memory.host.capacity_bytes
        assert sorted(map(id, memory.tiers._host_lru)) == sorted(map(id, in_host))
        place = {node: i for i, node in enumerate(memory.tiers._host_lru)}
        for node in in_host:
            if node.parent in place and node.pages is None:
                assert place[node.parent] > place[node]  # leaves go first
        if memory.disk is not None:
            assert memory.disk.errors == 0 or self.lost_files
        listed = {(name, n) for name, (_, of) in memory.tiers._files.items() for n in of}
        assert listed == {(n.file, n) for n in nodes if n.file is not None}
        assert all(n.file in memory.tiers._reads for n in nodes if n.reading)
        for namespace in tree.namespaces():
            assert tree.children(namespace)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        self.end_all()
        for pool, evictable in zip(self.memory.pools, self.memory.tree.evictable, strict=True):
            assert pool.num_free + evictable == pool.num_pages - 1
        if self.memory.disk is not None:
            self.memory.disk.close()
            assert self.folder is not None
            shutil.rmtree(self.folder)


class WindowedMemory(Memory):
    groups = ("whole", "window")


class OnlyWindowedMemory(Memory):
    groups = ("window",)


class DiskMemory(Memory):
    disk_tier = True


class WindowedDiskMemory(DiskMemory):
    groups = ("whole", "window")


MACHINES = [Memory, WindowedMemory, OnlyWindowedMemory, DiskMemory, WindowedDiskMemory]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_scheduler_may_do_anything(machine: type[Memory]) -> None:
    limits = settings(max_examples=12, stateful_step_count=50, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_scheduler_may_do_anything_for_long(machine: type[Memory]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=80, deadline=None))


# Single cases.


class SlowDisk(DiskTier):
    """Reads arrive when the test says so."""

    def submit_read(self, name: str) -> Future[Any]:
        future: Future[Any] = Future()
        self.reads = [*getattr(self, "reads", []), (name, future)]
        return future

    def arrive(self) -> None:
        for name, future in self.reads:
            future.set_result(self.read(name))
        self.reads = []


def computed(memory: KVMemory, device: Device, tokens: list[int]) -> int:
    """Runs a sequence by itself, checks what it read, and caches it; returns how much the cache had of it."""
    sequence = admit(memory, (), tokens)
    assert sequence is not None
    cached = sequence.computed
    device.run(memory.take_ops())
    device.forward(sequence)
    slots = sequence.table.slots(0, len(tokens))[0]
    assert device.pages[0].reshape(-1)[slots].tolist() == device.expected((), tokens)
    leave(memory, sequence)
    return cached


def evict_all(memory: KVMemory, device: Device) -> None:
    memory.tree.reclaim(0, memory.tree.evictable[0])
    device.run(memory.take_ops())


def on_disk(memory: KVMemory, device: Device) -> None:
    """Everything to disk, and out of the faster tiers."""
    evict_all(memory, device)
    assert memory.host is not None
    memory.tiers.make_room(memory.host.capacity_bytes)
    memory.tiers.finish_writes()
    assert all(n.pages is None and n.host is None and n.file is not None for n in memory.tree.nodes())


def with_disk(folder: pathlib.Path, host: int = 1000, through: bool = False) -> tuple[KVMemory, Device]:
    disk = SlowDisk(folder, "weights", 1 << 20, 4)
    memory = KVMemory((20,), 4, host=HostTier(host, (10,)), disk=disk, write_through=through)
    return memory, Device(memory)


def test_a_file_is_written_once_the_device_was_asked_for_its_pages(tmp_path: pathlib.Path) -> None:
    memory, device = with_disk(tmp_path, through=True)
    computed(memory, device, [0] * 8)
    memory.poll()  # the next step begins; what the last one caches was not saved yet
    device.run(memory.take_ops())
    memory.poll()
    memory.tiers.finish_writes()
    assert memory.disk is not None
    (node,) = memory.tree.nodes()
    assert memory.disk.errors == 0 and node.file is not None and node.file in memory.disk


def test_what_host_memory_can_not_hold_is_not_read_again_and_again(tmp_path: pathlib.Path) -> None:
    memory, device = with_disk(tmp_path, host=30)
    tokens = [0] * 8 + [1] * 8
    computed(memory, device, tokens[:8])
    computed(memory, device, tokens)
    on_disk(memory, device)
    assert memory.match(np.asarray(tokens, np.int32), ()).length == 16
    assert isinstance(memory.disk, SlowDisk)
    for _ in range(4):
        if not memory.prefetch(memory.match(np.asarray(tokens, np.int32), ())):
            break
        memory.disk.arrive()
        memory.poll()
    else:
        raise AssertionError("it reads again and again")
    assert computed(memory, device, [*tokens, 2]) in (0, 8)
    on_disk(memory, device)
    assert memory.prefetch(memory.match(np.asarray(tokens, np.int32), ()))  # it was used: worth another read


def test_what_is_not_written_yet_is_not_read(tmp_path: pathlib.Path) -> None:
    memory, device = with_disk(tmp_path)
    computed(memory, device, [0] * 8)
    memory.tree.reclaim(0, 2)
    memory.tiers.make_room(1000)  # to disk, before the device was asked for the pages
    match = memory.match(np.zeros(8, np.int32), ())
    assert match.length == 8 and not memory.prefetch(match)
    device.run(memory.take_ops())
    assert memory.prefetch(match)
    assert isinstance(memory.disk, SlowDisk)
    memory.disk.arrive()
    memory.poll()
    assert computed(memory, device, [0] * 9) == 8


@pytest.mark.parametrize("event", ["nothing", "split", "lost", "dropped", "reset", "recomputed"])
def test_while_a_read_is_under_way(event: str, tmp_path: pathlib.Path) -> None:
    memory, device = with_disk(tmp_path)
    tokens = [0, 1, 2, 0, 1, 2]
    computed(memory, device, tokens)
    on_disk(memory, device)
    match = memory.match(np.asarray(tokens, np.int32), ())
    assert memory.prefetch(match) and memory.reading
    disk, cached = memory.disk, 6
    assert isinstance(disk, SlowDisk)
    if event == "split":
        memory.consider(match, 6, 3)
        node = memory.match(np.asarray(tokens[:5], np.int32), ()).node
        assert computed(memory, device, [*tokens[:3], 5, 5]) == 0
        assert node.reading and node.parent is not None and node.parent.reading
    elif event == "lost":
        assert match.node.file is not None
        (tmp_path / match.node.file).unlink()
        cached = 0
    elif event == "dropped":
        memory.tree.remove(memory.tree.path(match.node)[0])
        cached = 0
    elif event == "reset":
        memory.reset(disk, keep_files=False)
        assert not memory.reading and not memory.prefetch(memory.match(np.asarray([1], np.int32), ()))
        cached = 0
    elif event == "recomputed":
        assert computed(memory, device, tokens) == 0
    disk.arrive()
    memory.poll()
    assert not memory.reading and not any(n.reading for n in memory.tree.nodes())
    assert computed(memory, device, [*tokens, 2, 2]) == cached
    if event == "nothing":  # it was used: worth another read, once it is on disk again
        on_disk(memory, device)
        assert memory.prefetch(match)


def test_a_restart_finds_sequences_that_part_inside_a_page(tmp_path: pathlib.Path) -> None:
    memory, device = with_disk(tmp_path)
    sequences = [[0] * 10, [0] * 6 + [1] * 7, [0] * 6 + [1] * 3 + [2], [0] * 3 + [2] * 9]
    for tokens in sequences:
        computed(memory, device, tokens)
        evict_all(memory, device)
        memory.tiers.make_room(1000)  # written as they were before the next one split them
        memory.tiers.finish_writes()
    for _ in memory.tiers.save_all():
        device.run(memory.take_ops())
        memory.tiers.finish_writes()
    assert memory.disk is not None
    memory.disk.close()
    memory, _ = with_disk(tmp_path)
    assert [memory.match(np.asarray(t, np.int32), ()).length for t in sequences] == [len(t) for t in sequences]


def test_a_sequence_that_fills_the_pool_needs_no_page_for_a_copy() -> None:
    """The cache has its prefix up to the middle of a page; with the copy of that page it would not fit."""
    memory = KVMemory((5,), 4)
    device = Device(memory)
    computed(memory, device, [0] * 6)
    assert computed(memory, device, [0] * 16) == 4
    memory = KVMemory((5,), 4)
    device = Device(memory)
    computed(memory, device, [0] * 6)
    assert computed(memory, device, [0] * 12) == 6  # here there is room for it


def test_a_running_sequence_may_use_pages_that_the_cache_holds_twice() -> None:
    memory = KVMemory((6,), 4)
    device = Device(memory)
    computed(memory, device, [0] * 8)
    sequence = admit(memory, (), [0, 0, 1, 1])  # splits the first page; its two parts own it
    assert sequence is not None
    device.run(memory.take_ops())
    device.forward(sequence)
    share(memory, sequence)
    sequence.tokens += [1] * 16
    assert memory.reserve(sequence.table, 4, 16)
    assert not memory.reserve(sequence.table, 16, 20)  # the node [0, 0] keeps the page of [0, 0, 0, 0]
    assert memory.squeeze() and not memory.squeeze()
    assert memory.reserve(sequence.table, 16, 20)
    sequence.planned = 20
    device.run(memory.take_ops())
    device.forward(sequence)
    leave(memory, sequence)
    assert computed(memory, device, [0, 0, 1, 1, *[1] * 15]) == 16  # it fits without a copy of the last page
    assert memory.available() == 5


def test_an_admission_that_can_not_be_loaded_starts_from_what_is_there() -> None:
    memory = KVMemory((6,), 4, host=HostTier(1000, (10,)))
    device = Device(memory)
    computed(memory, device, [0] * 4)
    computed(memory, device, [0] * 4 + [1] * 12)
    evict_all(memory, device)
    assert computed(memory, device, [0] * 5) == 4
    other = admit(memory, (), [2] * 8)
    assert other is not None
    admission = memory.consider(memory.match(np.asarray([0] * 4 + [1] * 12, np.int32), ()), 17, 16)
    assert admission.length == 16 and not admission.fits
    table = memory.new_table()
    node, cached = memory.admit(table, admission)
    assert cached == node.stop == 4 and len(table) == 1
    assert memory.reserve(table, 4, 12)
    memory.tree.unlock(node)
    table.release()
    leave(memory, other, keep=False)
    assert memory.available() == 5


def test_host_memory_gives_up_leaves_first() -> None:
    memory = KVMemory((10,), 4, host=HostTier(50, (10,)))
    device = Device(memory)
    computed(memory, device, [0] * 8)
    computed(memory, device, [0] * 8 + [1] * 8)
    evict_all(memory, device)
    tokens = np.asarray([0] * 8 + [1] * 8, np.int32)
    memory.consider(memory.match(tokens, ()), 16, 12)  # splits [1] * 8
    for room, length in ((20, 12), (30, 8), (50, 0)):
        memory.tiers.make_room(room)
        assert memory.match(tokens, ()).length == length
