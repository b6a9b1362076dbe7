"""Windows under the engine: pages are given back, prefixes hit, StreamingLLM goes on for ever."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flax import nnx

from specax import LLM, EngineConfig, InvalidRequestError, SamplingParams
from specax.decoding.outputs import completed
from specax.model import Decoder, load_model
from specax.pallas_kernels import Window
from tests.conftest import GOLDENS
from tests.decoding.test_engine import check_at_rest
from tests.decoding.test_kv import SIZES, conversations, engine_of, model, outputs, run

__all__ = ["model"]


@pytest.fixture(scope="module", params=["mistral_window", "ministral"])
def windowed(request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield LLM.from_pretrained(GOLDENS / request.param, dtype="float32", engine=EngineConfig(**SIZES))


def test_windows_give_pages_back(windowed: LLM) -> None:
    """Rows of windowed groups hold their window and no more; outputs are those of a pool that keeps everything."""
    model = windowed.model
    vocab = model.config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, vocab, n).tolist() for n in (40, 3, 25, 17)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = engine_of(model, num_pages=80, prefix_cache=False)
    keeping = engine_of(model, num_pages=80, prefix_cache=False)
    keeping.memory.leave_behind = lambda table, computed: None  # type: ignore[method-assign]
    kept = outputs(run(keeping, prompts, params))
    requests = [engine.request(engine.submit(prompt, params)) for prompt in prompts]
    groups = model.config.kv_groups
    most = [0] * len(groups)
    while engine.has_work:
        engine.step()
        for sequence in engine.scheduler.running:
            for group, line in enumerate(sequence.table.pages):
                most[group] = max(most[group], int(np.count_nonzero(line)))
    check_at_rest(engine)
    assert outputs([completed(r) for r in requests if r is not None]) == kept
    # A window of 8 and a chunk of up to 16 tokens in pages of 4, and what straddles.
    assert all(pages == 15 if group.window is None else pages <= 8 for group, pages in zip(groups, most))


def test_windowed_prefix_hits(windowed: LLM) -> None:
    engine = engine_of(windowed.model, num_pages=80)
    cold = engine_of(windowed.model, num_pages=80, prefix_cache=False)
    first = list(range(2, 32))
    (answer,) = run(engine, [first])
    second = [*first, *answer.outputs[0].token_ids, 5, 6]
    (out,) = run(engine, [second])
    assert out.metrics.cached_tokens == len(first) + 11  # its last window is all that a hit needs
    assert outputs([out]) == outputs(run(cold, [second]))
    (out,) = run(engine, [[*first[:20], 3, 3, 3]])  # the window before token 20 is gone
    assert outputs([out]) == outputs(run(cold, [[*first[:20], 3, 3, 3]]))


def test_a_long_sequence_fits_a_small_pool_if_all_layers_are_windowed() -> None:
    model = load_model(GOLDENS / "mistral_window", dtype="float32")
    engine = engine_of(model, num_pages=12, max_rows=1, max_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    roomy = engine_of(model, num_pages=80)
    prompt = list(range(2, 34))  # 61 positions are 16 pages
    assert outputs(run(engine, [prompt], params)) == outputs(run(roomy, [prompt], params))
    assert engine.stats()["pages_peak"] <= 11


def test_streaming_llm_equals_the_model_with_that_window(model: Decoder) -> None:
    @nnx.jit
    def logits(model: Decoder, tokens: Any) -> Any:
        return model(tokens, window=Window(12, 2, 4)).logits

    engine = engine_of(model, num_pages=14, max_rows=1, max_batched_tokens=8, streaming_window=12, streaming_sinks=2,
                       max_model_len=300)  # fmt: skip
    assert model.config.max_position < 300
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = conversations(4)[0]
    (out,) = run(engine, [prompt], params)
    tokens = np.asarray([*prompt, *out.outputs[0].token_ids])[None]
    scores = np.asarray(logits(model, tokens))[0, len(prompt) - 1 : -1]
    chosen = scores[np.arange(60), tokens[0, len(prompt) :]]
    assert (scores.max(-1) - chosen < 1e-4).all()
    assert engine.stats()["pages_peak"] <= 8
    long = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    (out,) = run(engine, [prompt], long)  # further than the model was made for
    assert len(out.outputs[0].token_ids) == 250 and engine.stats()["pages_peak"] <= 8


def test_streaming_is_refused_where_layers_have_windows(windowed: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="sliding windows of their own"):
        engine_of(windowed.model, streaming_window=8)
