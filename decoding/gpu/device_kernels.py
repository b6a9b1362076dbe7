"""On the device at hand: does every kernel compute what it should, and the same every time?

The yardstick is attention written out densely in float32 (`dense_attention`), which is itself held to NumPy in
float64. Needs jax and NumPy only.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specax.decoding.gpu.device_report import FAILURES, Deadline, Report
from specax.decoding.gpu.variants import (
    LAYER,
    Inputs,
    Rows,
    Variant,
    attend,
    kernel_variants,
    pairs_first,
    random_inputs,
    random_key,
)
from specax.pallas_kernels.block_sizes import BlockSizes, make_plan
from specax.pallas_kernels.dispatch import Implementation, device
from specax.pallas_kernels.window import Window

PART = "correctness"
# Of ‖out − reference‖ / ‖reference‖, for the worst query vector. In bfloat16, the roundings of the weights and of the
# output cost 2e-3 each at most; values of 8-bit pages are rounded once more, and a GPU's tanh is good to 5e-4.
TOLERANCE, ROUGH_TOLERANCE = 5e-3, 8e-3
REFERENCE_TOLERANCE = 1e-5
COMMON = Variant("decode"), Variant("tree", query_len=32), Variant("prefill", query_len=256)


@dataclasses.dataclass(frozen=True)
class KernelSizes:
    """How large the cases are. The defaults are for a GPU."""

    contexts: tuple[int, ...] = (3000, -1, 17, 0, 1024, 2049)  # −1: a padding row
    prefill: tuple[tuple[int, int], ...] = ((2500, 256), (0, 200), (63, 1), (1024, 0), (200, 129))  # context, tokens
    repeats: int = 20  # of each kernel on the same inputs
    load: int = 4096  # side of the matrix product that runs in between
    workers: int = 8  # threads that compile

    def rows(self, variant: Variant) -> Rows:
        if variant.op == "prefill":
            contexts, lengths = zip(*self.prefill, strict=True)
            return Rows(contexts, lengths)
        return Rows(tuple(-variant.query_len if c < 0 else c for c in self.contexts))


@dataclasses.dataclass(frozen=True)
class Check:
    """One kernel to be checked. `splits`: of the context, None for as many as are planned."""

    variant: Variant
    splits: int | None = None
    implementation: Implementation = "mosaic_gpu"

    @property
    def name(self) -> str:
        words = [self.variant.name] + [f"{self.splits} split"] * (self.splits is not None)
        return ", ".join(words + ["XLA"] * (self.implementation == "xla"))

    @property
    def tolerance(self) -> float:
        return ROUGH_TOLERANCE if self.variant.quantized or self.variant.soft_cap is not None else TOLERANCE

    def block_sizes(self, rows: Rows) -> BlockSizes | None:
        if self.splits is None:
            return None
        _, columns = rows.table(self.variant)
        tokens = sum(rows.lengths) if self.variant.op == "prefill" else None
        shapes = self.variant.shapes(len(rows.contexts), columns * self.variant.page_size, tokens)
        _, kind, cores = device()
        return dataclasses.replace(make_plan(shapes, kind, cores).blocks, splits=self.splits)


def all_checks() -> list[Check]:
    """The commonest kernels in every way, then all the others once; among those, any two sizes or options meet soon."""
    first = [check for v in COMMON for check in (Check(v), Check(v, splits=1), Check(v, implementation="xla"))]
    return first + [Check(v) for v in pairs_first(kernel_variants()) if Check(v) not in first]


def check_kernels(
    report: Report,
    deadline: Deadline,
    checks: Sequence[Check],
    sizes: KernelSizes = KernelSizes(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """One entry per check: `error`, and how many of the repeated runs gave other bits (`different`)."""
    with report.entry(PART, "dense reference against NumPy") as entry:
        entry["error"] = reference_error()
        if not entry["error"] <= REFERENCE_TOLERANCE:
            entry["wrong"] = f"off by {entry['error']:.1e}, {REFERENCE_TOLERANCE:.0e} at most"
    load = Load(sizes.load)
    prepare = partial(_prepare, sizes=sizes)
    for done, (check, programs) in enumerate(compiled_ahead(checks, prepare, sizes.workers)):
        if deadline.passed:
            left = [c.name for c in checks[done:]]
            report.skip(PART, f"{len(left)} of {len(checks)} kernels, from “{left[0]}” on", "out of time", left)
            return
        with report.entry(PART, check.name) as entry:
            if isinstance(programs, Exception):
                raise programs
            inputs = programs.inputs(random_key(done))
            out = programs.kernel(inputs)
            entry["error"] = error = float(programs.error(inputs, out))
            entry["different"] = different = count_different(programs.kernel, inputs, out, sizes.repeats, load)
            most = check.tolerance
            wrong = [f"off by {error:.1e}, {most:.0e} at most"] if not error <= most else []
            wrong += [f"{different} of {sizes.repeats} runs gave other bits"] if different else []
            # XLA multiplies rounded, scaled queries: a figure to compare with, no requirement.
            if wrong and check.implementation != "xla":
                entry["wrong"] = "; ".join(wrong)
        progress(done + 1, len(checks))


@dataclasses.dataclass(frozen=True)
class Programs:
    """A check's executables."""

    inputs: Callable[[jax.Array], Inputs]  # of a random key
    kernel: Callable[[Inputs], jax.Array]
    error: Callable[[Inputs, jax.Array], jax.Array]  # of inputs and the kernel's output


