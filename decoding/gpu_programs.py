"""What specax-gpu-check compiles: the attention kernels on their own, and whole steps of Llama 3 8B."""

import dataclasses
import math
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specax.decoding import sampler
from specax.decoding.batch import empty_batch
from specax.decoding.buckets import Shape
from specax.decoding.runner import step_functions
from specax.decoding.sampling_table import SamplingTable
from specax.model import Decoder, ModelConfig
from specax.model.batch import DecodeSegment, ForwardBatch
from specax.paged import KVCache
from specax.pallas_kernels import Window, paged_attention, paged_prefill_attention
from specax.pallas_kernels.deviceless import Report, compile_for_h200, topology
from specax.pallas_kernels.paged_attention import Implementation
from specax.sharding import CACHE_AXES, Layout, make_mesh

LLAMA_3_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, max_position=8192, rope_theta=500000.0,
)  # fmt: skip
ROWS, PAGE_SIZE, CONTEXT = 64, 16, 4096  # CONTEXT: keys per row that the cache has room for
TREE = 32  # tokens of a draft tree


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile, and what must hold of its report."""

    name: str
    devices: int
    compile: Callable[[], Report]
    attention: bool = False  # is one attention op: has a kernel, with wgmma and TMA copies
    in_place: int = 0  # bytes per device that must be updated where they are
    max_temp: int | None = None  # bytes per device


def kernel_programs(implementation: str = "mosaic_gpu") -> list[Program]:
    """The attention ops alone, in the shapes of common models; none if they do not have that implementation."""
    literals = typing.get_args(Implementation.__value__)
    if implementation not in {name for literal in literals for name in typing.get_args(literal)}:
        return []
    out = []
    for name, op, arrays, window in (*_decode_variants(), *_prefill_variants()):
        scale = arrays["query"].shape[-1] ** -0.5
        static: dict[str, Any] = {"layer": 1, "scale": scale, "window": window, "implementation": implementation}

        def call(arrays: dict[str, jax.Array], op: Callable[..., jax.Array] = op, static: Any = static) -> jax.Array:
            return op(**arrays, **static)

        out.append(Program(name, 1, partial(compile_for_h200, call, arrays), attention=True))
    return out


type Variant = tuple[str, Callable[..., jax.Array], dict[str, jax.ShapeDtypeStruct], Window | None]


def _decode_variants() -> list[Variant]:
    """(name, op, its arrays, window) of decode and tree attention."""

    def variant(
        name: str, n: int = 1, heads: int = 8, group: int = 4, dim: int = 128, page: int = 16,
        window: Window | None = None,
    ) -> Variant:  # fmt: skip
        arrays = {
            "query": _spec(ROWS, n, heads * group, dim),
            "k_pages": _pages(heads, page, dim),
            "v_pages": _pages(heads, page, dim),
            "page_table": _spec(ROWS, CONTEXT // page, dtype=jnp.int32),
            "context_lens": _spec(ROWS, dtype=jnp.int32),
        }
        if n > 1:
            arrays["tree_mask"] = _spec(ROWS, n, -(-n // 32), dtype=jnp.uint32)
        if window is not None and window.sinks:
            arrays["sink_query"] = arrays["query"]
        return f"decode, {name}", paged_attention, arrays, window

    return [
        variant("Llama 3 8B"),
        variant("Llama 3 8B on 8 GPUs", heads=1),
        variant("Llama 3 8B, pages of 64", page=64),
        variant("Llama 3 70B on 8 GPUs", heads=1, group=8),
        variant("SmolLM2 135M", heads=3, group=3, dim=64),
        variant("Llama 2 7B", heads=32, group=1),
        variant("window of 4096", window=Window(4096)),
        variant("window of 1024, 16 sinks", window=Window(1024, sinks=16, granularity=16)),
        variant("trees of 8", n=8),
        variant("trees of 32", n=TREE),
        variant("trees of 32, 70B on 8 GPUs", n=TREE, heads=1, group=8),
        variant("trees of 64", n=64),
    ]


def _prefill_variants() -> list[Variant]:
    """The same of prefill attention: 512 tokens in 8 rows at most."""

    def variant(name: str, heads: int = 8, group: int = 4, dim: int = 128, window: Window | None = None) -> Variant:
        tokens, rows = 512, 8
        arrays = {
            "query": _spec(tokens, heads * group, dim),
            "k_pages": _pages(heads, PAGE_SIZE, dim),
            "v_pages": _pages(heads, PAGE_SIZE, dim),
            "query_starts": _spec(rows + 1, dtype=jnp.int32),
            "page_table": _spec(rows, CONTEXT // PAGE_SIZE, dtype=jnp.int32),
            "context_lens": _spec(rows, dtype=jnp.int32),
        }
        return f"prefill, {name}", paged_prefill_attention, arrays, window

    return [
        variant("Llama 3 8B"),
        variant("Llama 3 8B on 8 GPUs", heads=1),
        variant("SmolLM2 135M", heads=3, group=3, dim=64),
        variant("window of 4096", window=Window(4096)),
    ]


def _spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _pages(heads: int, page: int, dim: int) -> jax.ShapeDtypeStruct:
    """Keys, or values, of two layers."""
    return _spec(2, ROWS * CONTEXT // page + 1, heads, page, dim)


def step_programs(devices: int, layers: int = LLAMA_3_8B.num_layers) -> list[Program]:
    """What the engine compiles for a decode step and for the verification of draft trees, tensor parallel."""
    config = dataclasses.replace(LLAMA_3_8B, num_layers=layers)
    mesh = make_mesh(tensor=devices, devices=list(topology(devices)))
    layout = Layout(mesh if devices > 1 else None)  # as for an engine on one device
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, layout=layout))
    graphdef, state = nnx.split(model)
    params = [
        jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=layout.sharding(param.axes))
        for _, param in nnx.to_flat_state(state)
    ]
    forward, logits = step_functions(graphdef, jax.tree.structure(state))
    padded = model.padded
    pages = (layers, ROWS * CONTEXT // PAGE_SIZE + 1, padded.num_kv_heads, PAGE_SIZE, padded.head_dim)
    keys: Any = (jax.ShapeDtypeStruct(pages, jnp.bfloat16, sharding=layout.sharding(CACHE_AXES)),)
    layer_bytes = math.prod(pages[1:]) * 2 // devices  # keys of one layer
    cache_bytes = 2 * layers * layer_bytes
    sampler_state = jax.eval_shape(partial(sampler.SamplerState.create, ROWS + 1, config.vocab_size))
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(sampler_state))
    logits_bytes = 4 * ROWS * config.vocab_size
    sampling = SamplingTable(ROWS, config.vocab_size).inputs([], ROWS)

    def program(name: str, fn: Callable[..., Any], *specs: Any, **limits: Any) -> Program:
        donate = (1,) if "in_place" in limits else ()
        return Program(name, devices, partial(compile_for_h200, fn, *specs, donate_argnums=donate, mesh=mesh), **limits)

    def step(name: str, batch: ForwardBatch) -> Program:
        # Not even one layer's keys are copied.
        cache = KVCache(keys, keys)
        return program(name, forward, params, cache, batch, in_place=cache_bytes, max_temp=layer_bytes)

    width = config.max_position // PAGE_SIZE
    out = [
        step(f"decode, {ROWS} rows", empty_batch(Shape(ROWS, 0, 0, width, ROWS))),
        step(f"verify, {ROWS} trees of {TREE}", tree_batch(ROWS, TREE, width)),
        # Gathering the head, rather than the logits, takes far more.
        program(f"logits, {ROWS} rows", logits, params, _spec(ROWS, config.hidden_size), max_temp=4 * logits_bytes),
    ]
    if devices == 1:  # every device of a mesh does the same
        values = _spec(ROWS, config.vocab_size, dtype=jnp.float32)
        inputs = (values, sampler_state, sampling)
        out.append(program(f"sample, {ROWS} rows", sampler.sample, *inputs, in_place=state_bytes))
    return out


def tree_batch(rows: int, n: int, pages: int) -> ForwardBatch:
    """Padding in the shape of `rows` draft trees of n tokens each, all of whose hidden states are wanted."""
    tokens = np.zeros(rows * n, np.int32)
    mask = np.zeros((rows, n, -(-n // 32)), np.uint32)
    table, lens = np.zeros((1, rows, pages), np.int32), np.full(rows, -n, np.int32)
    decode = DecodeSegment(table, lens, mask, query_len=n)
    return ForwardBatch(tokens, tokens, tokens[None], logit_rows=tokens, decode=decode)
