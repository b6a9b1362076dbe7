"""The device half of KV memory: stacked pages, created once, donated to every step and written in place."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specax.sharding import CACHE_AXES, Layout


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Shape of one group of layers that share a page geometry."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        per_token = 2 * self.layers * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return per_token * self.page_size


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values, apart, one array per group of layers. Page 0 of each group is its trash page."""

    k: tuple[Float[Array, "layers pages kv_heads page_size head_dim"], ...]
    v: tuple[Float[Array, "layers pages kv_heads page_size head_dim"], ...]

    @classmethod
    def create(cls, specs: tuple[CacheSpec, ...], num_pages: tuple[int, ...], layout: Layout) -> "KVCache":
        """A zeroed cache (a NaN in a slot that no token wrote would poison attention), split over KV heads.

        Args:
          specs: one per group of layers, in the order of the model's KV groups.
          num_pages: pages of each group, trash page included.
        """
        k, v = [], []
        for spec, pages in zip(specs, num_pages, strict=True):
            shape = (spec.layers, pages, spec.kv_heads, spec.page_size, spec.head_dim)
            make = jax.jit(partial(jnp.zeros, shape, spec.dtype), out_shardings=layout.placement(CACHE_AXES))
            k.append(make())
            v.append(make())
        return cls(tuple(k), tuple(v))
