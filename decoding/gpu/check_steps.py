"""What specax-gpu-check compiles: the attention kernels on their own, and whole steps of Llama 3 8B."""

import dataclasses
import functools
import math
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
from specax.decoding.gpu.check_kernels import KernelCase, kernel_cases
from specax.decoding.runner import step_functions
from specax.decoding.sampling_table import SamplingTable
from specax.model import Decoder, ModelConfig
from specax.model.batch import DecodeSegment, ForwardBatch
from specax.paged import KVCache
from specax.pallas_kernels.deviceless import Report, compile_for_h200, topology
from specax.sharding import CACHE_AXES, Layout, make_mesh

LLAMA_3_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, max_position=8192, rope_theta=500000.0,
)  # fmt: skip
ROWS, PAGE_SIZE, CONTEXT = 64, 16, 4096  # CONTEXT: keys per row that the cache has room for
TREE = 32  # tokens of a draft tree
PREFILL = 512  # prompt tokens of a mixed step
PREFILL_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """Something to compile, and what must hold of its report. Picklable: other processes compile."""

    name: str
    devices: int
    compile: Callable[[], Report]
    kernel: KernelCase | None = None  # what it is a row of the kernel table for: one kernel, with wgmma and TMA copies
    segments: int = 0  # kinds of attention in a step: each is one kernel, which all layers call
    layers: int = 0
    in_place: int = 0  # bytes per device that must be updated where they are
    max_temp: int | None = None  # bytes per device


def kernel_programs(quick: bool = False) -> list[Program]:
    """The attention ops alone. `quick`: see `kernel_cases`."""
    return [Program(case.title, 1, case.compile, kernel=case) for case in kernel_cases(quick)]


def step_programs(devices: int, layers: int = LLAMA_3_8B.num_layers) -> list[Program]:
    """What the engine compiles for a step and for the verification of draft trees, tensor parallel."""
    steps = _steps(devices, layers)
    return [
        Program(name, devices, partial(_compile_step, name, devices, layers), **step.limits)
        for name, step in steps.items()
    ]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A function of the engine, the shapes it is called with, and its `Program`'s limits."""

    fn: Callable[..., Any]
    specs: tuple[Any, ...]
    limits: dict[str, Any]
    mesh: jax.sharding.Mesh


def _compile_step(name: str, devices: int, layers: int) -> Report:
    step = _steps(devices, layers)[name]
    donate = (1,) if "in_place" in step.limits else ()
    return compile_for_h200(step.fn, *step.specs, donate_argnums=donate, mesh=step.mesh)


@functools.cache  # (once in each process)
def _steps(devices: int, layers: int) -> dict[str, _Step]:
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

    def spec(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def step(batch: ForwardBatch) -> _Step:
        # Not even one layer's keys are copied.
        limits = {"in_place": cache_bytes, "max_temp": layer_bytes, "layers": layers}
        segments = sum(segment is not None for segment in (batch.decode, batch.prefill))
        return _Step(forward, (params, KVCache(keys, keys), batch), limits | {"segments": segments}, mesh)

    width = config.max_position // PAGE_SIZE
    mixed = Shape(ROWS, PREFILL, PREFILL_ROWS, width, ROWS + PREFILL_ROWS)
    out = {
        f"decode, {ROWS} rows": step(empty_batch(Shape(ROWS, 0, 0, width, ROWS))),
        f"verify, {ROWS} trees of {TREE}": step(tree_batch(ROWS, TREE, width)),
        f"decode, {ROWS} rows, and prefill, {PREFILL} tokens": step(empty_batch(mixed)),
        # Gathering the head, rather than the logits, takes far more.
        f"logits, {ROWS} rows": _Step(
            logits, (params, spec(ROWS, config.hidden_size)), {"max_temp": 4 * logits_bytes}, mesh
        ),
    }
    if devices == 1:  # every device of a mesh does the same
        values = spec(ROWS, config.vocab_size, dtype=jnp.float32)
        limits = {"in_place": state_bytes}
        out[f"sample, {ROWS} rows"] = _Step(sampler.sample, (values, sampler_state, sampling), limits, mesh)
    return out


def tree_batch(rows: int, n: int, pages: int) -> ForwardBatch:
    """Padding in the shape of `rows` draft trees of n tokens each, all of whose hidden states are wanted."""
    tokens = np.zeros(rows * n, np.int32)
    mask = np.zeros((rows, n, -(-n // 32)), np.uint32)
    table, lens = np.zeros((1, rows, pages), np.int32), np.full(rows, -n, np.int32)
    decode = DecodeSegment(table, lens, mask, query_len=n)
    return ForwardBatch(tokens, tokens, tokens[None], logit_rows=tokens, decode=decode)
