"""The whole engine on the device at hand: steps of small models against float32, and requests from end to end.

Weights are random: nothing is downloaded. Logits are compared, not tokens, which a rounding can change.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specax.decoding.batch import empty_batch
from specax.decoding.buckets import Shape
from specax.decoding.config import EngineConfig
from specax.decoding.engine import Engine
from specax.decoding.gpu.check_steps import LLAMA_3_8B
from specax.decoding.gpu.device_report import Deadline, Report
from specax.decoding.gpu.device_timings import Ceilings
from specax.decoding.gpu.variants import pack_bits, random_trees
from specax.decoding.runner import step_functions
from specax.decoding.sampling_params import SamplingParams
from specax.model import Decoder, ModelConfig
from specax.model.batch import DecodeSegment, ForwardBatch, PrefillSegment
from specax.paged import CacheSpec, KVCache
from specax.pallas_kernels.dispatch import Implementation
from specax.sharding import Layout

PART, TIMINGS = "engine", "timings"
# Of ‖logits − float32's‖ / ‖float32's‖: bfloat16 weights times bfloat16 activations cost most of it, whatever
# implements attention. Twice as far off as with XLA's attention is too far, too.
TOLERANCE, TIMES_XLA = 3e-2, 2.0

NARROW = ModelConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64,
    max_position=2048,
)  # fmt: skip
WIDE = dataclasses.replace(NARROW, num_heads=8, num_kv_heads=1, head_dim=128)


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """How large the cases are. The defaults are for a GPU."""

    models: tuple[ModelConfig, ...] = (NARROW, WIDE)
    prompts: tuple[int, ...] = (700, 90, 33, 260)  # tokens of each row's first chunk
    chunk: int = 64  # tokens of each row's second one
    tree: int = 12  # tokens of a draft tree
    page_size: int = 16
    requests: int = 10
    max_tokens: int = 48


# --- steps, by implementation


@dataclasses.dataclass(frozen=True)
class Step:
    """A batch, and the tokens whose logits count."""

    name: str
    batch: ForwardBatch


def steps(config: ModelConfig, sizes: EngineSizes) -> list[Step]:
    """Two prefill chunks, a decode step and draft trees, one after the other on the same rows."""
    rng = np.random.default_rng(0)
    prompts, rows = np.asarray(sizes.prompts), len(sizes.prompts)
    columns = -(-(int(prompts.max()) + sizes.chunk + 1 + sizes.tree) // sizes.page_size)
    table = (1 + rng.permutation(rows * columns)).reshape(rows, columns).astype(np.int32)

    def slots(row: int, start: int, stop: int) -> np.ndarray:
        page, offset = np.divmod(np.arange(start, stop), sizes.page_size)
        return table[row, page] * sizes.page_size + offset

    def flat(context: np.ndarray, lengths: np.ndarray, depths: np.ndarray | None = None) -> dict[str, Any]:
        at = [slots(r, c, c + n) for r, (c, n) in enumerate(zip(context.tolist(), lengths.tolist()))]
        own = [np.arange(n) for n in lengths.tolist()] if depths is None else list(depths)
        count = int(lengths.sum())
        return {
            "tokens": rng.integers(0, config.vocab_size, count).astype(np.int32),
            "positions": np.concatenate([c + o for c, o in zip(context, own)]).astype(np.int32),
            "slots": np.concatenate(at)[None].astype(np.int32),
            "logit_rows": np.arange(count, dtype=np.int32),
        }

    def prefill(context: np.ndarray, lengths: np.ndarray) -> ForwardBatch:
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        segment = PrefillSegment(starts, table[None], context.astype(np.int32))
        return ForwardBatch(**flat(context, lengths), prefill=segment)

    first, second = np.zeros_like(prompts), np.full(rows, sizes.chunk)
    context = prompts + second
    segment = DecodeSegment(table[None], context.astype(np.int32))
    one = ForwardBatch(**flat(context, np.ones_like(prompts)), decode=segment)
    context = context + 1
    sees = random_trees(jax.random.key(0), rows, sizes.tree)
    depths = np.asarray(sees.sum(-1)) - 1
    mask = np.asarray(pack_bits(sees))
    segment = DecodeSegment(table[None], context.astype(np.int32), mask, query_len=sizes.tree)
    trees = ForwardBatch(**flat(context, np.full(rows, sizes.tree), depths), decode=segment)
    return [
        Step("prefill", prefill(first, prompts)),
        Step("prefill over a context", prefill(prompts, second)),
        Step("decode", one),
        Step(f"trees of {sizes.tree}", trees),
    ]


def step_logits(
    model: Decoder, todo: list[Step], sizes: EngineSizes, implementation: Implementation
) -> dict[str, np.ndarray]:
    """Logits of every token of each step."""
    model.attention = implementation
    graphdef, state = nnx.split(model)
    params, tree = jax.tree.flatten(state)
    forward, logits = step_functions(graphdef, tree)
    c = model.config
    spec = CacheSpec(c.num_layers, c.num_kv_heads, c.head_dim, sizes.page_size, str(model.dtype))
    pages = 1 + max(int(step.batch.slots.max()) for step in todo) // sizes.page_size
    kv, out = KVCache.create((spec,), (pages,), Layout()), {}
    with jax.default_matmul_precision("highest"):
        run, head = jax.jit(forward, donate_argnums=1), jax.jit(logits)
        for step in todo:
            hidden, _, kv = run(params, kv, step.batch)
            out[step.name] = np.asarray(head(params, hidden))
    return out


def compare_steps(report: Report, config: ModelConfig, sizes: EngineSizes, kernels: Implementation) -> None:
    """One entry: how far logits are from float32's, with the kernels and with XLA's attention."""
    with report.entry(PART, f"steps, head dim {config.head_dim}") as entry:
        model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, layout=Layout())
        exact = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32, layout=Layout())
        nnx.update(exact, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))
        todo = steps(config, sizes)
        want = step_logits(exact, todo, sizes, "xla")
        xla, ours = (step_logits(model, todo, sizes, i) for i in ("xla", kernels))
        wrong = []
        for step in todo:
            error, error_xla = (_error(logits[step.name], want[step.name]) for logits in (ours, xla))
            entry[step.name] = {"error": error, "error_xla": error_xla}
            most = min(TOLERANCE, TIMES_XLA * error_xla)
            if not error <= most:
                wrong.append(f"{step.name}: logits are off by {error:.1e}, {most:.1e} at most")
        if wrong:
            entry["wrong"] = "; ".join(wrong)


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# --- requests, from end to end


def serve(report: Report, config: ModelConfig, sizes: EngineSizes, kernels: Implementation) -> None:
    """One entry: an engine with a pool that is too small serves requests with a common prefix, in chunks."""
    with report.entry(PART, f"requests, head dim {config.head_dim}") as entry:
        size = sizes.page_size
        prefix, own = size + size // 4, 3 * size // 4  # together two pages
        row = 2 + -(-sizes.max_tokens // size)
        # Room for all four prompts, but not for what they grow to.
        settings = EngineConfig(
            page_size=size, num_pages=1 + 2 * row, max_rows=4, max_batched_tokens=32, max_model_len=row * size
        )
        model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, layout=Layout())
        model.attention = kernels
        engine = Engine(model, settings)
        entry["warmup_seconds"] = round(engine.warmup(), 1)
        rng = np.random.default_rng(0)
        common = rng.integers(0, config.vocab_size, prefix).tolist()
        params = SamplingParams(temperature=0, max_tokens=sizes.max_tokens, ignore_eos=True)
        prompts = [common + rng.integers(0, config.vocab_size, own).tolist() for _ in range(sizes.requests)]
        tokens: dict[str, int] = {engine.submit(prompt, params): 0 for prompt in prompts}
        reasons, start = [], time.perf_counter()
        while engine.has_work:
            for output in engine.step():
                for sample in output.outputs:
                    tokens[output.request_id] += len(sample.token_ids)
                    reasons += [sample.finish_reason] if sample.finish_reason else []
        seconds, stats = time.perf_counter() - start, engine.stats()
        entry["tokens_per_second"] = sum(tokens.values()) / seconds
        names = ("steps", "preemptions", "prefix_hit_tokens", "compilations_after_warmup")
        entry |= {name: stats[name] for name in names}
        wrong = []
        if set(reasons) != {"length"} or set(tokens.values()) != {sizes.max_tokens}:
            wrong.append(f"requests ended with {sorted(set(reasons))} after {sorted(set(tokens.values()))} tokens")
        if stats["pages_free"] + stats["pages_cached"] != stats["pages_total"]:
            back = stats["pages_free"] + stats["pages_cached"]
            wrong.append(f"{back} of {stats['pages_total']} pages came back")
        if stats["compilations_after_warmup"]:
            wrong.append(f"{stats['compilations_after_warmup']} compilations after warm-up")
        wrong += [f"no {name}: the run did not test them" for name in names[1:3] if not stats[name]]
        if wrong:
            entry["wrong"] = "; ".join(wrong)


def check_engine(
    report: Report,
    deadline: Deadline,
    sizes: EngineSizes = EngineSizes(),
    kernels: Implementation = "mosaic_gpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Both checks with each of the models."""
    jobs = [(check, config) for config in sizes.models for check in (compare_steps, serve)]
    for done, (check, config) in enumerate(jobs):
        if deadline.passed:
            report.skip(PART, f"{len(jobs) - done} of {len(jobs)} checks", "out of time")
            return
        check(report, config, sizes, kernels)
        progress(done + 1, len(jobs))


