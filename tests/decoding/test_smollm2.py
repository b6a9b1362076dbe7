"""The real model against transformers: SmolLM2-135M-Instruct on Spec-Bench prompts (goldens/make_smollm2.py)."""

import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from specax import LLM, EngineConfig, SamplingParams
from specax.sharding import make_mesh
from tests.conftest import GOLDENS

pytestmark = pytest.mark.slow

# The prompts are evaluation data that is not committed: SPECAX_EVAL_DATA, or shared/data beside the checkout.
DATA = pathlib.Path(os.environ.get("SPECAX_EVAL_DATA", pathlib.Path(__file__).parents[3] / "shared" / "data"))
TIE = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDENS / "smollm2_spec_bench.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained("smollm2", dtype="float32", engine=EngineConfig(max_rows=32))


@pytest.fixture(scope="module")
def prompts(llm: LLM, golden: dict[str, np.ndarray]) -> list[list[int]]:
    file = DATA / "spec_bench.jsonl"
    if not file.exists():
        pytest.skip(
            f"{file} is not there; set SPECAX_EVAL_DATA to the folder that holds Spec-Bench's questions"
        )
    lines = file.read_text(encoding="utf-8").splitlines()
    turns = [json.loads(lines[i])["turns"][0] for i in golden["line"]]
    return [llm.chat_tokens([{"role": "user", "content": turn}]) for turn in turns]


def test_tokens(prompts: list[list[int]], golden: dict[str, np.ndarray]) -> None:
    hashes = [hashlib.sha256(np.asarray(p, "<i4").tobytes()).hexdigest() for p in prompts]
    assert hashes == golden["sha256"].tolist()


def test_prompt_logits(llm: LLM, prompts: list[list[int]], golden: dict[str, np.ndarray]) -> None:
    for i in range(3):
        logits = np.asarray(llm.model(jax.numpy.asarray([prompts[i]])).logits[0])
        assert np.abs(logits[:, golden["columns"]] - golden[f"logits_{i}"]).max() < 2e-3
        assert np.abs(logits[-1] - golden[f"last_{i}"]).max() < 2e-3


def test_greedy(llm: LLM, prompts: list[list[int]], golden: dict[str, np.ndarray]) -> None:
    """128 tokens, all prompts in one batch: identical, but for ties."""
    steps = golden["greedy"].shape[1]
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    for i, out in enumerate(outs):
        differs = np.flatnonzero(np.asarray(out.outputs[0].token_ids) != golden["greedy"][i])
        if len(differs):
            assert golden["gap"][i, differs[0]] < TIE, f"prompt {i} differs at {differs[0]}"
    assert llm.stats()["pages_in_use"] == 0


def test_a_second_turn_computes_only_what_is_new(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24)
    messages = [{"role": "user", "content": "Name three large rivers, in one line."}]
    (first,) = llm.chat(messages, greedy)
    answer = first.outputs[0]
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And three lakes?"}]
    prompt = llm.chat_tokens(messages)
    known = [*first.prompt_token_ids, *answer.token_ids]
    assert prompt[: len(known) - 1] == known[:-1]  # the history reads back as the same tokens
    (second,) = llm.generate([prompt], greedy)
    metrics = second.metrics
    assert metrics.cached_tokens == len(known) - 1  # the last sampled token has no KV yet
    new = len(prompt) - metrics.cached_tokens
    assert metrics.computed_tokens == new + len(second.outputs[0].token_ids) - 1
    print(f"second turn: {len(prompt)} tokens, {metrics.cached_tokens} cached, {new} computed")


def test_three_samples_of_96_tokens(llm: LLM, prompts: list[list[int]]) -> None:
    engine, prompt = llm.engine, [*prompts[0], *prompts[1]][:96]
    assert len(prompt) == 96 and engine.config.page_size == 16
    engine.reset_prefix_cache()
    rid = engine.submit(prompt, SamplingParams(n=3, seed=0, max_tokens=8, ignore_eos=True))
    engine.step()
    engine.step()
    stats = engine.stats()
    assert (stats["pages_shared"], stats["pages_in_use"]) == (6, 6 + 3)
    engine.abort(rid)
    engine.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False},
        {"num_pages": 120, "host_cache_gb": 1.0, "preemption": "swap"},
        {"num_pages": 120, "preemption": "recompute", "policy": "lpm"},
        {"num_pages": 120, "host_cache_gb": 0.1, "disk_cache_dir": "disk", "cache_write": "through", "policy": "sjf"},
        {"num_pages": 120, "policy": "fair", "page_size": 32},
        {"num_pages": 300, "policy": "predicted", "page_size": 64},
    ],
    ids=str,
)
def test_greedy_under_every_regime(
    llm: LLM, prompts: list[list[int]], golden: dict[str, np.ndarray], settings: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """The same 48 tokens of ten prompts, twice: cold, and with what the first round left in whatever tier."""
    if "disk_cache_dir" in settings:
        settings = settings | {"disk_cache_dir": str(tmp_path)}
    engine = LLM(llm.model, llm.tokenizer, EngineConfig(**{"max_rows": 8, "max_model_len": 1536} | settings))
    few = [i for i in range(20) if len(prompts[i]) < 700][:10]
    for _ in range(2):
        outs = engine.generate(
            [prompts[i] for i in few], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        )
        for i, out in zip(few, outs):
            differs = np.flatnonzero(np.asarray(out.outputs[0].token_ids) != golden["greedy"][i, :48])
            if len(differs):
                assert golden["gap"][i, differs[0]] < TIE, f"prompt {i} differs at {differs[0]}"
    stats = engine.stats()
    keys = ("prefix_query_tokens", "prefix_hit_tokens", "prefix_recovered_tokens", "preemptions", "pages_saved",
            "pages_loaded", "disk_cache_bytes")  # fmt: skip
    print(settings, {key: stats[key] for key in keys})
    if settings.get("prefix_cache", True):
        assert stats["prefix_hit_tokens"] > 0
    engine.close()


@pytest.mark.parametrize("tensor", [2, 4])
def test_greedy_on_a_mesh(prompts: list[list[int]], golden: dict[str, np.ndarray], tensor: int) -> None:
    """3 KV heads on 2 and 4 devices: padded, and the same tokens."""
    config = EngineConfig(max_rows=4, num_pages=100)
    llm = LLM.from_pretrained("smollm2", dtype="float32", mesh=make_mesh(tensor=tensor), engine=config)
    few = [0, 2, 3]
    outs = llm.generate([prompts[i] for i in few], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outs] == golden["greedy"][few, :32].tolist()
    assert len(llm.engine.runner.kv.k[0].addressable_shards) == tensor
