"""HostTier: pages of one KV group that left the device and wait in host memory to be used again.

A device→host copy takes a while. So a slot may hold a promise of its content, and only a reader waits for it:

    slots = tier.allocate(2)
    tier.put(slots[0], lambda: (np.asarray(k), np.asarray(v)))   # the copy is under way; nobody waits
    tier.get(slots[0])                                           # waits for this one, and keeps what came
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

UNUSED_SLOT = 0  # as page 0 of the device: a slot number that is never handed out


class _Content[T]:
    """A value that is there, or is made by its first reader."""

    def __init__(self, value: T | Callable[[], T]):
        self._lock = threading.Lock()
        self._make: Callable[[], T] | None = value if callable(value) else None
        self._value: Any = None if callable(value) else value

    def __call__(self) -> T:
        with self._lock:
            if self._make is not None:
                self._value, self._make = self._make(), None  # (drops the device buffers that the copy came from)
            return self._value


class HostTier[T]:
    """At most `capacity_pages` pages, in slots 1 … capacity_pages; what a page's content is, is the caller's affair.

    At rest `num_free == capacity_pages`. One thread uses the tier; what `handle` returns may go to another.
    """

    def __init__(self, capacity_pages: int):
        if capacity_pages < 0:
            raise ValueError(f"the host tier's capacity is {capacity_pages} pages; give 0 or more")
        self.capacity_pages = capacity_pages
        self._used = [False] * (capacity_pages + 1)
        self._free = list(range(capacity_pages, UNUSED_SLOT, -1))  # a stack, as PagePool's
        self._contents: dict[int, _Content[T]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity_pages - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` empty slots; all of them, or None and nothing changes."""
        if count < 0:
            raise ValueError(f"can't allocate {count} slots")
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._used[slot] = True
        return slots

    def put(self, slot: int, content: T | Callable[[], T]) -> None:
        """Fills a slot (what it held is dropped). A callable is called by the first reader, and its result kept."""
        self._check(slot)
        self._contents[slot] = _Content(content)

    def get(self, slot: int) -> T:
        """The content of a slot; waits if it is still on its way. What a promise raises is passed on, and may be
        tried again."""
        return self.handle(slot)()

    def handle(self, slot: int) -> Callable[[], T]:
        """The content as a callable, without waiting for it. It holds after the slot is released and on any thread:
        `disk.submit_write(key, handle)` moves pages on while the slot goes to another page."""
        self._check(slot)
        if slot not in self._contents:
            raise ValueError(f"host slot {slot} is empty: put its content first")
        return self._contents[slot]

    def release(self, slots: Sequence[int]) -> None:
        """Gives slots back and drops what they hold."""
        for slot in reversed(slots):
            self._check(slot)
            self._used[slot] = False
            self._contents.pop(slot, None)
            self._free.append(slot)

    def _check(self, slot: int) -> None:
        if not 0 < slot <= self.capacity_pages:
            raise ValueError(f"there is no host slot {slot}: they are 1 … {self.capacity_pages}")
        if not self._used[slot]:
            raise ValueError(f"host slot {slot} is free: allocate it first")
