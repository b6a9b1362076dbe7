"""The cache and the sampler's state are updated in place: no compiled step makes a second copy of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from specax.decoding.batch import empty_batch
from specax.decoding.buckets import Shape
from specax.decoding.page_mover import AT_A_TIME
from specax.decoding.runner import Runner
from specax.decoding.sampler import SamplerState
from specax.decoding.sampling_table import SamplingTable
from specax.model import Decoder
from specax.model.batch import DecodeSegment, ForwardBatch
from specax.paged import CacheSpec, KVCache
from specax.pallas_kernels import Window, quantize_kv, write_kv, write_kv_scales
from specax.sharding import Layout, make_mesh
from tests.conftest import TINY

SPEC = CacheSpec(layers=2, kv_heads=2, head_dim=8, page_size=16, dtype="float32")
SMALL, LARGE = 4096, 16384  # pages: 8 and 32 MiB per cache array
SLOTS = 8
SHAPES = {
    "decode": Shape(decode_rows=4, prefill_tokens=0, prefill_rows=0, pages=16, logit_rows=4),
    "prefill": Shape(decode_rows=0, prefill_tokens=64, prefill_rows=4, pages=16, logit_rows=4),
    "mixed": Shape(decode_rows=4, prefill_tokens=32, prefill_rows=2, pages=16, logit_rows=4),
}


@pytest.fixture(scope="module")
def runner(tiny_model: Decoder) -> Runner:
    return Runner(tiny_model, (SPEC,), num_pages=(2,), slots=SLOTS)


def array_bytes(pages: int) -> int:
    """Of the keys, or the values, of the whole pool."""
    return SPEC.page_bytes * pages // 2


def abstract_cache(pages: int, sharding: Any = None, groups: int = 1) -> KVCache:
    """A cache's shape; nothing is allocated to compile for it."""
    shape = (SPEC.layers // groups, pages, SPEC.kv_heads, SPEC.page_size, SPEC.head_dim)
    all_groups: Any = (jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding),) * groups
    return KVCache(k=all_groups, v=all_groups)


def tree_batch(rows: int, n: int) -> ForwardBatch:
    """Verification of draft trees: rows of N tokens with a mask."""
    ints = lambda *dims: np.zeros(dims, np.int32)  # noqa: E731
    mask = np.zeros((rows, n, 1), np.uint32)
    decode = DecodeSegment(ints(1, rows, 16), ints(rows) - n, mask, query_len=n)
    tokens = ints(rows * n)
    return ForwardBatch(tokens, tokens, tokens[None], logit_rows=tokens, decode=decode)


def check_in_place(small: Any, large: Any, parts: int = 1) -> None:
    """Both cache arrays are aliased, and scratch memory does not grow with the pool."""
    for stats, pages in ((small, SMALL), (large, LARGE)):
        assert stats.alias_size_in_bytes >= 2 * array_bytes(pages) // parts
        assert stats.temp_size_in_bytes < array_bytes(pages) // parts // 8
    assert abs(large.temp_size_in_bytes - small.temp_size_in_bytes) < 4096


@pytest.mark.parametrize("kind", [*SHAPES, "tree"])
def test_forward(runner, kind):
    batch = tree_batch(4, 5) if kind == "tree" else empty_batch(SHAPES[kind])

    def stats(pages: int) -> Any:
        return runner._forward.lower(runner._params, abstract_cache(pages), batch).compile().memory_analysis()

    check_in_place(stats(SMALL), stats(LARGE))


def test_forward_on_a_mesh():
    layout = Layout(make_mesh(tensor=2))
    runner = Runner(Decoder(TINY, rngs=nnx.Rngs(0), layout=layout), (SPEC,), num_pages=(2,), slots=SLOTS)
    params = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in runner._params]
    sharding = runner.kv.k[0].sharding

    def stats(pages: int) -> Any:
        batch = empty_batch(SHAPES["mixed"])
        return runner._forward.lower(params, abstract_cache(pages, sharding), batch).compile().memory_analysis()

    check_in_place(stats(SMALL), stats(LARGE), parts=2)


