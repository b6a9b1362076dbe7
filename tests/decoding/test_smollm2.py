"""The real model against transformers: SmolLM2-135M-Instruct on Spec-Bench prompts (goldens/make_smollm2.py)."""

import hashlib
import json
import os
import pathlib

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
    assert llm.stats()["pages_free"] == llm.stats()["pages_total"]


@pytest.mark.parametrize("tensor", [2, 4])
def test_greedy_on_a_mesh(prompts: list[list[int]], golden: dict[str, np.ndarray], tensor: int) -> None:
    """3 KV heads on 2 and 4 devices: padded, and the same tokens."""
    config = EngineConfig(max_rows=4, num_pages=100)
    llm = LLM.from_pretrained("smollm2", dtype="float32", mesh=make_mesh(tensor=tensor), engine=config)
    few = [0, 2, 3]
    outs = llm.generate([prompts[i] for i in few], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outs] == golden["greedy"][few, :32].tolist()
    assert len(llm.engine.runner.kv.k[0].addressable_shards) == tensor