def _prepare(check: Check, sizes: KernelSizes) -> Callable[[], Programs]:
    """Traces and lowers a check's programs; what it returns compiles them."""
    variant, rows = check.variant, sizes.rows(check.variant)

    def kernel(inputs: Inputs) -> jax.Array:
        return attend(variant, inputs, implementation=check.implementation, block_sizes=check.block_sizes(rows))

    def error(inputs: Inputs, out: jax.Array) -> jax.Array:
        return relative_error(out, dense_attention(variant, inputs, rows))

    key = random_key(0)
    inputs = random_inputs.lower(variant, rows, key)
    specs = jax.eval_shape(partial(random_inputs, variant, rows), key)
    lowered = jax.jit(kernel).lower(specs)
    judged = jax.jit(error).lower(specs, jax.eval_shape(kernel, specs))
    return lambda: Programs(inputs.compile(), lowered.compile(), judged.compile())


def compiled_ahead[T](
    items: Sequence[T], prepare: Callable[[T], Callable[[], Any]], workers: int
) -> Iterator[tuple[T, Any]]:
    """Each item and what the function that `prepare` made of it returned, or the error that came instead, in order.

    Tracing is Python: `prepare` is called here, for one after the other. Its results run in threads, to compile
    those that come next meanwhile.
    """
    pending: collections.deque[concurrent.futures.Future[Any] | Exception] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        todo = iter(items)
        try:
            for item in items:
                while len(pending) <= workers and (following := next(todo, None)) is not None:
                    try:
                        pending.append(pool.submit(prepare(following)))
                    except FAILURES as error:
                        pending.append(error)
                first = pending.popleft()
                if not isinstance(first, Exception):
                    try:
                        first = first.result()
                    except FAILURES as error:
                        first = error
                yield item, first
        finally:
            pool.shutdown(cancel_futures=True)


# --- the reference


@partial(jax.jit, static_argnums=(0, 2))
def dense_attention(variant: Variant, inputs: Inputs, rows: Rows) -> jax.Array:
    """The op in float32, all scores at once: [tokens or rows, query_len, heads, value_dim], as the op gives them."""
    keys, values = (_unpaged(inputs, rows, variant, of_values) for of_values in (False, True))
    new, context = jnp.asarray(rows.new(variant)), inputs.context_lens[:, None]
    n = max(rows.new(variant))
    own = jnp.arange(n)
    at = None
    if inputs.query_starts is not None:  # ragged rows, filled up to the longest
        at = jnp.minimum(inputs.query_starts[:-1, None] + own, inputs.query.shape[0] - 1)
    seen = _seen(inputs.tree_mask, context, own, keys.shape[1], variant.window)
    seen &= (context + new[:, None] > 0)[..., None]  # (a padding row sees nothing)

    def products(query: jax.Array) -> jax.Array:
        query = (query if at is None else query[at]).astype(jnp.float32)
        query = query.reshape(*query.shape[:2], variant.kv_heads, variant.group, variant.head_dim)
        return jnp.einsum("rqhgd,rkhd->rhgqk", query, keys)

    with jax.default_matmul_precision("highest"):  # else the tensor cores round to TF32
        scores = products(inputs.query)
        if variant.window_sinks:
            is_sink = jnp.arange(keys.shape[1]) < variant.window_sinks
            scores = jnp.where(is_sink, products(inputs.sink_query), scores)
        scores *= variant.scale
        if variant.soft_cap is not None:
            scores = variant.soft_cap * jnp.tanh(scores / variant.soft_cap)
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        total = weights.sum(-1, keepdims=True)
        if inputs.sink_logits is not None:
            logits = inputs.sink_logits.reshape(1, variant.kv_heads, variant.group, 1, 1)
            total += jnp.exp(logits - scores.max(-1, keepdims=True))
        weights = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
        out = jnp.einsum("rhgqk,rkhd->rqhgd", weights, values)
    out = out.reshape(*out.shape[:2], variant.heads, variant.value_dim)
    if at is None:
        return out
    flat = jnp.zeros((inputs.query.shape[0], *out.shape[2:]), jnp.float32)
    return flat.at[jnp.where(own < new[:, None], at, flat.shape[0])].set(out, mode="drop")


