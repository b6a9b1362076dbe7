"""Attention on the device at hand: microseconds, and which part of what the device can do that is.

Two ceilings are measured first: a copy of gigabytes (bytes read and written per second) and a product of large
bfloat16 matrices. An op's bytes and operations are those that any implementation needs (`variants.Work`).

An op is timed in a loop within one program, median of several: a launch from Python would take longer than the op.
Every turn reads other pages, so that what it reads is not in the L2 cache unless it is larger than that anyway; a
turn's own cost, the shift of the page table, is measured as "an empty turn" and not taken off. Needs jax and NumPy
only.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specax.decoding.gpu.device_report import FAILURES, Deadline, Report, first_lines
from specax.decoding.gpu.variants import (
    LATENT,
    LAYER,
    Inputs,
    Rows,
    Variant,
    Work,
    attend,
    in_copy,
    random_inputs,
    random_key,
)
from specax.pallas_kernels.block_sizes import BlockSizes
from specax.pallas_kernels.dispatch import Implementation

PART = "timings"
# Only to guess how long a loop must be: bytes/s, FLOP/s and seconds of a launch of a large GPU.
GUESS = 3e12, 4e14, 5e-6


@dataclasses.dataclass(frozen=True)
class TimingSizes:
    """How large everything is. The defaults are for a GPU with 80 GB or more."""

    rows: int = 64
    context: int = 4096
    long: int = 32768
    many_rows: int = 256
    short: int = 1024
    prefill: int = 4096
    chunk: int = 512
    tree: int = 32
    kv_heads: int = 8
    latent_heads: tuple[int, ...] = (16, 128)
    pool: int = 512 << 20  # bytes of the pages that the turns of a loop go through, at least
    copied: int = 4 << 30  # bytes of the copy
    matrix: int = 8192
    seconds: float = 0.03  # of a loop
    repeats: int = 5


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the device can do, measured."""

    copy: float  # bytes per second, read and written
    read: float  # bytes per second
    matmul: float  # FLOP per second, bfloat16


@dataclasses.dataclass(frozen=True)
class Workload:
    """A call to be timed."""

    name: str
    variant: Variant
    rows: Rows

    def with_copies(self, pool: int) -> "Workload":
        """With as many copies of its pages as make `pool` bytes."""
        count, columns = self.rows.table(self.variant)
        v = self.variant
        page = v.kv_heads * v.page_size * v.head_dim * jnp.dtype(v.page_dtype).itemsize
        copies = max(1, math.ceil(pool / ((1 if v.op == "latent" else 2) * page * count * columns)))
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, copies=copies))


def workloads(sizes: TimingSizes = TimingSizes()) -> list[Workload]:
    """The most telling first."""
    s = sizes
    llama = Variant("decode", kv_heads=s.kv_heads)

    def decode(rows: int, context: int, what: str = "", **changes: Any) -> Workload:
        variant = dataclasses.replace(llama, **changes)
        name = f"{variant.op}, {rows} × {context} keys{what}"
        return Workload(name, variant, Rows((context - variant.query_len,) * rows))

    def prefill(tokens: int, context: int) -> Workload:
        variant = dataclasses.replace(llama, op="prefill", query_len=tokens)
        return Workload(f"prefill, {tokens} tokens over {context} keys", variant, Rows((context,), (tokens,)))

    out = [decode(s.rows, s.context)]
    out += [prefill(s.prefill, 0), decode(s.rows, s.context, f" of {s.tree}", op="tree", query_len=s.tree)]
    out += [decode(1, s.context), decode(1, s.long), prefill(s.chunk, s.long), decode(s.many_rows, s.short)]
    out += [decode(s.rows, s.context, f", {dtype}", page_dtype=dtype) for dtype in ("int8", "float8_e4m3fn")]
    out += [decode(s.rows, s.context, f", head dim {dim}", head_dim=dim) for dim in (64, 256)]
    out += [decode(s.rows, s.context, ", pages of 64", page_size=64)]
    out += [
        decode(s.rows, s.context, f", {heads} heads", op="latent", head_dim=LATENT[0], kv_heads=1, group=heads)
        for heads in s.latent_heads
    ]
    return out


