"""KV memory: the page pool and page tables on the host, the cache arrays on the device."""

from specax.paged.kv_cache import CacheSpec, KVCache
from specax.paged.page_table import PageTable
from specax.paged.pool import PagePool

__all__ = ["CacheSpec", "KVCache", "PagePool", "PageTable"]
