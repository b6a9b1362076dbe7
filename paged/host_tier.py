"""Pages in host memory: a budget in bytes, and cells that a device copy fills when it arrives."""

from collections.abc import Callable
from typing import Any, NamedTuple

# A page's arrays, or how to get them: a copy from the device may still be under way.
type Content = Any | Callable[[], Any]


class HostPage:
    """One page's place in host memory. `content` is None until the device was asked for it.

    `PageSave` fills it and `PageLoad` reads it, in the order in which they were decided, so that a page can be
    loaded in the same step that saves it.
    """

    __slots__ = ("content", "owners")

    def __init__(self, content: Content = None):
        self.content, self.owners = content, 1

    def resolve(self) -> Any:
        """The arrays; waits for a copy that is under way."""
        if callable(self.content):
            self.content = self.content()
        return self.content


type HostPages = tuple[list[HostPage | None], ...]  # per KV group, per page; None: a window has passed it


class PageSave(NamedTuple):
    """Device work: page `page` must be copied to host memory."""

    group: int
    page: int
    target: HostPage


class PageLoad(NamedTuple):
    """Device work: a page in host memory must be copied to page `page`."""

    group: int
    source: HostPage
    page: int


class HostTier:
    """How much of the host's memory pages may take, and do. `page_bytes`: of one page, per KV group."""

    def __init__(self, capacity_bytes: int, page_bytes: tuple[int, ...]):
        self.capacity_bytes, self.page_bytes = capacity_bytes, page_bytes
        self.used_bytes = 0

    def size(self, pages: HostPages) -> int:
        return sum(size * sum(p is not None for p in line) for size, line in zip(self.page_bytes, pages, strict=True))

    def fits(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.capacity_bytes

    def take(self, pages: HostPages) -> None:
        """Books new pages."""
        self.used_bytes += self.size(pages)

    def share(self, page: HostPage) -> None:
        page.owners += 1

    def release(self, pages: HostPages) -> None:
        """Takes an owner from each page; those without owners are forgotten."""
        for size, line in zip(self.page_bytes, pages, strict=True):
            for page in line:
                if page is not None:
                    if page.owners < 1:
                        raise ValueError("a page in host memory was released more often than it was taken")
                    page.owners -= 1
                    if page.owners == 0:
                        self.used_bytes -= size
