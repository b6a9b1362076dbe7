"""A heap whose items can leave from the middle, with lazy deletion."""

import heapq
from collections.abc import Hashable, Iterator

type Key = tuple[float, ...]  # compared from the left; the smallest is first

SLACK = 64  # dead entries that a small heap may hold; below it, compaction would cost more than it frees


class Heap[T: Hashable]:
    """Items in order of their keys; among equal keys, who was put first.

    `put` and `remove` cost O(log n) amortised. What `remove` or another `put` leaves behind stays in the list
    until it comes to the top, or until it outnumbers the live entries and the list is rebuilt.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Key, int, T]] = []
        self._live: dict[T, tuple[Key, int, T]] = {}
        self._puts = 0  # number of the next put: entries never compare their items

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def __iter__(self) -> Iterator[T]:
        """All items in order; O(n log n)."""
        return (item for _, _, item in sorted(self._live.values(), key=lambda entry: entry[:2]))

    def put(self, item: T, key: Key) -> None:
        """Adds an item, or moves it to another key."""
        entry = (key, self._puts, item)
        self._puts += 1
        self._live[item] = entry
        heapq.heappush(self._entries, entry)
        self._compact()

    def remove(self, item: T) -> None:
        """Takes an item out; ValueError if it is not there."""
        if self._live.pop(item, None) is None:
            raise ValueError(f"not in the heap: {item!r}")
        self._compact()

    def first(self) -> T:
        """The item with the smallest key; IndexError if there is none."""
        while (entry := self._entries[0]) is not self._live.get(entry[2]):
            heapq.heappop(self._entries)
        return entry[2]

    def first_key(self) -> Key:
        """The smallest key; IndexError if there is none."""
        return self._live[self.first()][0]

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._live) + SLACK:
            self._entries = list(self._live.values())
            heapq.heapify(self._entries)
