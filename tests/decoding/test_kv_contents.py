"""What pages hold, in every tier, after whatever happened: exactly the KV of their tokens, recomputed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flax import nnx

from specax import Engine, SamplingParams
from specax.model import Decoder
from specax.model.batch import ForwardBatch, PrefillSegment
from specax.paged import CacheSpec, KVCache
from specax.sharding import Layout
from tests.decoding.test_kv import VOCAB, engine_of, finish, model

__all__ = ["model"]

type Recompute = Callable[[Decoder, Sequence[int]], tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def recompute() -> Recompute:
    """Keys and values [layers, tokens, kv_heads, head_dim] of a sequence, computed in one piece into an empty cache."""

    @nnx.jit
    def forward(model: Decoder, batch: ForwardBatch) -> Any:
        spec = CacheSpec(model.config.num_layers, model.padded.num_kv_heads, model.config.head_dim, 64, "float32")
        kv = KVCache.create((spec,), (2,), Layout())
        return model.forward(kv, batch)[2]

    def run(model: Decoder, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        flat = np.zeros(64, np.int32)
        flat[: len(tokens)] = tokens
        at = np.arange(64, dtype=np.int32)
        segment = PrefillSegment(np.array([0, len(tokens)], np.int32), np.ones((1, 1, 1), np.int32), at[:1])
        kv = forward(model, ForwardBatch(flat, at, 64 + at[None], at[:1], prefill=segment))
        return tuple(np.asarray(x[0])[:, 1].swapaxes(1, 2)[:, : len(tokens)] for x in (kv.k, kv.v))  # type: ignore

    return run


def check_contents(engine: Engine, model: Decoder, recompute: Recompute) -> int:
    """All pages of running tables, and of the cache in every tier but the disk, against a recomputation."""
    memory, size = engine.memory, engine.config.page_size
    engine.runner.move_pages(memory.take_ops())  # what is owed
    k, v = (np.asarray(x[0]) for x in (engine.runner.kv.k, engine.runner.kv.v))

    def check(tokens: Sequence[int], start: int, pages: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        want = recompute(model, tokens)
        for name, right, have in zip("kv", want, zip(*pages)):
            joined = np.concatenate([page.swapaxes(1, 2) for page in have], axis=1)  # [layers, tokens, heads, dim]
            skipped = start // size * size
            part = joined[:, start - skipped : len(tokens) - skipped]
            np.testing.assert_allclose(part, right[:, start:], atol=3e-5, err_msg=name)

    checked = 0
    for s in engine.scheduler.running:
        if s.computed:
            pages = [(k[:, page], v[:, page]) for page in s.table.pages[0].tolist()]
            check(list(s.tokens[: s.computed]), 0, pages)
            checked += 1
    for node in memory.tree.nodes():
        tokens = np.concatenate([part.tokens for part in memory.tree.path(node)]).tolist()
        if node.pages is not None:
            check(tokens, node.start, [(k[:, page], v[:, page]) for page in node.pages[0].tolist()])
            checked += 1
        if node.host is not None:
            cells = [cell.resolve() for cell in node.host[0] if cell is not None]
            check(tokens, node.start, [(np.asarray(one), np.asarray(two)) for one, two in cells])
            checked += 1
    return checked


@pytest.mark.parametrize(
    ("seed", "steps"), [(0, 60), *(pytest.param(seed, 300, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_contents_under_random_operations(model: Decoder, recompute: Recompute, seed: int, steps: int) -> None:
    """Submissions, samples, beams, salts, aborts, evictions, swaps, new weights: pages hold what they should."""
    rng = np.random.default_rng(seed)
    models = [model, Decoder(model.config, rngs=nnx.Rngs(3), layout=Layout())]
    settings = {"preemption": ["swap", "recompute"][seed % 2], "policy": ["fcfs", "lpm", "fair"][seed % 3]}
    engine = engine_of(model, num_pages=19, host_cache_gb=0.0005, **settings)
    current, checked, ids = model, 0, list[str]()
    system = rng.integers(0, VOCAB, 20).tolist()
    for step in range(steps):
        if rng.random() < 0.6:
            prompt = system[: rng.integers(0, 13)] + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
            n, width = (int(rng.integers(1, 4)), 1) if rng.random() < 0.7 else (1, 3)
            length = int(rng.integers(1, 14))
            params = SamplingParams(n=n, beam_width=width, seed=step, max_tokens=length, ignore_eos=True)
            ids.append(engine.submit(prompt, params, cache_salt="ab"[step % 2], tenant="xyz"[step % 3]))
        if ids and rng.random() < 0.05:
            engine.abort(ids[rng.integers(len(ids))])
        if rng.random() < 0.02:
            current = models[rng.integers(2)]
            engine.update_weights(current)
        engine.step()
        if rng.random() < 0.15:
            checked += check_contents(engine, current, recompute)
    finish(engine)
    checked += check_contents(engine, current, recompute)
    stats = engine.stats()
    assert checked > 20 and stats["prefix_evicted_tokens"] > 0
    assert stats["preemptions"] > 0 or settings["policy"] == "fair"  # (it happens not to need any)
    assert stats["pages_saved"] > 0 and stats["prefix_hit_tokens"] > 0
    tree = engine.memory.tree
    tree.reclaim(0, tree.evictable[0])
    assert engine.memory.pools[0].num_free == engine.memory.pools[0].num_pages - 1
