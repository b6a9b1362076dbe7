"""Static shapes: the few sizes that every step is padded to, so that few programs serve all steps."""

import dataclasses
import itertools
from functools import cached_property

PREFILL_ROW = 16  # tokens that a prefill row is taken to have, when rows are provided for


def ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """smallest, smallest · factor, … and largest."""
    steps = itertools.takewhile(lambda size: size < largest, (smallest * factor**i for i in itertools.count()))
    return (*steps, largest)


def fit(sizes: tuple[int, ...], need: int) -> int:
    """The smallest size that holds `need`."""
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"{need} exceeds the largest bucket {sizes[-1]}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static shape of a forward step. Zero rows or tokens: the step has no such segment."""

    decode_rows: int
    prefill_tokens: int
    prefill_rows: int
    pages: int  # columns of the page tables
    logit_rows: int

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes of an engine with `max_rows` sequences and `max_tokens` per step.

    Steps that only decode come in powers of two. Steps with a prefill segment are dominated by it, so there
    the decode rows are coarser: the number of programs is a sum, not a product. Page tables have one width up
    to 512 pages and few beyond, since attention reads the number of blocks from the context lengths.
    """

    max_rows: int
    max_tokens: int
    max_pages: int  # of one sequence

    @cached_property
    def decode_rows(self) -> tuple[int, ...]:
        return ladder(1, self.max_rows, 2)

    @cached_property
    def mixed_rows(self) -> tuple[int, ...]:
        return (0, *ladder(min(8, self.max_rows), self.max_rows, 8))

    @cached_property
    def prefill_tokens(self) -> tuple[int, ...]:
        return ladder(min(32, self.max_tokens), self.max_tokens, 2)

    @cached_property
    def pages(self) -> tuple[int, ...]:
        return ladder(min(512, self.max_pages), self.max_pages, 8)

    @property
    def max_prefill_rows(self) -> int:
        return self.prefill_rows(self.max_tokens)

    def prefill_rows(self, tokens: int) -> int:
        """Rows provided for in a prefill segment of that many tokens."""
        return min(self.max_rows, max(1, tokens // PREFILL_ROW))

    def shape(self, decode_rows: int, prefill_tokens: int, prefill_rows: int, pages: int) -> Shape:
        """The bucket for a step with these many live rows, prefill tokens, prefill rows and pages per row."""
        width = fit(self.pages, pages)
        if not prefill_tokens:
            rows = fit(self.decode_rows, decode_rows)
            return Shape(rows, 0, 0, width, rows)
        rows = fit(self.mixed_rows, decode_rows)
        enough = tuple(t for t in self.prefill_tokens if self.prefill_rows(t) >= prefill_rows)
        return self._mixed(rows, fit(enough, prefill_tokens), width)

    def _mixed(self, rows: int, tokens: int, pages: int) -> Shape:
        prefill_rows = self.prefill_rows(tokens)
        logit_rows = fit(self.decode_rows, min(self.max_rows, rows + prefill_rows))
        return Shape(rows, tokens, prefill_rows, pages, logit_rows)

    def shapes(self) -> list[Shape]:
        """Every shape that a step can have: what warm-up compiles."""
        out = [Shape(rows, 0, 0, pages, rows) for pages in self.pages for rows in self.decode_rows]
        mixed = itertools.product(self.mixed_rows, self.prefill_tokens, self.pages)
        return out + [self._mixed(rows, tokens, pages) for rows, tokens, pages in mixed]
