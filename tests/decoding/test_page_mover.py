"""PageMover: what is owed is done in order, also within one program."""

import numpy as np

from specax.decoding.page_mover import PageMover
from specax.paged import CacheSpec, KVCache
from specax.paged.host_tier import HostPage, PageLoad
from specax.sharding import Layout


def test_of_two_loads_of_a_page_the_later_one_wins() -> None:
    # The page was given back in between. (The program's padding must not bring the first one back.)
    spec = CacheSpec(layers=2, kv_heads=1, head_dim=4, page_size=2, dtype="float32")
    shape = 2, 1, 2, 4  # layers, kv_heads, page_size, head_dim
    pages = [HostPage((np.full(shape, i, np.float32), np.full(shape, -i, np.float32))) for i in (1, 2, 3)]
    ops = [PageLoad(0, source, target) for source, target in zip(pages, (1, 2, 1), strict=True)]
    kv = PageMover(Layout()).run(KVCache.create((spec,), (4,), Layout()), ops)
    assert np.asarray(kv.k[0]).max(axis=(0, 2, 3, 4)).tolist() == [0, 3, 2, 0]
    assert np.asarray(kv.v[0]).min(axis=(0, 2, 3, 4)).tolist() == [0, -3, -2, 0]
