"""The attention kernels against the naive reference, in Pallas' interpreter; XLA on the same cases.

A program takes one or two seconds to trace, a thread block a tenth of a second, a block of keys half of that. So
there are few programs here, each with several things at once, and what is drawn at random is contents: lengths,
tables, trees. Programs are drawn in `test_drawn_shapes`, a slow one.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specax.pallas_kernels import BlockSizes, Window
from specax.pallas_kernels.mosaic.consumer import LOG2_E, Scoring
from tests.pallas_kernels.reference import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT8,
    KERNELS,
    Case,
    check,
    make_case,
    make_prefill_case,
    permuted,
    run,
    seen_keys,
)

MAX_KEYS = 256


@dataclasses.dataclass(frozen=True)
class Program:
    """What a kernel is compiled for: everything of a call but its contents."""

    heads: int
    head_dim: int
    page_size: int
    dtype: np.dtype = BFLOAT16  # of pages
    kv_heads: int = 1
    query_len: int = 1
    tree: bool = False
    blocks: BlockSizes | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_keys: int = MAX_KEYS

    @property
    def geometry(self) -> dict[str, Any]:
        names = ("heads", "kv_heads", "head_dim", "page_size", "dtype", "max_keys")
        return {name: getattr(self, name) for name in names} | self.options

    def case(self, rng: np.random.Generator, contexts: list[int]) -> Case:
        case = make_case(rng, contexts=contexts, query_len=self.query_len, tree=self.tree, **self.geometry)
        return garbled(case, rng)

    def edges(self) -> list[int]:
        """Contexts at which the row's last key, or the window's first, is at the edge of a page or of a block."""
        window = self.options.get("window")
        ends = [e + d for e in (self.page_size, 64, 128, 192) for d in (-1, 0, 1)]
        found = {0, 1, *ends, *(e - self.query_len for e in ends), self.max_keys - self.query_len}
        if window is not None:
            found |= {e + window.size - 1 for e in ends}
        return sorted(c for c in found if 0 <= c <= self.max_keys - self.query_len)


def garbled(case: Case, rng: np.random.Generator) -> Case:
    """With any numbers in the entries of pages of which the row sees nothing: others' pages, and none at all."""
    table, size = case.page_table.copy(), case.k_pages.shape[3]
    for row, sees in enumerate(case.sees):
        context = int(case.context_lens[row])
        seen = seen_keys(context, sees, case.window).any(0) if context >= 0 and len(sees) else np.zeros(0, bool)
        columns = np.unique(np.flatnonzero(seen) // size)
        unseen = np.setdiff1d(np.arange(table.shape[1]), columns)
        pages = case.k_pages.shape[1]
        table[row, unseen] = rng.choice([-1, pages, 2**31 - 1, *range(pages)], size=unseen.size)
    return dataclasses.replace(case, page_table=table)


CAPPED: dict[str, Any] = {"soft_cap": 1.5, "window": Window(40)}
GPT_OSS: dict[str, Any] = {"sink_logits": True, "window": Window(100)}
ALL: dict[str, Any] = {"soft_cap": 2.0, "sink_logits": True, "window": Window(70), "query_dtype": FLOAT16}
BF16: dict[str, Any] = {"query_dtype": BFLOAT16}
LATENT: dict[str, Any] = {"value_dim": 64}
STREAMING: dict[str, Any] = {"window": Window(40, sinks=5, granularity=16)}

DECODE = {
    # Keys as the tensor core's rows: at most 32 packed queries.
    "plain": Program(4, 64, 16),
    "splits": Program(7, 128, 8, FLOAT16, blocks=BlockSizes(splits=3), options={"sink_logits": True}),
    "wide": Program(1, 256, 32, options=CAPPED),
    "float8": Program(8, 128, 16, FLOAT8, options=ALL),
    "int8_tree": Program(3, 64, 64, INT8, query_len=5, tree=True, blocks=BlockSizes(splits=2), options=BF16),
    "tree_of_two_words": Program(1, 64, 8, query_len=32, tree=True, options={"window": Window(5)}),
    "latent": Program(16, 576, 16, options={"value_dim": 512}),
    "latent_tree": Program(
        4, 128, 8, FLOAT16, query_len=5, tree=True, blocks=BlockSizes(splits=2), options=LATENT | {"window": Window(30)}
    ),
    # Queries as rows, 64 to a warpgroup.
    "two_warpgroups": Program(4, 64, 16, query_len=40, tree=True),
    "rows_wide": Program(3, 256, 32, FLOAT16, query_len=20, tree=True, options={"soft_cap": 1.5, "window": Window(7)}),
    "rows_int8": Program(1, 64, 8, INT8, query_len=64, tree=True, options=BF16 | {"sink_logits": True}),
    "many_heads": Program(72, 64, 64),
    "large_pages": Program(2, 64, 128),  # blocks are parts of pages
    "streaming_tree": Program(3, 64, 16, query_len=5, tree=True, options=STREAMING | {"sink_logits": True}),
}
MORE_DECODE = {
    "streaming": Program(4, 64, 8, INT8, options=STREAMING | BF16),
    "two_kv_heads": Program(6, 64, 64, kv_heads=2, blocks=BlockSizes(stages=3), options=GPT_OSS),
    "int8_wide": Program(
        4, 256, 32, INT8, query_len=4, blocks=BlockSizes(stages=1), options=BF16 | {"window": Window(30)}
    ),
    "large_blocks": Program(3, 64, 8, FLOAT16, blocks=BlockSizes(keys=128, stages=4)),
    "value_parts": Program(2, 128, 16, kv_heads=2, blocks=BlockSizes(value_parts=2, splits=2)),
    "rows_float8_wide": Program(
        4, 256, 16, FLOAT8, query_len=9, tree=True, options={"query_dtype": FLOAT16, "sink_logits": True}
    ),
    "causal": Program(8, 128, 64, query_len=9, blocks=BlockSizes(warpgroups=2, splits=3), options=GPT_OSS),
    "rows_splits": Program(2, 256, 16, query_len=64, tree=True, blocks=BlockSizes(value_parts=2, splits=2)),
    "latent_128_heads": Program(128, 576, 64, query_len=2, tree=True, options={"value_dim": 512}),
    "latent_wide_values": Program(16, 256, 16, query_len=3, tree=True, options={"value_dim": 256}),
    "latent_rows": Program(8, 128, 32, query_len=9, tree=True, options=LATENT),
}
PREFILL = {
    "two_warpgroups": Program(4, 64, 16),
    "all": Program(3, 128, 8, FLOAT16, options=ALL),
}
MORE_PREFILL = {
    "streaming": Program(4, 128, 16, options=STREAMING),
    "large_pages": Program(4, 256, 128),
    "int8_wide": Program(3, 256, 32, INT8, options=BF16),
    "splits": Program(8, 64, 64, kv_heads=2, blocks=BlockSizes(warpgroups=2, splits=2), options=CAPPED),
    "float8": Program(7, 64, 16, FLOAT8, options=ALL),
}
TOKENS = 48
# (lengths, contexts) of three rows.
ROWS = {
    "edges": ([40, 0, 1], [23, 5, 127]),  # ends in the middle of a tile and at the end of a block
    "long": ([1, 22, 25], [0, 64, 231]),  # no padding
}


def prefill_case(
    program: Program, rng: np.random.Generator, lengths: list[int], contexts: list[int], tokens: int = TOKENS
) -> Case:
    case = make_prefill_case(rng, lengths=lengths, contexts=contexts, tokens=tokens, **program.geometry)
    return garbled(case, rng)


class TestMosaic:
    """One case each; XLA, which has tests of its own, is held to the same ones in the slow suite."""

    @pytest.mark.parametrize("program", DECODE.values(), ids=DECODE)
    def test_decode(self, program: Program, rng: np.random.Generator) -> None:
        n, window = program.query_len, program.options.get("window")
        # The last key is a block's first one; the window begins at a block's second key.
        contexts = [129 - n, -n, 64 + window.size if window is not None else 199 - n]
        check(program.case(rng, contexts), "mosaic_gpu", blocks=program.blocks)

    @pytest.mark.parametrize("program", PREFILL.values(), ids=PREFILL)
    def test_prefill(self, program: Program, rng: np.random.Generator) -> None:
        lengths, contexts = ROWS["edges"]
        got = check(prefill_case(program, rng, lengths, contexts), "mosaic_gpu", blocks=program.blocks)
        assert not got[sum(lengths) :].any()

    def test_few_tokens_of_prefill(self, rng: np.random.Generator) -> None:
        """So few that keys are the tensor core's rows."""
        case = prefill_case(DECODE["plain"], rng, [3, 1, 0, 2], [62, 0, 9, 200], tokens=8)
        check(case, "mosaic_gpu")

    def test_more_splits_than_blocks(self, rng: np.random.Generator) -> None:
        program = Program(1, 64, 64, options={"sink_logits": True}, max_keys=128)
        check(program.case(rng, [0, 64]), "mosaic_gpu", blocks=BlockSizes(splits=5))

    def test_a_page_twice_in_one_row(self, rng: np.random.Generator) -> None:
        program = DECODE["plain"]
        case = program.case(rng, [200, -1, 40])
        case.page_table[0, 2:10] = case.page_table[0, 5]
        check(case, "mosaic_gpu")

    @pytest.mark.parametrize("logit", [-np.inf, 8.0], ids=str)
    def test_extreme_sink_logits(self, logit: float, rng: np.random.Generator) -> None:
        program = DECODE["splits"]
        case = dataclasses.replace(program.case(rng, [0, -1, 130]), sink_logits=np.full(7, logit, np.float32))
        check(case, "mosaic_gpu", blocks=program.blocks)

    @pytest.mark.parametrize("name", ["plain", "int8_tree", "two_warpgroups"])
    def test_the_same_bits_again_and_wherever_pages_lie(self, name: str, rng: np.random.Generator) -> None:
        program = DECODE[name]
        case = program.case(rng, [70, -program.query_len, 3])
        first = run(case, "mosaic_gpu", program.blocks)
        np.testing.assert_array_equal(run(permuted(case, rng), "mosaic_gpu", program.blocks), first)


@pytest.mark.parametrize("cap", [1.5, 50.0])
def test_soft_caps_from_one_end_to_the_other(cap: float) -> None:
    """The kernels' tanh against NumPy's: also where the exponential overflows, and where the score hardly moves."""
    products = np.concatenate([-np.logspace(5, -6, 200), [0.0], np.logspace(-6, 5, 200)]).astype(np.float32)
    got = np.asarray(Scoring(0.125, cap)(jnp.asarray(products))) / LOG2_E
    want = cap * np.tanh(0.125 * products.astype(np.float64) / cap)
    np.testing.assert_allclose(got, want, atol=2e-7 * cap + 1e-7)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", ["latent", "latent_tree"])
def test_latent_attention_of_xla(name: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    program = dataclasses.replace(DECODE[name], dtype=dtype)
    check(program.case(rng, [124, -program.query_len, 94]), "xla")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
class TestEveryProgram:
    @pytest.mark.parametrize("program", [*DECODE.values(), *MORE_DECODE.values()], ids=[*DECODE, *MORE_DECODE])
    def test_decode(self, implementation: str, program: Program, rng: np.random.Generator) -> None:
        n = program.query_len
        for contexts in (rng.choice(program.edges(), 3).tolist(), [0, -n, program.max_keys - n]):
            check(program.case(rng, contexts), implementation, blocks=program.blocks)

    @pytest.mark.parametrize("program", [*PREFILL.values(), *MORE_PREFILL.values()], ids=[*PREFILL, *MORE_PREFILL])
    def test_prefill(self, implementation: str, program: Program, rng: np.random.Generator) -> None:
        for lengths, contexts in ROWS.values():
            got = check(prefill_case(program, rng, lengths, contexts), implementation, blocks=program.blocks)
            assert not got[sum(lengths) :].any()


seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=8, deadline=None)
thorough = settings(max_examples=15, deadline=None)


def draw_decode(data: st.DataObject, program: Program) -> Case:
    lengths = st.one_of(st.sampled_from([-program.query_len, *program.edges()]), st.integers(0, program.edges()[-1]))
    contexts = data.draw(st.lists(lengths, min_size=3, max_size=3), "contexts")
    return program.case(np.random.default_rng(data.draw(seeds, "seed")), contexts)


def draw_prefill(data: st.DataObject, program: Program) -> Case:
    ends = data.draw(st.lists(st.integers(0, TOKENS), min_size=3, max_size=3), "ends")
    lengths = np.diff([0, *sorted(ends)]).tolist()
    contexts = [data.draw(st.integers(0, program.max_keys - length), "context") for length in lengths]
    return prefill_case(program, np.random.default_rng(data.draw(seeds, "seed")), lengths, contexts)


@pytest.mark.parametrize("name", ["wide", "latent_tree"])
@quick
@given(data=st.data())
def test_drawn_rows(name: str, data: st.DataObject) -> None:
    check(draw_decode(data, DECODE[name]), "mosaic_gpu", blocks=DECODE[name].blocks)


@quick
@given(data=st.data())
def test_drawn_ragged_rows(data: st.DataObject) -> None:
    check(draw_prefill(data, PREFILL["all"]), "mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", KERNELS)
@thorough
@given(data=st.data())
def test_drawn_programs(implementation: str, data: st.DataObject) -> None:
    program = data.draw(programs(), "program")
    case = (draw_decode if data.draw(st.booleans(), "decode") else draw_prefill)(data, program)
    check(case, implementation, blocks=program.blocks)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any that the kernels serve."""
    dtype = draw(st.sampled_from([BFLOAT16, FLOAT16, INT8, FLOAT8]))
    head_dim = draw(st.sampled_from([64, 128, 256]))
    page_size = draw(st.sampled_from([8, 16, 32, 64, 128]))
    kv_heads, tree = draw(st.integers(1, 2)), draw(st.booleans())
    n = draw(st.integers(1, 64 if tree else 8))
    options: dict[str, Any] = {
        "window": draw(st.none() | st.builds(Window, st.integers(1, 200))),
        "soft_cap": draw(st.sampled_from([None, 1.5])),
        "sink_logits": draw(st.booleans()),
    }
    if dtype in (INT8, FLOAT8):
        options["query_dtype"] = draw(st.sampled_from([BFLOAT16, FLOAT16]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    return Program(heads, head_dim, page_size, dtype, kv_heads, n, tree, options=options)
