"""KV memory: pools, page tables, prefix cache and tiers on the host, the cache arrays on the device."""

from specax.paged.kv_cache import CacheSpec, KVCache
from specax.paged.memory import KVMemory
from specax.paged.namespaces import Namespace
from specax.paged.page_table import PageTable
from specax.paged.pool import PagePool
from specax.paged.radix_tree import Match, Node, RadixTree
from specax.paged.tiers import PageOp

__all__ = [
    "CacheSpec", "KVCache", "KVMemory", "Match", "Namespace", "Node", "PageOp", "PagePool", "PageTable", "RadixTree",
]  # fmt: skip
