"""PageTable: the pages of one sequence, grown on demand, shared with its forks, copied on write.

    position   0 … 15 │ 16 … 31 │ 32 …          (page_size 16)
    pages        [ 7  ,    2    ,   9 ]
    slot(33) = 9 · 16 + 1

A page with several owners is never written: `reserve` replaces it by a private copy first.
"""

from typing import NamedTuple

import numpy as np

from specax.paged.pool import PagePool


class PageCopy(NamedTuple):
    """Device work owed before the next forward pass: page `source` must be copied to page `target`."""

    source: int
    target: int


class PageTable:
    """Host-side page table of one sequence."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool, self._page_size = pool, page_size
        self._pages = np.zeros(8, np.int32)
        self._count = 0

    @property
    def pages(self) -> np.ndarray:
        """Page ids in order, int32 [num_pages]. A view: valid until the table changes."""
        return self._pages[: self._count]

    def __len__(self) -> int:
        return self._count

    def reserve(self, start: int, stop: int) -> list[PageCopy] | None:
        """Makes positions start..stop−1 writable: grows the table and un-shares the pages they lie in.

        Returns:
          The page copies that the device owes; None, and nothing changed, if the pool is short of pages.
        """
        index = start // self._page_size
        inside = stop == start + 1 and index < self._count
        if inside and self._pool.references(int(self._pages[index])) == 1:
            return []  # a decode step inside an own page: the usual case
        shared = self._shared(start, stop)
        grow = max(0, self._pages_for(stop) - self._count)
        new = self._pool.allocate(grow + len(shared))
        if new is None:
            return None
        copies = []
        for i in shared:
            copies.append(PageCopy(int(self._pages[i]), new.pop()))
            self._pool.release([copies[-1].source])
            self._pages[i] = copies[-1].target
        self._extend(new)
        return copies

    def fork(self) -> "PageTable":
        """A second table over the same pages; whoever writes first copies."""
        child = PageTable(self._pool, self._page_size)
        self._pool.share(self.pages.tolist())
        child._pages, child._count = self._pages.copy(), self._count
        return child

    def release(self) -> None:
        """Gives all pages back; the table is empty afterwards, and may be used again."""
        self._pool.release(self.pages.tolist())
        self._count = 0

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Flat slots of positions start..stop−1, int32."""
        positions = np.arange(start, stop, dtype=np.int32)
        return self._pages[positions // self._page_size] * self._page_size + positions % self._page_size

    def slot(self, position: int) -> int:
        """Flat slot of one position."""
        page, offset = divmod(position, self._page_size)
        return int(self._pages[page]) * self._page_size + offset

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def _shared(self, start: int, stop: int) -> list[int]:
        """Indices of present pages that positions start..stop−1 would write and that have other owners."""
        last = min(self._pages_for(stop), self._count)
        return [i for i in range(start // self._page_size, last) if self._pool.references(int(self._pages[i])) > 1]

    def _extend(self, pages: list[int]) -> None:
        count = self._count + len(pages)
        if count > len(self._pages):
            self._pages = np.concatenate([self._pages, np.zeros(max(count, len(self._pages)), np.int32)])
        self._pages[self._count : count] = pages
        self._count = count
