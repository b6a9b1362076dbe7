"""Bad input: a clear error at submission; the engine still serves, and nothing is taken for what was refused."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specax import LLM, CapacityError, Engine, EngineConfig, InvalidRequestError, SamplingParams, SpecaxError

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def engine(golden_llm: LLM) -> Engine:
    """Seven pages of four tokens; no step of it runs in this file but one."""
    config = EngineConfig(page_size=4, num_pages=8, max_rows=4, max_batched_tokens=16, max_model_len=48)
    return Engine(golden_llm.model, config)


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> Iterator[None]:
    yield
    assert not engine.has_work and not engine.scheduler.waiting
    assert engine.memory.in_use() == 0
    assert sorted(engine.scheduler._slots) == [0, 1, 2, 3]


def said(error: pytest.ExceptionInfo[SpecaxError], *parts: Any) -> None:
    """The message names the field, the value and what would be right."""
    for part in parts:
        assert str(part) in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([], ["prompt is empty", "at least one token"]),
        (np.zeros(0, np.int32), ["prompt is empty"]),
        ([1, 128], ["prompt token 1", "128", "[0, 128)"]),
        ([-1], ["prompt token 0", "-1", "[0, 128)"]),
        ([1, 2, True], ["prompt token 2", "True", "integers"]),
        ([1, "a"], ["prompt token 1", "'a'", "integers"]),
        ([1.0], ["prompt token 0", "1.0", "integers"]),
        ([None], ["prompt token 0", "None"]),
        ([[1, 2]], ["prompt token 0", "[1, 2]"]),
        ("text", ["string", "token ids"]),
        ([3] * 48, ["48 tokens", "limit is 47"]),
        ([3] * 1000, ["1000 tokens", "limit is 47"]),
        (5, ["prompt", "5", "token ids"]),
        (None, ["prompt", "None", "token ids"]),
    ],
)
def test_wrong_prompt(engine: Engine, prompt: Any, parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        engine.submit(prompt, GREEDY)
    said(error, *parts)
    assert isinstance(error.value, ValueError)


def test_more_than_the_pool_can_hold(engine: Engine) -> None:
    # 28 slots; the last token's KV is never needed.
    with pytest.raises(CapacityError) as error:
        engine.submit([3] * 20, SamplingParams(max_tokens=10))
    said(error, "20", "10", "28", "num_pages")
    with pytest.raises(CapacityError):
        engine.submit([3] * 29, SamplingParams(max_tokens=None))
    assert not isinstance(error.value, ValueError)
    for prompt, limit in ((20, 9), (28, 1)):
        request_id = engine.submit([3] * prompt, SamplingParams(max_tokens=limit))
        assert engine.abort(request_id)
    # Without a limit, what the pool can hold is one.
    request_id = engine.submit([3] * 20, SamplingParams(max_tokens=None))
    request = engine.request(request_id)
    assert request is not None and request.max_tokens == 9
    engine.abort(request_id)
    assert [out.outputs[0].finish_reason for out in engine.step()] == ["abort"] * 3


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"n": 5}, ["n is 5", "max_rows (4)"]),
        ({"stop_token_ids": [5, 128]}, ["stop_token_ids", "128", "[0, 128)"]),
        ({"stop_token_ids": ["a"]}, ["stop_token_ids", "'a'", "integers"]),
        ({"allowed_token_ids": [-1]}, ["allowed_token_ids", "-1", "[0, 128)"]),
        ({"logit_bias": {300: 1.0}}, ["logit_bias", "300", "[0, 128)"]),
        ({"stop": "a"}, ["stop", "tokenizer", "stop_token_ids"]),
        ({"bad_words": ["a"]}, ["bad_words", "tokenizer"]),
        ({"min_tokens": 46, "max_tokens": None}, ["min_tokens is 46", "3 prompt tokens", "48", "45"]),
        (
            {"allowed_token_ids": [7, 9], "stop_token_ids": [7, 9], "min_tokens": 1},
            ["allowed_token_ids", "[7, 9]"],
        ),
        ({"min_tokens": 1, "stop_token_ids": range(128)}, ["nothing is left to sample", "min_tokens"]),
        ({"min_tokens": 40, "max_tokens": None}, ["min_tokens", "40", "num_pages"]),
    ],
)
def test_params_that_this_engine_cannot_serve(engine: Engine, fields: dict[str, Any], parts: list[str]) -> None:
    params = SamplingParams(**fields)
    with pytest.raises(SpecaxError) as error:
        engine.submit([1, 2, 3], params)
    said(error, *parts)


def test_params_of_another_type(engine: Engine) -> None:
    for wrong in ({"max_tokens": 3}, 7, "greedy"):
        with pytest.raises(InvalidRequestError, match="params must be SamplingParams"):
            engine.submit([1], wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "values", "right"),
    [
        ("n", [0, -1, 1.0, "2", True, None], "an integer ≥ 1"),
        ("temperature", [-0.1, float("nan"), float("inf"), "hot", None, True], "≥ 0"),
        ("top_p", [0, -0.5, 1.1, float("nan"), "0.9", None], "in (0, 1]"),
        ("top_k", [-2, 1.5, "all", None, True], "an integer ≥ −1"),
        ("min_p", [-0.1, 1.1, float("nan"), None], "in [0, 1]"),
        ("presence_penalty", [-2.1, 2.1, float("nan"), None], "in [−2, 2]"),
        ("frequency_penalty", [-2.1, 2.1, float("nan"), "1"], "in [−2, 2]"),
        ("repetition_penalty", [0, -1, 1e-39, 1e39, float("nan"), float("inf"), None], "[0.01, 100]"),
        ("min_tokens", [-1, 1.0, None], "an integer ≥ 0"),
        ("max_tokens", [0, -1, 2.0, "16"], "an integer ≥ 1, or None"),
        ("logprobs", [-2, 1.0, "5", True], "−1 (whole vocabulary), or None"),
        ("prompt_logprobs", [-2, 1.0, False], "−1 (whole vocabulary), or None"),
        ("seed", [-1, 1.0, "s"], "an integer ≥ 0, or None"),
        ("ignore_eos", ["yes", None, 1], "True or False"),
        ("skip_special_tokens", ["no"], "True or False"),
        ("include_stop_str_in_output", ["no"], "True or False"),
        ("stop", ["", [""], ["a", 3], 5, [None]], "strings"),
        ("stop_token_ids", [5, "12"], "sequence"),
        ("allowed_token_ids", [[], 5, "12"], "allowed_token_ids"),
        ("bad_words", ["word", [""], [3], 5], "bad_words"),
        (
            "logit_bias",
            [{1: float("nan")}, {1: 101}, {"1": 1.0}, {1: "2"}, [1, 2], 5],
            "token ids to numbers",
        ),
    ],
)
def test_wrong_sampling_values(field: str, values: list[Any], right: str) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as error:
            SamplingParams(**{field: value})
        said(error, field, right)
        if not isinstance(value, dict | list):
            said(error, repr(value))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens (5)", "max_tokens (4)"]),
        ({"include_stop_str_in_output": True}, ["include_stop_str_in_output", "stop is empty"]),
        ({"n": 2, "temperature": 0}, ["n is 2", "temperature 0", "n=1"]),
    ],
)
def test_contradictory_settings(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**fields)
    said(error, *parts)


def test_unknown_sampling_field() -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(max_token=3)  # type: ignore[call-arg]
    said(error, "'max_token'", "did you mean 'max_tokens'")
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(zzz=3)  # type: ignore[call-arg]
    said(error, "'zzz'", "temperature", "top_p")
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(GREEDY, temperature=-1)


def test_params_are_the_callers_copy() -> None:
    ids, bias = [3, 4], {3: 1.0}
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias, stop="x")
    ids.append(5)
    bias[9] = 2.0
    assert params.stop_token_ids == params.allowed_token_ids == (3, 4)
    assert params.logit_bias == {3: 1.0} and params.stop_strings == ("x",)


def test_refused_requests_leave_the_others_alone(engine: Engine, golden: dict[str, np.ndarray]) -> None:
    prompt = golden["tokens"][0].tolist()
    finished = engine.stats()["requests_finished"]
    request_id = engine.submit(prompt, GREEDY)
    tokens: list[int] = []
    while engine.has_work:
        for bad in ([], [999], [1] * 48):
            with pytest.raises(InvalidRequestError):
                engine.submit(bad, GREEDY)
        with pytest.raises(CapacityError):
            engine.submit([1] * 20, SamplingParams(max_tokens=20))
        for out in engine.step():
            assert out.request_id == request_id
            tokens += out.outputs[0].token_ids
    assert tokens == golden["greedy"][0, :4].tolist()
    assert engine.stats()["requests_finished"] == finished + 1


def test_generate_with_one_bad_prompt_runs_none(golden_llm: LLM) -> None:
    engine = golden_llm.engine
    steps = engine.stats()["steps"]
    for bad, error in (
        ([], InvalidRequestError),
        ([1, 999], InvalidRequestError),
        ([1] * 127 + [2], SpecaxError),
    ):
        with pytest.raises(error):
            golden_llm.generate([[1, 2], bad, [3, 4]], GREEDY)
        assert engine.memory.in_use() == 0 and not engine.scheduler.waiting
    with pytest.raises(InvalidRequestError, match="2 SamplingParams for 3 prompts"):
        golden_llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        golden_llm.generate("text", GREEDY)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        golden_llm.stream([1, 2], GREEDY)
    with pytest.raises(InvalidRequestError, match="n is 2"):
        golden_llm.stream([1, 2], SamplingParams(n=2))
    # Only the reports of what was taken back are left to fetch.
    outs = engine.step()
    assert all(out.finished and out.outputs[0].finish_reason == "abort" for out in outs)
    assert engine.stats()["steps"] == steps and not engine.has_work
    (out,) = golden_llm.generate([1, 2], GREEDY)
    assert out.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"page_size": 0}, ["page_size", "0", "≥ 1"]),
        ({"num_pages": 1}, ["num_pages", "1", "≥ 2"]),
        ({"max_rows": 0}, ["max_rows", "≥ 1"]),
        ({"max_rows": True}, ["max_rows", "True"]),
        ({"max_batched_tokens": 8, "max_rows": 9}, ["max_batched_tokens (8)", "max_rows (9)"]),
        ({"max_model_len": 0}, ["max_model_len", "0"]),
        ({"policy": "random"}, ["policy", "'random'", "fcfs"]),
        ({"kv_dtype": "int3"}, ["kv_dtype", "'int3'", "bfloat16"]),
    ],
)
def test_wrong_engine_sizes(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        EngineConfig(**fields)
    said(error, *parts)


@pytest.mark.parametrize("prompts", [None, 5, {"prompt": "x"}, [{1, 2}], b"x"])
def test_prompts_of_no_known_form(golden_llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        golden_llm.generate(prompts)
    assert not golden_llm.engine.has_work or golden_llm.engine.step() is not None


def test_arrays_are_prompts_and_numpy_scalars_are_numbers(golden_llm: LLM) -> None:
    numbers: dict[str, Any] = {"temperature": np.float32(0), "max_tokens": np.int64(4), "stop_token_ids": np.array([3])}
    params = SamplingParams(**numbers, ignore_eos=True)
    want = golden_llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    for prompts in (np.array([5, 6, 7]), jnp.array([5, 6, 7]), np.array([[5, 6, 7]]), [jnp.array([5, 6, 7])]):
        assert golden_llm.generate(prompts, params)[0].outputs[0].token_ids == want  # type: ignore[arg-type]


def test_a_length_beyond_the_models(golden_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max_model_len is 1000, but the model was made for 128"):
        Engine(golden_llm.model, EngineConfig(max_model_len=1000))
