"""Attention through a window, with and without sinks, against the definition written out key by key.

The reference's cases take away what a window has left behind, as the host plane would.
"""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specax.pallas_kernels import Window, paged_attention, paged_prefill_attention, xla_attention
from tests.pallas_kernels.reference import IMPLEMENTATIONS, check, make_case, make_prefill_case, run, visible

GQA: dict[str, Any] = {"heads": 6, "kv_heads": 3, "head_dim": 16, "page_size": 8, "max_keys": 384}
WINDOWS = {
    "one_key": Window(1),
    "mistral": Window(20),
    "wider_than_most": Window(200),
    "streaming": Window(24, sinks=4, granularity=8),
    "whole_pages_of_sinks": Window(50, sinks=16, granularity=8),
    "many_sinks": Window(30, sinks=70),
}


class TestWindow:
    @pytest.mark.parametrize("window", WINDOWS.values(), ids=str)
    def test_positions(self, window: Window) -> None:
        positions = np.arange(260)
        for n in positions.tolist():
            seen = visible(window, n)
            assert seen == {j for j in range(n + 1) if j >= window.start(n) or j < window.sinks}
            assert window.rebased(n) == len(seen) - 1  # its place among the keys that it sees
        for convert in (np.asarray, jnp.asarray):
            for method in (window.start, window.rebased):
                got = np.asarray(method(convert(positions)))
                assert got.tolist() == [method(n) for n in positions.tolist()]

    def test_padding_starts_at_zero(self) -> None:
        assert Window(8, 4, 4).start(-7) == 0

    @pytest.mark.parametrize("field", ["size", "sinks", "granularity"])
    def test_nonsense(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"window: {field} must be an integer ≥ [01], got -1"):
            Window(**{"size": 8, field: -1})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", WINDOWS)
class TestAttention:
    @pytest.mark.parametrize("n", [1, 7])
    def test_decode(self, implementation: str, name: str, n: int, rng: np.random.Generator) -> None:
        """Rows of very different lengths; draft trees, whose positions are counted by depth, for n > 1."""
        contexts = [0, 377, 21, -n, 9, 128, 70, 250]
        case = make_case(rng, contexts=contexts, query_len=n, tree=n > 1, window=WINDOWS[name], **GQA)
        got = check(case, implementation)
        # The same bits without the other rows.
        for row in (1, 4):
            alone = np.where(np.arange(8) == row, case.context_lens, -n).astype(np.int32)
            np.testing.assert_array_equal(
                run(dataclasses.replace(case, context_lens=alone), implementation)[row], got[row]
            )

    def test_prefill(self, implementation: str, name: str, rng: np.random.Generator) -> None:
        for lengths, contexts in (([70, 0, 3, 64, 5], [0, 9, 130, 5, 300]), ([0, 160, 0, 0, 0], [0, 224, 0, 0, 0])):
            options = GQA | {"tokens": 160, "window": WINDOWS[name]}
            got = check(make_prefill_case(rng, lengths=lengths, contexts=contexts, **options), implementation)
            assert not got[sum(lengths) :].any()


@pytest.mark.parametrize("name", ["mistral", "streaming"])
def test_chunks_change_no_bit(name: str, rng: np.random.Generator) -> None:
    case = make_prefill_case(rng, lengths=[160], contexts=[0], tokens=160, window=WINDOWS[name], **GQA)
    sink_query = case.query if case.sink_query is None else case.sink_query

    def part(start: int, stop: int) -> np.ndarray:
        query, sinks = (np.roll(x, -start, axis=0) for x in (case.query, sink_query))
        starts, context = np.array([0, stop - start], np.int32), np.array([start], np.int32)
        chunk = dataclasses.replace(case, query=query, sink_query=sinks, query_starts=starts, context_lens=context)
        return run(chunk)[: stop - start]

    cuts = [0, 1, 37, 101, 160]
    chunked = np.concatenate([part(a, b) for a, b in itertools.pairwise(cuts)])
    np.testing.assert_array_equal(chunked, part(0, 160))


@pytest.mark.parametrize("window", [Window(64), Window(64, sinks=4, granularity=16)], ids=str)
def test_work_grows_with_the_window_not_the_context(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, counted = xla_attention._gather, []

    def counting(pages: jax.Array, layer: int, ids: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: counted.append(ids.shape[1] * 16))  # keys per row
        return gather(pages, layer, ids)

    monkeypatch.setattr(xla_attention, "_gather", counting)
    pages = jnp.zeros((1, 2, 1, 16, 4))
    table = jnp.ones((2, 2048), jnp.int32)
    static: Any = {"layer": 0, "scale": 1.0, "window": window}
    decode = jax.jit(partial(paged_attention, **static))  # (traced here, with the counter in it)
    prefill = jax.jit(partial(paged_prefill_attention, **static))
    decode(jnp.ones((2, 1, 1, 4)), pages, pages, table, jnp.array([32000, 5], jnp.int32))
    jax.effects_barrier()
    assert 0 < sum(counted) <= 2 * (64 + 2 * 64 + 16)  # keys and values: the window, a block more, the sinks
    counted.clear()
    starts, context = jnp.array([0, 8, 16], jnp.int32), jnp.array([32000, 0], jnp.int32)
    prefill(jnp.ones((16, 1, 4)), pages, pages, starts, table, context)
    jax.effects_barrier()
    assert 0 < sum(counted) <= 2 * 2 * (64 + 2 * 128 + 16)


def test_sinks_need_a_window_as_long_as_a_row(rng: np.random.Generator) -> None:
    case = make_case(rng, contexts=[0], query_len=9, window=Window(8, sinks=1), **GQA)
    with pytest.raises(ValueError, match="9 queries need a window of at least as many keys, got Window"):
        run(case)
