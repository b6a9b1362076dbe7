"""PageTable: the pages of one sequence, grown on demand, shared with its forks, copied on write.

    position   0 … 15 │ 16 … 31 │ 32 …          (page_size 16)
    pages        [ 7  ,    2    ,   9 ]
    slot(33) = 9 · 16 + 1

A page with several owners is never written: `reserve` replaces it by a private copy first. Layers that see
different windows have their own pools (KV groups), and a table has one line of pages per group; entries that a
sliding window has left behind are 0, the trash page.
"""

from typing import NamedTuple

import numpy as np

from specax.paged.pool import TRASH_PAGE, PagePool


class PageCopy(NamedTuple):
    """Device work owed before the next forward pass: page `source` must be copied to page `target`."""

    group: int
    source: int
    target: int


class PageTable:
    """Host-side page table of one sequence, over one pool per KV group."""

    __slots__ = ("_count", "_given", "_page_size", "_pages", "_pools", "writable")

    def __init__(self, pools: tuple[PagePool, ...], page_size: int):
        self._pools, self._page_size = pools, page_size
        self._pages = np.zeros((len(pools), 8), np.int32)
        self._count = 0
        self._given = [0] * len(pools)  # pages that the window has passed, per group
        self.writable = 0  # positions from the last page on to here need no `reserve`: the page is our own

    @property
    def pages(self) -> np.ndarray:
        """Page ids in order, int32 [groups, num_pages]. A view: valid until the table changes."""
        return self._pages[:, : self._count]

    def __len__(self) -> int:
        return self._count

    def held(self, group: int) -> int:
        """Pages of a group that the table has, without those that its window has given back."""
        return self._count if not self._given[group] else int(np.count_nonzero(self.pages[group]))

    def bind(self, row: np.ndarray) -> None:
        """Moves the pages into `row`, int32 [groups, max_pages], of a matrix that batches are built from."""
        row[:, : self._count] = self._pages[:, : self._count]
        row[:, self._count :] = TRASH_PAGE
        self._pages = row

    def reserve(self, start: int, stop: int) -> list[PageCopy] | None:
        """Makes positions start..stop−1 writable: grows the table and un-shares the pages they lie in.

        Returns:
          The page copies that the device owes; None, and nothing changed, if a pool is short of pages.
        """
        shared = [self._shared(group, start, stop) for group in range(len(self._pools))]
        grow = max(0, -(-stop // self._page_size) - self._count)
        taken: list[list[int]] = []
        for pool, columns in zip(self._pools, shared, strict=True):
            new = pool.allocate(grow + len(columns))
            if new is None:
                for other, pages in zip(self._pools, taken):
                    other.release(pages)
                return None
            taken.append(new)
        copies = []
        self._make_room(self._count + grow)
        for group, (pool, columns, new) in enumerate(zip(self._pools, shared, taken, strict=True)):
            for column in columns:
                copies.append(PageCopy(group, int(self._pages[group, column]), new.pop()))
                pool.release([copies[-1].source])
                self._pages[group, column] = copies[-1].target
            self._pages[group, self._count : self._count + grow] = new
        self._count += grow
        self.writable = self._count * self._page_size
        return copies

    def adopt(self, pages: np.ndarray) -> None:
        """Becomes a further owner of `pages`, int32 [groups, num_pages]; the table must be empty."""
        assert self._count == 0
        for pool, line in zip(self._pools, pages, strict=True):
            pool.share(line[line != TRASH_PAGE])
        self._make_room(pages.shape[1])
        self._pages[:, : pages.shape[1]] = pages
        self._count = pages.shape[1]
        self._given = [0] * len(self._pools)
        self.writable = 0

    def replace(self, first: int, pages: np.ndarray) -> None:
        """Swaps pages first… for others with the same content, int32 [groups, n], and shares those."""
        for group, (pool, line) in enumerate(zip(self._pools, pages, strict=True)):
            own = self._pages[group, first : first + len(line)]
            differs = (own != line) & (own != TRASH_PAGE) & (line != TRASH_PAGE)
            if differs.any():
                pool.share(line[differs])
                pool.release(own[differs])
                own[differs] = line[differs]

    def give_back(self, group: int, first: int, stop: int) -> int:
        """Releases pages first..stop−1 of a group, which no later query sees; returns how many there were."""
        first = max(first, self._given[group])
        if stop <= first:
            return 0
        line = self._pages[group, first:stop]
        held = line[line != TRASH_PAGE]
        self._pools[group].release(held)
        line[:] = TRASH_PAGE
        self._given[group] = stop
        return len(held)

    def fork(self) -> "PageTable":
        """A second table over the same pages; whoever writes first copies."""
        child = PageTable(self._pools, self._page_size)
        child.adopt(self.pages)
        child._given = list(self._given)
        self.writable = 0
        return child

    def release(self) -> None:
        """Gives all pages back; the table is empty afterwards, and may be used again."""
        for pool, line in zip(self._pools, self.pages, strict=True):
            pool.release(line[line != TRASH_PAGE])
        self._pages = np.zeros((len(self._pools), 8), np.int32)
        self._count = self.writable = 0
        self._given = [0] * len(self._pools)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Flat slots of positions start..stop−1, int32 [groups, stop − start]."""
        positions = np.arange(start, stop, dtype=np.int32)
        return self._pages[:, positions // self._page_size] * self._page_size + positions % self._page_size

    def _shared(self, group: int, start: int, stop: int) -> list[int]:
        """Columns of present pages that positions start..stop−1 would write and that have other owners."""
        last = min(-(-stop // self._page_size), self._count)
        line, pool = self._pages[group], self._pools[group]
        return [i for i in range(start // self._page_size, last) if pool.references(int(line[i])) > 1]

    def _make_room(self, count: int) -> None:
        if count > self._pages.shape[1]:
            more = np.zeros((len(self._pools), max(count, 2 * self._pages.shape[1])), np.int32)
            more[:, : self._count] = self.pages
            self._pages = more
