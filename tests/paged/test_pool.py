"""PagePool and PageTable: reference counts, copy-on-write and what every sequence reads back."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specax.paged import PagePool, PageTable
from specax.paged.pool import TRASH_PAGE


class PagedMemory(RuleBasedStateMachine):
    """Tables over one small pool, beside a model: the memory itself (slot → token) and each table's tokens."""

    @initialize(num_pages=st.integers(2, 9), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool, self.page_size = PagePool(num_pages), page_size
        self.memory: dict[int, int] = {}
        self.sequences: list[tuple[PageTable, list[int]]] = []
        self.names = itertools.count()  # every token that is written is another one

    def table(self, pick: int) -> tuple[PageTable, list[int]]:
        return self.sequences[pick % len(self.sequences)]

    @rule()
    def create(self) -> None:
        self.sequences.append((PageTable((self.pool,), self.page_size), []))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 99), back=st.integers(0, 7), count=st.integers(1, 12))
    def write(self, pick: int, back: int, count: int) -> None:
        """Writes `count` tokens at the end, or over the last `back` ones (rejected drafts)."""
        table, tokens = self.table(pick)
        start = max(0, len(tokens) - back)
        stop = start + count
        first, last = start // self.page_size, -(-stop // self.page_size)
        present = table.pages[0, first:last].tolist()
        wanted = last - first - len(present) + sum(self.pool.references(page) > 1 for page in present)
        before = self.snapshot()
        copies = table.reserve(start, stop)
        if copies is None:
            assert wanted > self.pool.num_free
            assert self.snapshot() == before  # all or nothing
            return
        assert self.pool.num_free == before[0] - wanted
        for copy in copies:
            assert self.pool.references(copy.source) >= 1 and self.pool.references(copy.target) == 1
            for offset in range(self.page_size):
                source, target = (page * self.page_size + offset for page in (copy.source, copy.target))
                if source in self.memory:
                    self.memory[target] = self.memory[source]
        writable = table.pages[0, start // self.page_size : -(-stop // self.page_size)]
        assert len(writable) == -(-stop // self.page_size) - start // self.page_size
        assert all(self.pool.references(int(page)) == 1 for page in writable)
        (slots,) = table.slots(start, stop)
        assert slots.dtype == np.int32
        places = (divmod(position, self.page_size) for position in range(start, stop))
        assert slots.tolist() == [table.pages[0, page] * self.page_size + offset for page, offset in places]
        del tokens[start:]
        for slot in slots.tolist():
            tokens.append(next(self.names))
            self.memory[slot] = tokens[-1]

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        table, tokens = self.table(pick)
        free = self.pool.num_free
        child = table.fork()
        assert self.pool.num_free == free  # shares everything, copies nothing
        assert child.pages.tolist() == table.pages.tolist()
        self.sequences.append((child, list(tokens)))

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 99), forget=st.booleans())
    def release(self, pick: int, forget: bool) -> None:
        table, tokens = self.table(pick)
        table.release()
        assert len(table) == 0
        if forget:
            self.sequences.pop(pick % len(self.sequences))
        else:  # preempted: used again later
            tokens.clear()

    def snapshot(self) -> tuple[int, list[int], list[list[int]]]:
        counts = [self.pool.references(page) for page in range(self.pool.num_pages)]
        return self.pool.num_free, counts, [table.pages[0].tolist() for table, _ in self.sequences]

    @invariant()
    def counts_equal_owners(self) -> None:
        owners = Counter(page for table, _ in self.sequences for page in table.pages[0].tolist())
        assert TRASH_PAGE not in owners
        for page in range(self.pool.num_pages):
            assert self.pool.references(page) == owners[page]
        assert self.pool.num_used == len(owners)
        assert self.pool.num_free + self.pool.num_used == self.pool.num_pages - 1

    @invariant()
    def everyone_reads_its_own_tokens(self) -> None:
        for table, tokens in self.sequences:
            assert [self.memory[slot] for slot in table.slots(0, len(tokens))[0].tolist()] == tokens

    def teardown(self) -> None:
        for table, _ in self.sequences:
            table.release()
        assert self.pool.num_free == self.pool.num_pages - 1


TestPagedMemory = PagedMemory.TestCase
TestPagedMemory.settings = settings(max_examples=50, stateful_step_count=40, deadline=None, derandomize=True)


def test_fork_copies_only_the_last_partial_page_and_only_when_written() -> None:
    pool = PagePool(8)
    parent = PageTable((pool,), 4)
    assert parent.reserve(0, 10) == []  # pages 1, 2, 3; the last holds two tokens
    child = parent.fork()
    assert pool.num_used == 3
    copies = child.reserve(10, 11)
    assert copies == [(0, 3, 4)]
    assert child.pages.tolist() == [[1, 2, 4]] and parent.pages.tolist() == [[1, 2, 3]]
    assert parent.reserve(10, 11) == []  # the page is its own again: no copy
    assert [pool.references(page) for page in range(1, 5)] == [2, 2, 1, 1]


def test_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = PagePool(8)
    parent = PageTable((pool,), 4)
    parent.reserve(0, 8)
    child = parent.fork()
    assert child.reserve(8, 9) == [] and parent.reserve(8, 9) == []
    assert child.slots(8, 9) != parent.slots(8, 9)


def test_reserve_takes_all_or_nothing() -> None:
    pool = PagePool(4)
    table = PageTable((pool,), 2)
    assert table.reserve(0, 7) is None and pool.num_free == 3 and len(table) == 0
    assert table.reserve(0, 6) == [] and pool.num_free == 0
    child = table.fork()
    assert child.reserve(5, 6) is None  # a private copy needs a page that isn't there
    assert child.pages.tolist() == table.pages.tolist()
    table.release()
    assert child.reserve(5, 6) == []  # now it owns them alone


def test_wrong_use_of_the_pool_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1)
    pool = PagePool(3)
    assert pool.allocate(3) is None and pool.num_free == 2
    assert pool.allocate(0) == []
    (page,) = pool.allocate(1) or []
    pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free: it can't be released"):
        pool.release([page])
    with pytest.raises(ValueError, match=f"page {page} is free"):
        pool.share([page])
    assert pool.num_free == 2
