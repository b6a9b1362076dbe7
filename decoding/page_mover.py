"""The device work that KV memory owes: page copies, saves to pinned host memory, loads from it.

All of it is dispatched without waiting. A page in host memory is a pair of arrays (keys, values), each
[layers, kv_heads, page_size, head_dim], in the devices' pinned memory, sharded as on the device.
"""

import itertools
import time
from collections.abc import Sequence

import jax
import numpy as np

from specax.paged import KVCache, PageOp
from specax.paged.host_tier import HostPage, PageLoad, PageSave
from specax.paged.page_table import PageCopy
from specax.pallas_kernels import copy_pages
from specax.sharding import CACHE_AXES, Layout

AT_A_TIME = 8  # pages per program

type Page = tuple[jax.Array, jax.Array]


class PageMover:
    """Compiled page copies, saves and loads of every KV group of a cache."""

    def __init__(self, layout: Layout):
        axes = (CACHE_AXES[0], *CACHE_AXES[2:])  # a page's: without the axis of pages
        self._on_device = on_device = layout.placement(axes)

        def copy(group: int, kv: KVCache, source: jax.Array, target: jax.Array) -> KVCache:
            k, v = copy_pages(kv.k[group], source, target), copy_pages(kv.v[group], source, target)
            return _with_group(kv, group, k, v)

        def save(group: int, kv: KVCache, pages: jax.Array) -> list[Page]:
            return [(kv.k[group][:, pages[i]], kv.v[group][:, pages[i]]) for i in range(AT_A_TIME)]

        def load(group: int, kv: KVCache, pages: jax.Array, content: list[Page]) -> KVCache:
            k, v = kv.k[group], kv.v[group]
            for i, (k_page, v_page) in enumerate(content):
                k = jax.lax.dynamic_update_slice_in_dim(k, k_page[:, None], pages[i], axis=1)
                v = jax.lax.dynamic_update_slice_in_dim(v, v_page[:, None], pages[i], axis=1)
            return _with_group(kv, group, k, v)

        self._copy = jax.jit(copy, static_argnums=0, donate_argnums=1)
        self._save = jax.jit(save, static_argnums=0, out_shardings=on_device.with_memory_kind("pinned_host"))
        self._load = jax.jit(load, static_argnums=0, donate_argnums=1)

    def run(self, kv: KVCache, ops: Sequence[PageOp]) -> KVCache:
        """Does what is owed, in order. The given cache is donated."""
        for (kind, group), run in itertools.groupby(ops, key=lambda op: (type(op), op.group)):
            same = list(run)
            for at in range(0, len(same), AT_A_TIME):
                kv = self._some(kv, kind, group, same[at : at + AT_A_TIME])
        return kv

    def _some(self, kv: KVCache, kind: type, group: int, ops: Sequence[PageOp]) -> KVCache:
        if kind is PageCopy:
            source, target = (_padded([getattr(op, name) for op in ops]) for name in ("source", "target"))
            return self._copy(group, kv, source, target)
        pages = _padded([op.page for op in ops])  # type: ignore[union-attr]
        if kind is PageSave:
            for op, page in zip(ops, self._save(group, kv, pages)):
                assert isinstance(op, PageSave)
                op.target.content = page
            return kv
        content = [op.source.resolve() for op in ops if isinstance(op, PageLoad)]
        # The last one again: a page may be loaded twice, if it was given back between, and the later load must win.
        content += [content[-1]] * (AT_A_TIME - len(content))
        pages[len(ops) :] = ops[-1].page  # type: ignore[union-attr]
        return self._load(group, kv, pages, jax.device_put(content, self._on_device))

    def warmup(self, kv: KVCache, tiers: bool) -> KVCache:
        """Compiles everything by working on the trash page; saves and loads only if there are tiers."""
        for group in range(len(kv.k)):
            kv = self.run(kv, [PageCopy(group, 0, 0)])
            if tiers:
                page = HostPage()
                kv = self.run(kv, [PageSave(group, 0, page), PageLoad(group, page, 0)])
        return kv


    def bytes_per_second(self, kv: KVCache) -> tuple[float, KVCache]:
        """Measures a save and a load of the trash page; waits for them. To be called after `warmup`."""
        page = HostPage()
        moves: list[PageOp] = [PageSave(0, 0, page), PageLoad(0, page, 0)]
        jax.block_until_ready(kv)
        start = time.perf_counter()
        kv = jax.block_until_ready(self.run(kv, moves))
        seconds = time.perf_counter() - start
        moved = 2 * AT_A_TIME * sum(x.nbytes for x in page.resolve())
        return moved / seconds, kv


def _padded(pages: list[int]) -> np.ndarray:
    out = np.zeros(AT_A_TIME, np.int32)
    out[: len(pages)] = pages
    return out


def _with_group(kv: KVCache, group: int, k: jax.Array, v: jax.Array) -> KVCache:
    def put(arrays: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
        return (*arrays[:group], new, *arrays[group + 1 :])

    return KVCache(put(kv.k, k), put(kv.v, v))
