"""Which implementation serves a call, XLA anywhere or Mosaic GPU kernels on Hopper; and the kernels' plan for it.

Decided while tracing, by the device that is compiled for, dtypes and shapes.
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.block_sizes import BlockSizes, Plan, Shapes, heads_together, make_plan

type Implementation = Literal["xla", "mosaic_gpu"] | None

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (8, 16, 32, 64, 128)
HOPPER = re.compile(r"\b(GH200|H\d+)\b")  # H100, H200, H800, H20

_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted(params: Any = None) -> Iterator[None]:
    """Within it, `implementation="mosaic_gpu"` runs on the CPU, in Pallas' interpreter: slow, for tests.

    `params`: an InterpretGPUParams, for race detection say. A kernel's warpgroups wait for one another in XLA's thread
    pool; with fewer than four threads they may do so for ever (`XLA_FLAGS=--xla_force_host_platform_device_count=4`).
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu  # a second, that nobody else should wait

    token = _interpreted.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(params or plgpu.InterpretGPUParams()):
            yield
    finally:
        _interpreted.reset(token)


def choose(
    implementation: Implementation,
    query: jax.Array,
    k_pages: jax.Array,
    options: AttentionOptions,
    value_dim: int | None = None,
) -> Literal["xla", "mosaic_gpu"]:
    """The implementation that serves the call. `value_dim`: of a latent cache.

    Raises:
      NotImplementedError: the named one can't.
    """
    if implementation == "xla":
        return "xla"
    if implementation not in (None, "mosaic_gpu"):
        raise NotImplementedError(f"implementation {implementation!r} is not there: take 'xla', 'mosaic_gpu' or None")
    reason = _unserved(query, k_pages, options, value_dim)
    if reason is None:
        return "mosaic_gpu"
    if implementation is None:
        return "xla"
    raise NotImplementedError(f"implementation 'mosaic_gpu' can't serve this call: {reason}; take 'xla' or None")


def _unserved(
    query: jax.Array, k_pages: jax.Array, options: AttentionOptions, value_dim: int | None
) -> str | None:
    """Why the Mosaic kernels can't serve the call, or None."""
    platform, kind, _ = device()
    if not _interpreted.get() and not (platform in ("gpu", "cuda") and HOPPER.search(kind)):
        return f"it needs a Hopper GPU (H100, H200), the device is {kind!r} (tests: within `interpreted()`)"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16 queries, got {query.dtype}"
    if options.k_scales is None and k_pages.dtype != query.dtype:
        return f"pages must have the query's dtype or be 8-bit with scales, got {k_pages.dtype} and {query.dtype}"
    head_dim, page_size = k_pages.shape[4], k_pages.shape[3]
    if page_size not in PAGE_SIZES:
        return f"page size must be one of {PAGE_SIZES}, got {page_size}"
    if value_dim is None and head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, got {head_dim}"
    if value_dim is not None and (head_dim % 64 or value_dim % 64 or value_dim > 512 or head_dim > 576):
        widths = f"{head_dim} and {value_dim}"
        return f"latents must be multiples of 64 wide, at most 576, and their values at most 512, got {widths}"
    return None


def plan_call(
    query: Any,
    k_pages: Any,
    page_table: Any,
    value_dim: int,
    blocks: BlockSizes | None,
    *,
    tokens: int,
    sequences: int,
    latent: bool = False,
    merged: bool = False,
) -> tuple[Plan, int]:
    """The plan of one call of the kernels, and the number of groups that query heads go in.

    Args:
      query, k_pages, page_table: the op's, or anything that has their shape and dtype.
      tokens: per sequence (decode), or of the whole call (prefill, where sequences = 1).
      latent, merged: see `Shapes`.
    """
    _, _, kv_heads, page_size, head_dim = k_pages.shape
    group = heads_together(query.shape[-2] // kv_heads, value_dim, latent)
    groups = query.shape[-2] // group
    max_keys = page_table.shape[1] * page_size
    dtype = k_pages.dtype.name
    shapes = Shapes(tokens, sequences, groups, group, head_dim, value_dim, page_size, max_keys, dtype, latent, merged)
    _, kind, cores = device()
    return make_plan(shapes, kind, cores, blocks), groups


def device() -> tuple[str, str, int | None]:
    """Platform, kind and number of SMs of the device that is being compiled for.

    That of the mesh in scope (a `shard_map`, or an AbstractMesh of a machine without it), else the default one.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.platform, abstract.device_kind, abstract.num_cores
    default = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(default, str):
        default = jax.devices(default)[0]
    return default.platform, default.device_kind, getattr(default, "core_count", None)