def time_kernels(
    report: Report,
    deadline: Deadline,
    sizes: TimingSizes = TimingSizes(),
    implementations: tuple[str, ...] = ("mosaic_gpu", "triton", "xla"),
    progress: Callable[[int, int], None] = lambda done, total: None,
    ceilings: Ceilings | None = None,
) -> Ceilings | None:
    """One entry per workload and implementation. Returns the ceilings: those given, or if they could be measured."""
    if ceilings is None:
        with report.entry(PART, "ceilings") as entry:
            ceilings = measure_ceilings(sizes)
            entry |= {"copy_gb_s": ceilings.copy / 1e9, "read_gb_s": ceilings.read / 1e9}
            entry["matmul_tflop_s"] = ceilings.matmul / 1e12
        with report.entry(PART, "an empty turn") as entry:
            first = workloads(sizes)[0]
            inputs = random_inputs(first.variant, first.rows, random_key(0))
            entry["us"] = 1e6 * time_turns(lambda inputs: inputs.page_table, inputs, first, sizes)
    jobs = [(i, w) for i in implementations for w in workloads(sizes)]
    jobs = [(i, w) for i, w in jobs if i != "triton" or served_by_triton(w.variant)]
    for done, (implementation, workload) in enumerate(jobs):
        name = f"{workload.name}, {implementation}"
        if deadline.passed:
            left = [f"{w.name}, {i}" for i, w in jobs[done:]]
            report.skip(PART, f"{len(left)} of {len(jobs)}, from “{name}” on", "out of time", left)
            break
        with report.entry(PART, name) as entry:
            entry |= {"workload": workload.name, "implementation": implementation}
            try:
                seconds = time_workload(workload, implementation, sizes)
            except FAILURES as error:
                if implementation == "mosaic_gpu":
                    raise
                entry["note"] = f"does not run: {type(error).__name__}: {first_lines(error, 200)}"
            else:
                entry |= rates(workload, seconds, ceilings)
        progress(done + 1, len(jobs))
    return ceilings


def rates(workload: Workload, seconds: float, ceilings: Ceilings | None) -> dict[str, float]:
    """The figures of an entry."""
    work = Work.of(workload.variant, workload.rows)
    out = {"us": 1e6 * seconds, "gb_s": work.bytes / seconds / 1e9, "tflop_s": work.flops / seconds / 1e12}
    if ceilings is not None:
        out |= {"of_copy": work.bytes / seconds / ceilings.copy, "of_matmul": work.flops / seconds / ceilings.matmul}
    return out


