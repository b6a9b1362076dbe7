"""PagePool: which pages of the KV cache are free, and how many owners the others have."""

from collections.abc import Callable, Sequence

import numpy as np

TRASH_PAGE = 0  # padding tokens write here; never handed out

type Pages = Sequence[int] | np.ndarray


class PagePool:
    """Free list and reference counts over `num_pages` pages; page 0 is reserved.

    Owners are page tables and nodes of the prefix cache. At rest `num_free == num_pages − 1 − cached pages`.
    `reclaim(count)` is asked to give back at least `count` pages when the free list is short: it evicts.
    """

    def __init__(self, num_pages: int, reclaim: Callable[[int], None] | None = None):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (one is the trash page), got {num_pages}")
        self.num_pages, self.reclaim = num_pages, reclaim
        self._references = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))  # a stack: low pages first, reused while warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def references(self, page: int) -> int:
        """How many owners a page has; 0 if it is free."""
        return int(self._references[page])

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, each with one owner; all of them, or None and no page is taken."""
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            return None
        if count == 1:  # a row that grows by a page: the usual case
            page = self._free.pop()
            self._references[page] = 1
            return [page]
        at = len(self._free) - count
        pages = self._free[at:][::-1]
        del self._free[at:]
        self._references[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """Adds an owner to pages in use. No page may be named twice."""
        ids = np.asarray(pages, np.int32)
        owners = self._owners(ids, "it can't be shared")
        self._references[ids] = owners + 1

    def release(self, pages: Pages) -> None:
        """Takes one owner from each page; those without owners become free. The tail is freed first.

        No page may be named twice.
        """
        ids = np.asarray(pages, np.int32)
        owners = self._owners(ids, "it can't be released")
        self._references[ids] = owners - 1
        self._free.extend(ids[owners == 1][::-1].tolist())

    def _owners(self, ids: np.ndarray, why: str) -> np.ndarray:
        owners = self._references[ids]
        if (free := ids[owners < 1]).size:
            raise ValueError(f"page {int(free[0])} is free: {why}")
        return owners