@pytest.mark.parametrize(
    ("windows", "window"),
    [((64, None), None), ((), Window(64, sinks=4, granularity=16))],
    ids=["interleaved", "streaming"],
)
def test_forward_with_windows(windows: tuple[int | None, ...], window: Window | None) -> None:
    model = Decoder(dataclasses.replace(TINY, windows=windows), rngs=nnx.Rngs(0), layout=Layout())
    groups = len(model.config.kv_groups)
    graphdef, state = nnx.split(model)

    def forward(state: Any, kv: KVCache, batch: ForwardBatch) -> Any:
        hidden, _, kv = nnx.merge(graphdef, state).forward(kv, batch, window=window)
        return hidden, kv

    step = jax.jit(forward, donate_argnums=1)

    def stats(pages: int) -> Any:
        batch = empty_batch(SHAPES["mixed"], groups)
        return step.lower(state, abstract_cache(pages, groups=groups), batch).compile().memory_analysis()

    check_in_place(stats(SMALL), stats(LARGE))


def test_quantised_writes() -> None:
    """In int8, with the scales. (XLA's CPU backend widens float8 arrays to write into them; on GPUs it does not.)"""

    def write(kv: Any, scales: Any, new: Any, slots: Any) -> Any:
        values, of_tokens = quantize_kv(new, jnp.int8)
        return write_kv(kv, 1, values, slots), write_kv_scales(scales, 1, of_tokens, slots)

    def stats(pages: int) -> Any:
        shape = (SPEC.layers, pages, SPEC.kv_heads, SPEC.page_size, SPEC.head_dim)
        cache = jax.ShapeDtypeStruct(shape, np.int8), jax.ShapeDtypeStruct(shape[:-1], np.float32)
        new = np.zeros((20, SPEC.kv_heads, SPEC.head_dim), np.float32)
        step = jax.jit(write, donate_argnums=(0, 1))
        return step.lower(*cache, new, np.zeros(20, np.int32)).compile().memory_analysis()

    small, large = stats(SMALL), stats(LARGE)
    for got, pages in ((small, SMALL), (large, LARGE)):
        # int8 is a quarter of the float32 array; its scales, four bytes for eight entries, half of that.
        assert got.alias_size_in_bytes >= array_bytes(pages) // 4 * 3 // 2
    assert max(small.temp_size_in_bytes, large.temp_size_in_bytes) < 4096


@pytest.mark.parametrize("kind", ["copy", "load"])
def test_pages_move(runner, kind):
    ids = np.zeros(AT_A_TIME, np.int32)
    page = np.zeros((SPEC.layers, SPEC.kv_heads, SPEC.page_size, SPEC.head_dim), np.float32)

    def stats(pages: int) -> Any:
        kv, mover = abstract_cache(pages), runner._mover
        if kind == "copy":
            return mover._copy.lower(0, kv, ids, ids).compile().memory_analysis()
        return mover._load.lower(0, kv, ids, [(page, page)] * AT_A_TIME).compile().memory_analysis()

    check_in_place(stats(SMALL), stats(LARGE))


def test_sampler_state(runner, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # `lower` fills dataclasses with no arrays
    state = SamplerState.create(1000, TINY.vocab_size)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    logits = np.zeros((4, TINY.vocab_size), np.float32)
    inputs = SamplingTable(SLOTS, TINY.vocab_size).inputs([], 4)
    history = np.zeros(TINY.max_position, np.int32), np.int32(0), np.int32(0)
    bias = np.zeros(TINY.vocab_size, np.float32)
    for lowered in (
        runner._sample.lower(logits, state, inputs),
        runner._load_slot.lower(state, np.int32(0), *history, bias),
    ):
        stats = lowered.compile().memory_analysis()
        assert stats.alias_size_in_bytes >= size
        assert stats.temp_size_in_bytes < size // 8


def test_a_step_keeps_the_cache_where_it_is(runner):
    """Not only in the compiler's plan: the buffers of the next cache are those of the last."""
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner.kv)]
    old = runner.kv
    runner.forward(empty_batch(SHAPES["mixed"]))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner.kv)] == pointers
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