def measure_ceilings(sizes: TimingSizes) -> Ceilings:
    """A copy that adds 1, a sum, and a matrix product whose entries stay of one size."""
    turns = 8
    x = jnp.zeros(sizes.copied // 4, jnp.float32)
    copy = median_seconds(_turns(lambda x: x + 1, turns), (x,), sizes.repeats) / turns
    read = median_seconds(jax.jit(jnp.sum), (x,), sizes.repeats)
    del x
    a = jax.random.normal(random_key(0), (sizes.matrix, sizes.matrix), jnp.bfloat16)
    b = (jax.random.normal(random_key(1), a.shape) * sizes.matrix**-0.5).astype(jnp.bfloat16)
    product = median_seconds(_turns(lambda a, b: a @ b, turns), (a, b), sizes.repeats) / turns
    return Ceilings(2 * sizes.copied / copy, sizes.copied / read, 2 * sizes.matrix**3 / product)


def _turns(step: Callable[..., jax.Array], turns: int) -> Callable[..., jax.Array]:
    """Applies step to its own output."""
    return jax.jit(lambda x, *rest: jax.lax.fori_loop(0, turns, lambda _, x: step(x, *rest), x))


def median_seconds(run: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """Of a call, from its start until its output is there; the first one, which compiles, does not count."""
    jax.block_until_ready(run(*args))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def time_workload(
    workload: Workload, implementation: str, sizes: TimingSizes, block_sizes: BlockSizes | None = None
) -> float:
    """Seconds of one call."""
    workload = workload.with_copies(sizes.pool)
    inputs = random_inputs(workload.variant, workload.rows, random_key(0))
    return time_inputs(workload, inputs, implementation, sizes, block_sizes)


def time_inputs(
    workload: Workload, inputs: Inputs, implementation: str, sizes: TimingSizes, block_sizes: BlockSizes | None = None
) -> float:
    """`time_workload` on inputs of `workload.with_copies`."""
    if implementation == "triton":
        inputs, call = triton_call(inputs)
        return time_turns(call, inputs, workload, sizes)
    named: Implementation = "xla" if implementation == "xla" else "mosaic_gpu"
    call = partial(attend, workload.variant, implementation=named, block_sizes=block_sizes)
    # XLA's path can be a hundred times slower than the guess.
    return time_turns(call, inputs, workload, sizes, guess=named != "xla")


def time_turns(
    call: Callable[[Inputs], jax.Array], inputs: Inputs, workload: Workload, sizes: TimingSizes, guess: bool = True
) -> float:
    """Seconds of a turn of a loop over `call`. Without `guess`, its length comes from a first loop of two turns."""
    count, columns = workload.rows.table(workload.variant)

    def turn(number: Any, inputs: Inputs) -> jax.Array:
        return call(in_copy(inputs, number % workload.rows.copies, count * columns))

    def loop(turns: Any, inputs: Inputs) -> jax.Array:
        empty = jnp.zeros(*_shape(jax.eval_shape(call, inputs)))
        return jax.lax.fori_loop(0, turns, lambda number, _: turn(number, inputs), empty)

    if guess:  # a number of turns that XLA knows spares a look at the condition in every turn
        work = Work.of(workload.variant, workload.rows)
        turns = max(2, math.ceil(sizes.seconds / (GUESS[2] + work.bytes / GUESS[0] + work.flops / GUESS[1])))
        return median_seconds(jax.jit(partial(loop, turns)), (inputs,), sizes.repeats) / turns
    run = jax.jit(loop)
    first = median_seconds(run, (np.int32(2), inputs), 1) / 2
    if first > sizes.seconds:
        return first
    turns = math.ceil(sizes.seconds / first)
    return median_seconds(run, (np.int32(turns), inputs), sizes.repeats) / turns


def _shape(x: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], Any]:
    return x.shape, x.dtype


# --- jax's own kernel


def served_by_triton(variant: Variant) -> bool:
    return variant.op == "decode" and not variant.quantized


def triton_call(inputs: Inputs) -> tuple[Inputs, Callable[[Inputs], jax.Array]]:
    """jax.experimental's `paged_attention` for Triton on the same keys, in its layout (heads before pages, one layer).

    Raises:
      ImportError: this version of jax has it no more.
    """
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    pages = jax.tree.map(lambda x: x[LAYER].swapaxes(0, 1), (inputs.k_pages, inputs.v_pages))
    inputs = dataclasses.replace(inputs, k_pages=pages[0], v_pages=pages[1])
    scale = inputs.query.shape[-1] ** -0.5

    def call(inputs: Inputs) -> jax.Array:
        query = inputs.query[:, 0] * jnp.asarray(scale, inputs.query.dtype)
        pages, table = (inputs.k_pages, inputs.v_pages), inputs.page_table
        return paged_attention(query, *pages, table, inputs.context_lens + 1, k_splits=math.gcd(16, table.shape[1]))

    return inputs, call