# --- the time of a step


def time_step(
    report: Report,
    ceilings: Ceilings | None,
    implementation: Implementation = "mosaic_gpu",
    config: ModelConfig = LLAMA_3_8B,
    rows: int = 64,
    context: int = 4096,
    calls: int = 10,
) -> None:
    """One entry: a decode step, from tokens to the next tokens, of a model with random weights in bfloat16.

    Its bytes are those of the weights, of which an untied embedding's are not read, and of all keys and values.
    """
    what = f"{config.num_layers} layers of {config.hidden_size}, {rows} × {context} keys"
    with report.entry(TIMINGS, f"decode step, {what}, {implementation}") as entry:
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, layout=Layout()))
        model.attention = implementation
        graphdef, state = nnx.split(model)
        specs, tree = jax.tree.flatten(state)
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(specs))
        params = [_random(key, spec.shape, spec.dtype) for key, spec in zip(keys, specs, strict=True)]
        forward, logits = step_functions(graphdef, tree)
        size = 16  # of a page
        columns = -(-context // size)
        cache = CacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, size, "bfloat16")
        kv = KVCache.create((cache,), (rows * columns + 1,), Layout())
        table = 1 + np.random.default_rng(0).permutation(rows * columns).reshape(1, rows, columns).astype(np.int32)
        position = np.full(rows, context - 1, np.int32)
        batch = dataclasses.replace(
            empty_batch(Shape(rows, 0, 0, columns, rows)),
            positions=position,
            slots=table[:, :, -1] * size + (context - 1) % size,
            logit_rows=np.arange(rows, dtype=np.int32),
            decode=DecodeSegment(table, position),
        )

        def step(params: Any, kv: KVCache, tokens: jax.Array, batch: ForwardBatch) -> tuple[jax.Array, KVCache]:
            hidden, _, kv = forward(params, kv, dataclasses.replace(batch, tokens=tokens))
            return jnp.argmax(logits(params, hidden), axis=-1).astype(jnp.int32), kv

        tokens = jnp.zeros(rows, jnp.int32)
        batch = jax.device_put(batch)
        run = jax.jit(step, donate_argnums=1).lower(params, kv, tokens, batch).compile()
        taken = []
        for repeat in range(4):
            start = time.perf_counter()
            for _ in range(calls if repeat else 1):  # the first is a warm-up
                tokens, kv = run(params, kv, tokens, batch)
            tokens.block_until_ready()
            taken += [(time.perf_counter() - start) / calls] if repeat else []
        seconds = statistics.median(taken)
        weights = sum(x.nbytes for x in params)
        weights -= 0 if config.tie_embeddings else 2 * config.vocab_size * config.hidden_size
        moved = weights + cache.page_bytes // size * rows * context
        entry |= {"workload": f"decode step, {what}", "implementation": implementation, "us": 1e6 * seconds}
        entry |= {"gb_s": moved / seconds / 1e9, "tokens_per_second": rows / seconds}
        if ceilings is not None:
            entry["of_copy"] = moved / seconds / ceilings.copy


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, dtype)
