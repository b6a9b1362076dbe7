"""How a kernel divides its work: block sizes, their table, and the plan made of them for one call's shapes.

Block sizes come from, in this order: the caller; `tuned.json`, which `specax-tune-kernels` fills on a GPU; a rule
that fits the rings into shared memory. All of it is plain Python on static shapes.
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import json
import math
from typing import Literal

import jax.numpy as jnp

from specax.pallas_kernels.quantized_kv import is_quantized

SHARED_MEMORY = 227 * 1024  # bytes that one thread block can have
SM_SHARED_MEMORY, RESERVED = 228 * 1024, 1024  # bytes of an SM, of which each block takes some beyond its own
MAX_GRID = 65535  # tiles · splits
QUERIES_PER_WARPGROUP = 64  # where queries are the tensor core's rows
H200_CORES = 132
MAX_STAGES = 4  # of the rule
MIN_BLOCKS_PER_SPLIT = 4  # fewer do not pay for another split's start and merge

type Body = Literal["keys", "queries"]  # which of them are the tensor core's rows


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How a thread block works. Static."""

    keys: int = 64  # per block; a multiple of the page size, or a part of it
    stages: int = 2  # slots of each ring of pages
    warpgroups: int = 1  # consumers, each with its own queries; more than one only where queries are rows
    value_parts: int = 1  # thread blocks that share the columns of V; each computes all scores
    splits: int | None = None  # of the context; None: as many as fill the GPU


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call's division of work. Static, hashable."""

    body: Body
    queries: int  # packed queries per warpgroup
    splits: int
    value_dim: int
    blocks: BlockSizes
    merged: bool = False  # with other attention over the same queries, and so even one split is left unnormalised

    @property
    def partial(self) -> bool:
        """Whether O leaves with its m and l, not divided by l."""
        return self.merged or self.splits > 1

    @property
    def keys_are_rows(self) -> bool:
        return self.body == "keys"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What a plan depends on."""

    tokens: int  # query tokens per sequence (decode), or of the whole call (prefill)
    sequences: int  # rows of a decode call; 1 for prefill
    heads: int  # groups of query heads that go together
    group: int  # query heads in each
    head_dim: int
    value_dim: int
    page_size: int
    max_keys: int  # of a sequence, as far as its page table reaches
    page_dtype: str
    latent: bool = False  # values are columns of the keys
    merged: bool = False  # with other attention over the same queries, see Plan

    @property
    def quantized(self) -> bool:
        return is_quantized(self.page_dtype)


def make_plan(shapes: Shapes, device_kind: str, cores: int | None, blocks: BlockSizes | None = None) -> Plan:
    """The plan for one call on a GPU with `cores` SMs (None: those of an H200).

    Raises:
      ValueError: the caller's blocks do not fit the shapes.
    """
    cores = cores or H200_CORES
    packed = shapes.tokens * shapes.group
    wide_latent = shapes.latent and shapes.value_dim > 128  # (its values can't be shared out: see value_parts)
    body: Body = "keys" if packed <= max_queries(shapes) or wide_latent else "queries"
    queries = QUERIES_PER_WARPGROUP
    if body == "keys":
        queries = min(math.ceil(packed / 8) * 8, max_queries(shapes))
    if blocks is None:
        blocks = block_sizes(device_kind, body, shapes)
    _check(blocks, body, shapes)
    if body == "queries" and packed <= queries:
        blocks = dataclasses.replace(blocks, warpgroups=1)
    splits = _splits(body, queries, shapes, blocks, cores)
    if (splits > 1 or shapes.merged) and blocks.warpgroups > 1 and shapes.value_dim > 128:
        # O that leaves with m and l takes some registers more than three warpgroups have for wide heads.
        blocks = dataclasses.replace(blocks, warpgroups=1)
        splits = _splits(body, queries, shapes, blocks, cores)
    if (tiles := _tiles(queries, shapes, blocks)) * splits > MAX_GRID:
        raise ValueError(f"{tiles} query tiles · {splits} splits are more than one launch takes, {MAX_GRID}")
    return Plan(body, queries, splits, shapes.value_dim, blocks, shapes.merged)


def _splits(body: Body, queries: int, shapes: Shapes, blocks: BlockSizes, cores: int) -> int:
    if blocks.splits is not None:
        return blocks.splits
    tiles = _tiles(queries, shapes, blocks)
    resident = cores * (2 if _fits_twice(shared_memory(body, queries, shapes, blocks)) and body == "keys" else 1)
    most = math.ceil(shapes.max_keys / blocks.keys) // MIN_BLOCKS_PER_SPLIT
    return num_splits(tiles * shapes.heads * blocks.value_parts, resident, most)


def _tiles(queries: int, shapes: Shapes, blocks: BlockSizes) -> int:
    return shapes.sequences * math.ceil(shapes.tokens / (blocks.warpgroups * (queries // shapes.group)))


def num_splits(blocks: int, resident: int, most: int) -> int:
    """Splits of the context for so many thread blocks, of which a GPU runs `resident` at a time.

    The fewest, up to `most`, whose last wave leaves little idle: 85 % of the best occupancy, as in FlashAttention's
    heuristic.
    """
    splits = range(1, max(1, min(most, resident)) + 1)
    waves = [blocks * s / resident for s in splits]
    full = [w / math.ceil(w) for w in waves]
    return next(s for s, occupancy in zip(splits, full, strict=True) if occupancy >= 0.85 * max(full))


def heads_together(group: int, value_dim: int, latent: bool = False) -> int:
    """Of `group` query heads that share a KV head, how many one query tile packs: all, if they fit."""
    most = 16 if value_dim > 256 else 32 if latent and value_dim > 128 else QUERIES_PER_WARPGROUP
    return max(n for n in range(1, min(group, most) + 1) if group % n == 0)


def max_queries(shapes: Shapes) -> int:
    """Most packed queries with keys as rows: the accumulator of value_dim × queries must fit the registers."""
    return 16 if shapes.value_dim > 256 or (shapes.value_dim > 128 and shapes.quantized) else 32


def block_sizes(device_kind: str, body: Body, shapes: Shapes) -> BlockSizes:
    """The table's entry, or the rule's; an entry that these shapes can't have is passed over.

    (A narrow latent cache shares its key with ordinary heads, and allows less.)
    """
    entry = tuned().get(key(device_kind, body, shapes))
    if entry is not None:
        blocks = BlockSizes(**entry)
        with contextlib.suppress(ValueError):
            _check(blocks, body, shapes)
            return blocks
    return _rule(body, shapes)


def key(device_kind: str, body: Body, shapes: Shapes) -> str:
    """Of the table: device kind, body, head dim, page size and dtype of pages."""
    return f"{device_kind}/{body}/{shapes.head_dim}/{shapes.page_size}/{shapes.page_dtype}"


@functools.cache
def tuned() -> dict[str, dict[str, int]]:
    """`tuned.json`: {key: fields of BlockSizes}. Empty until a GPU was at hand."""
    return json.loads((importlib.resources.files(__package__) / "tuned.json").read_text(encoding="utf-8"))


def _check(blocks: BlockSizes, body: Body, shapes: Shapes) -> None:
    for name, low in (("keys", 64), ("stages", 1), ("warpgroups", 1), ("value_parts", 1), ("splits", 1)):
        value = getattr(blocks, name)
        if value is not None and value < low:
            raise ValueError(f"block sizes: {name} must be at least {low}, got {value}")
    if blocks.stages > 32:
        raise ValueError(f"block sizes: stages must be at most 32, got {blocks.stages}")
    if blocks.keys % 64 or (blocks.keys % shapes.page_size and shapes.page_size % blocks.keys):
        message = f"a multiple of 64, and of page size {shapes.page_size} or a part of it"
        raise ValueError(f"block sizes: keys must be {message}, got {blocks}")
    if blocks.warpgroups > 1 and (body == "keys" or shapes.quantized or shapes.latent):
        message = "several warpgroups need queries as rows, 16-bit pages, and values of their own"
        raise ValueError(f"block sizes: {message}, got {blocks}")
    if blocks.value_parts > 1 and shapes.latent:
        raise ValueError(f"block sizes: a latent cache has one value part, its keys being its values, got {blocks}")
    if shapes.value_dim % (64 * blocks.value_parts):
        raise ValueError(f"block sizes: value_parts must split head dim {shapes.value_dim} in 64s, got {blocks}")


def _rule(body: Body, shapes: Shapes) -> BlockSizes:
    """As many stages as fit beside the other tiles, for the most queries that a thread block can have.

    With keys as rows, two thread blocks share an SM if they can, so that one computes while the other waits.
    8-bit pages are widened, and the end of a latent cache cleared, by one warpgroup for itself.
    """
    one = BlockSizes(
        keys=64,  # (128 would be too much for the registers of wide heads)
        stages=1,
        warpgroups=2 if body == "queries" and not shapes.quantized and not shapes.latent else 1,
        value_parts=2 if body == "queries" and shapes.value_dim > 128 and not shapes.latent else 1,
    )
    queries = max_queries(shapes) if body == "keys" else QUERIES_PER_WARPGROUP
    most = 2 if shapes.quantized and shapes.head_dim > 128 else MAX_STAGES  # (more stages spill registers there)
    choices = [dataclasses.replace(one, stages=n) for n in range(most, 1, -1)]
    sizes = {blocks: shared_memory(body, queries, shapes, blocks) for blocks in choices}
    if body == "keys" and (twice := [blocks for blocks in choices if _fits_twice(sizes[blocks])]):
        return twice[0]
    return next((blocks for blocks in choices if sizes[blocks] <= SHARED_MEMORY), one)


def _fits_twice(size: int) -> bool:
    """Whether an SM has room for two such thread blocks."""
    return 2 * (size + RESERVED) <= SM_SHARED_MEMORY


def shared_memory(body: Body, queries: int, shapes: Shapes, blocks: BlockSizes) -> int:
    """Bytes that a thread block takes: rings, widened tiles, and for every query its vector, weights and output.

    A little more than the kernel allocates (`Geometry.scratch`), whose outputs may be of 16 bits and masks short.
    """
    wide, narrow = 2, jnp.dtype(shapes.page_dtype).itemsize
    values = shapes.value_dim // blocks.value_parts
    row = shapes.head_dim + (0 if shapes.latent else values)
    ring = blocks.stages * blocks.keys * row * narrow
    rows = blocks.warpgroups * queries
    tiles = rows * (wide * (shapes.head_dim + blocks.keys) + 4 * (values if body == "keys" else 64))
    if shapes.quantized:
        ring += blocks.stages * blocks.keys * 2 * 4  # scales
        tiles += blocks.keys * row * wide
    return ring + tiles + 8 * 1024