def _unpaged(inputs: Inputs, rows: Rows, variant: Variant, of_values: bool) -> jax.Array:
    """Keys or values in float32, [rows, keys, kv_heads, dim]; zeros where the row has written none."""
    pages, scales = inputs.k_pages, inputs.k_scales
    if of_values and inputs.v_pages is not None:
        pages, scales = inputs.v_pages, inputs.v_scales
    got = pages[LAYER, inputs.page_table].astype(jnp.float32)  # [rows, columns, kv_heads, page_size, dim]
    if scales is not None:
        got *= scales[LAYER, inputs.page_table][..., None]
    got = got.swapaxes(2, 3).reshape(len(rows.contexts), -1, variant.kv_heads, variant.head_dim)
    written = jnp.arange(got.shape[1]) < jnp.asarray(rows.keys(variant))[:, None]
    got = jnp.where(written[..., None, None], got, 0.0)
    return got[..., : variant.value_dim] if of_values else got


def _seen(
    tree_mask: jax.Array | None, context: jax.Array, own: jax.Array, keys: int, window: Window | None
) -> jax.Array:
    """Bool [rows, queries, keys], by the definition. A token's position is the context and its depth in the tree."""
    key = jnp.arange(keys)
    if tree_mask is None:
        position, key_position = context + own, key[None]
        seen = key <= position[..., None]
    else:
        bits = ((tree_mask[:, :, own // 32] >> (own % 32).astype(jnp.uint32)) & 1).astype(bool)
        offset = key - context
        number = jnp.clip(offset, 0, own.size - 1)
        bit = jnp.take_along_axis(bits, number[:, None], axis=2)
        seen = (offset < 0)[:, None] | (bit & (offset < own.size)[:, None])
        position = context + bits.sum(-1) - 1
        key_position = jnp.where(offset < 0, key, jnp.take_along_axis(position, number, axis=1))
    if window is None:
        return seen
    key_position = key_position[:, None]
    return seen & ((key_position >= window.start(position)[..., None]) | (key_position < window.sinks))


def relative_error(out: jax.Array, want: jax.Array) -> jax.Array:
    """‖out − want‖ / ‖want‖ of the worst vector; NaN if there is one, infinity for anything but zeros for zeros."""
    off = jnp.linalg.norm(out.astype(jnp.float32) - want, axis=-1)
    norm = jnp.linalg.norm(want, axis=-1)
    return jnp.max(jnp.where((off == 0) & (norm == 0), 0.0, off / norm))


def reference_error() -> float:
    """Of `dense_attention`, by NumPy in float64, for decode rows and for trees."""
    worst = 0.0
    for variant in (Variant("decode", 64, 8, "int8"), Variant("tree", 64, 8, query_len=5, kv_heads=1, group=2)):
        rows = Rows((0, 41, 9))
        inputs = random_inputs(variant, rows, random_key(7))
        got = np.asarray(dense_attention(variant, inputs, rows))
        worst = max(worst, float(np.abs(got - _naive(variant, jax.tree.map(np.asarray, inputs))).max()))
    return worst


def _naive(variant: Variant, inputs: Inputs) -> np.ndarray:
    """Row by row, query by query, head by head, key by key."""
    query, table = np.asarray(inputs.query, np.float64), inputs.page_table
    out, n = np.zeros(query.shape), variant.query_len

    def vector(pages: Any, scales: Any, row: int, head: int, key: int) -> np.ndarray:
        at = LAYER, table[row, key // variant.page_size], head, key % variant.page_size
        return np.asarray(pages[at], np.float64) * (1.0 if scales is None else float(scales[at]))

    for row, i, head in np.ndindex(*query.shape[:3]):
        context, kv_head = int(inputs.context_lens[row]), head // variant.group
        keys = list(range(context))
        for j in range(n):
            bit = j <= i if inputs.tree_mask is None else int(inputs.tree_mask[row, i, j // 32]) >> (j % 32) & 1
            keys += [context + j] if bit else []
        k = np.stack([vector(inputs.k_pages, inputs.k_scales, row, kv_head, key) for key in keys])
        v = np.stack([vector(inputs.v_pages, inputs.v_scales, row, kv_head, key) for key in keys])
        weights = np.exp(variant.scale * (k @ query[row, i, head]))
        out[row, i, head] = weights @ v / weights.sum()
    return out


# --- the same bits every time


class Load:
    """Other work for the device: a matrix product on its cores, a copy from the host over its memory."""

    def __init__(self, side: int):
        self._matrix = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
        self._product = jax.jit(lambda x: x @ x)
        self._host = np.ones((side, side), np.float32)

    def start(self, number: int) -> Any:
        """Nothing, a product that comes before, or a copy that goes on meanwhile, by turns. To be held to the end."""
        if number % 3 == 0:
            return None
        return self._product(self._matrix) if number % 3 == 1 else jax.device_put(self._host)


def count_different(
    run: Callable[[Inputs], jax.Array], inputs: Inputs, first: jax.Array, repeats: int, load: Load
) -> int:
    """How many of `repeats` further runs give other bits than the first, under varying load."""
    differ, held = [], []
    for number in range(repeats):
        held.append(load.start(number))
        differ.append(_differ(run(inputs), first))
    return int(sum(int(d) for d in differ))


@jax.jit
def _differ(a: jax.Array, b: jax.Array) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return (jax.lax.bitcast_convert_type(a, bits) != jax.lax.bitcast_convert_type(b, bits)).any()
