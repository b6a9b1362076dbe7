"""Page rings: how keys and values reach shared memory.

One warp, the producer, walks over a sequence's key blocks and copies their pages, one TMA copy per page and
head, into a ring of slots; consumers wait until a slot is full and give it back when their tensor cores are done
with it. Copies land in the swizzled tiles that wgmma reads without bank conflicts.

    page table   [7, 2, 9, 4, …]          block b = pages 4b … 4b+3 (page 16, 64 keys per block)
    slot 0       [7 | 2 | 9 | 4]  full → consumers → free → block 0 + stages …
    slot 1       …

A page that is larger than a block is copied in parts.

Columns of the page table that the tile does not need are never followed: a block that reaches over the ends of
the needed keys repeats its first or last page there, so that every block counts the same number of copies.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class PageRing:
    """Keys or values of one KV head on their way into shared memory."""

    pages: Any  # device memory, [pages, kv_heads, page_size, head_dim]
    columns: Any  # the part of head_dim to take
    slots: Any  # shared memory, [stages, block_keys, columns]
    full: Any  # barriers [stages]: the slot's copies have arrived
    free: Any  # barriers [stages]: all consumers are done with the slot
    scales: Any = None  # device memory, [pages, kv_heads, page_size], of quantised pages
    scale_slots: Any = None  # shared memory, [stages, block_keys]

    def fill(self, slot: Any, head: Any, page_ids: list[Any], offset: Any) -> None:
        """Starts the copies of one block: whole pages, or the part of one from token `offset` on."""
        size = self.slots.shape[-2] // len(page_ids)
        tokens = pl.ds(offset, size)
        for j, page in enumerate(page_ids):
            part = pl.ds(j * size, size)
            source = self.pages.at[page, head, tokens, self.columns]
            plgpu.copy_gmem_to_smem(source, self.slots.at[slot, part], self.full.at[slot])
            if self.scales is not None:
                plgpu.copy_gmem_to_smem(
                    self.scales.at[page, head, tokens], self.scale_slots.at[slot, part], self.full.at[slot],
                    # A promise that makes it a plain bulk copy, to any 16 bytes: one through a tensor map must begin at
                    # a multiple of 128 in shared memory, which the scales of a page of 16 (64 bytes) do not.
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )  # fmt: skip

    def wait_free(self, slot: Any) -> None:
        plgpu.barrier_wait(self.free.at[slot])

    def release(self, slot: Any, refilled: Any) -> None:
        """The calling warpgroup is done with the slot. `refilled`: whether a later block will take it."""

        @pl.when(refilled)
        def _() -> None:
            plgpu.barrier_arrive(self.free.at[slot])


def produce(
    rings: list[PageRing], stages: int, head: Any, blocks: Any, pages_of: Callable[[Any], tuple[list[Any], Any]]
) -> None:
    """The producer warp's whole work: blocks 0..blocks−1 into the rings, in order.

    `pages_of`: a block's page ids, and the token within them that it begins at.
    """

    @pl.loop(0, blocks)
    def _(i: jax.Array) -> None:
        slot = lax.rem(i, jnp.int32(stages))
        ids, offset = pages_of(i)  # before the wait, to hide their latency
        for ring in rings:
            pl.when(i >= stages)(functools.partial(ring.wait_free, slot))
            ring.fill(slot, head, ids, offset)
