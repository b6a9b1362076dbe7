"""KV memory: pools, page tables, prefix cache and tiers on the host, the cache arrays on the device."""

from specax.paged.kv_cache import CacheSpec, KVCache
from specax.paged.memory import KVMemory, PageOp
from specax.paged.page_table import PageTable
from specax.paged.pool import PagePool
from specax.paged.radix_tree import Match, Namespace, Node, RadixTree

__all__ = [
    "CacheSpec", "KVCache", "KVMemory", "Match", "Namespace", "Node", "PageOp", "PagePool", "PageTable", "RadixTree",
]  # fmt: skip
