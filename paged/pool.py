"""PagePool: which pages of the KV cache are free, and how many owners the others have."""

from collections.abc import Iterable, Sequence

TRASH_PAGE = 0  # padding tokens write here; never handed out


class PagePool:
    """Free list and reference counts over `num_pages` pages; page 0 is reserved.

    At rest `num_free == num_pages − 1`, and a page's count equals the number of page tables that hold it.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages (one is the trash page), got {num_pages}")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))  # a stack: low pages first, reused while warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def references(self, page: int) -> int:
        """How many owners a page has; 0 if it is free."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, each with one owner; all of them, or None and nothing changes."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages in use."""
        for page in pages:
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free: it can't be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page; those without owners become free. The tail is freed first."""
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} is free already")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
