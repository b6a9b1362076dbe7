"""KV memory under the engine: hits from every tier, preemption, policies and windows never change a token."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flax import nnx

from specax import LLM, Engine, EngineConfig, InvalidRequestError, SamplingParams, SpecaxError
from specax.decoding.outputs import RequestOutput, completed
from specax.decoding.policies import POLICIES
from specax.model import Decoder
from specax.sharding import Layout
from tests.decoding.test_engine import check_at_rest

VOCAB, LENGTH = 128, 64
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {"page_size": 4, "max_rows": 4, "max_batched_tokens": 16, "max_model_len": LENGTH}


def engine_of(model: Decoder, **settings: Any) -> Engine:
    return Engine(model, EngineConfig(**SIZES | settings))


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY, **origin: Any) -> list[Any]:
    requests = [engine.request(engine.submit(prompt, params, **origin)) for prompt in prompts]
    finish(engine)
    return [completed(r) for r in requests if r is not None]


def finish(engine: Engine) -> None:
    for _ in range(20_000):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    check_at_rest(engine)


def outputs(outs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[o.token_ids for o in out.outputs] for out in outs]


def conversations(seed: int, count: int = 12) -> list[list[int]]:
    """Prompts over few tokens with long common prefixes, of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, 22).tolist()
    return [system[: rng.integers(0, 23)] + rng.integers(0, VOCAB, rng.integers(1, 19)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def model(golden_llm: LLM) -> Decoder:
    return golden_llm.model


@pytest.fixture(scope="module")
def want(model: Decoder) -> list[list[list[int]]]:
    """Outputs for `conversations(1)` with nothing cached and memory for all."""
    engine = engine_of(model, num_pages=100, prefix_cache=False)
    return outputs(run(engine, conversations(1)))


# --- hits


def test_the_second_turn_computes_only_what_is_new(model: Decoder) -> None:
    engine = engine_of(model, num_pages=64)
    first = list(range(1, 20))
    (answer,) = run(engine, [first])
    # All but the last sampled token has its KV in the cache, in the middle of a page too.
    second = [*first, *answer.outputs[0].token_ids, 7, 8, 9]
    (out,) = run(engine, [second])
    assert out.metrics.cached_tokens == len(first) + 12 - 1
    assert out.metrics.computed_tokens == 3 + 1 + 12 - 1  # new ones, the last sampled one, and the answer but its last
    cold = engine_of(model, num_pages=64, prefix_cache=False)
    assert outputs([out]) == outputs(run(cold, [second]))
    stats = engine.stats()
    assert stats["prefix_query_tokens"] == len(first) + len(second)
    assert stats["prefix_hit_tokens"] == len(first) + 11
    assert stats["pages_cached"] + stats["pages_free"] == stats["pages_total"]


def test_one_token_is_always_left_to_compute(model: Decoder) -> None:
    engine = engine_of(model, num_pages=64)
    prompt = list(range(1, 17))
    want = outputs(run(engine, [prompt]))
    (again,) = run(engine, [prompt])
    assert outputs([again]) == want and again.metrics.cached_tokens == 15


def test_three_samples_share_six_pages_and_have_three_of_their_own(golden_llm: LLM) -> None:
    engine = Engine(golden_llm.model, EngineConfig(page_size=16, num_pages=40, max_rows=4, max_batched_tokens=96))
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    engine.submit([int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 96)], params)
    engine.step()
    stats = engine.stats()
    assert stats["pages_shared"] == 6 and stats["pages_in_use"] == 6
    engine.step()
    stats = engine.stats()
    assert stats["pages_shared"] == 6 and stats["pages_in_use"] == 6 + 3
    finish(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hits_change_no_token(model: Decoder, want: list[list[list[int]]], page_size: int) -> None:
    engine = engine_of(model, num_pages=400 // page_size, page_size=page_size)
    assert outputs(run(engine, conversations(1))) == want  # some hit what the first ones left
    hits = engine.stats()["prefix_hit_tokens"]
    assert outputs(run(engine, conversations(1))) == want  # all hit
    assert engine.stats()["prefix_hit_tokens"] > hits
    for prompt, out in zip(conversations(1), want):  # one by one, last ones first
        assert outputs(run(engine, [prompt])) == [out]


def test_salts_do_not_meet(model: Decoder) -> None:
    engine = engine_of(model, num_pages=200)
    prompt = list(range(1, 30))
    run(engine, [prompt], cache_salt="a")
    hits = lambda: engine.stats()["prefix_hit_tokens"]  # noqa: E731
    run(engine, [prompt])
    run(engine, [prompt], cache_salt="b")
    assert hits() == 0
    run(engine, [prompt], cache_salt="a")
    assert hits() == 28


def test_scored_prompts_are_computed_whole(model: Decoder) -> None:
    engine = engine_of(model, num_pages=64)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    (cold,) = run(engine, [[5, 6, 7, 8, 9, 10]], params)
    (warm,) = run(engine, [[5, 6, 7, 8, 9, 10]], params)
    assert warm.metrics.cached_tokens == 0 and outputs([warm]) == outputs([cold])
    assert [list(p or ()) for p in warm.prompt_logprobs or ()] == [list(p or ()) for p in cold.prompt_logprobs or ()]


def test_a_request_that_failed_leaves_nothing_behind(model: Decoder) -> None:
    engine = engine_of(model, num_pages=64)
    banned = SamplingParams(allowed_token_ids=[3], bad_words=None, max_tokens=4, min_tokens=4, ignore_eos=True)
    run(engine, [[1, 2, 3, 4, 5]], banned)
    engine.submit([9, 8, 7, 6, 5, 4, 3], GREEDY)
    engine.step()
    for sample in list(engine.scheduler.running):
        engine._finish(sample, "error", "test")
    assert engine.memory.match(np.array([9, 8, 7, 6, 5], np.int32), ()).length == 4  # only the prompt's full page


# --- tiers


def test_hits_from_host_memory(model: Decoder, want: list[list[list[int]]]) -> None:
    engine = engine_of(model, num_pages=20, host_cache_gb=0.01)
    engine.warmup()
    assert outputs(run(engine, conversations(1))) == want
    assert outputs(run(engine, conversations(1))) == want
    stats = engine.stats()
    assert stats["pages_saved"] > 0 and stats["pages_loaded"] > 0 and stats["host_cache_bytes"] > 0
    assert stats["compilations_after_warmup"] == 0
    small = engine_of(model, num_pages=20, prefix_cache=True)
    run(small, conversations(1))
    run(small, conversations(1))
    assert stats["prefix_hit_tokens"] > small.stats()["prefix_hit_tokens"]


@pytest.mark.parametrize("write", ["back", "through"])
def test_hits_from_disk_by_the_next_process(
    model: Decoder, want: list[list[list[int]]], tmp_path: pathlib.Path, write: str
) -> None:
    settings = {"num_pages": 20, "host_cache_gb": 0.01, "disk_cache_dir": str(tmp_path), "cache_write": write}
    engine = engine_of(model, **settings)
    assert outputs(run(engine, conversations(1))) == want
    engine.close()
    assert any(tmp_path.iterdir())
    engine = engine_of(model, **settings)
    assert engine.stats()["prefix_cached_tokens"] == 0 < engine.memory.tree.num_nodes
    (out,) = run(engine, conversations(1)[:1])  # alone, it has only the disk to hit
    assert out.metrics.cached_tokens == len(conversations(1)[0]) - 1
    assert outputs([out]) == want[:1]
    assert outputs(run(engine, conversations(1))) == want
    engine.close()
    # Files that another process, or bad luck, has damaged are computed again.
    for path in tmp_path.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data))
    engine = engine_of(model, **settings)
    assert outputs(run(engine, conversations(1))) == want
    engine.close()


def test_other_weights_do_not_hit(model: Decoder, tmp_path: pathlib.Path) -> None:
    """Neither in memory nor from disk; and running requests go on with the new ones."""
    other = Decoder(model.config, rngs=nnx.Rngs(3), layout=Layout())
    settings = {"num_pages": 60, "host_cache_gb": 0.01, "disk_cache_dir": str(tmp_path), "cache_write": "through"}
    prompts = conversations(1)[:4]
    new = outputs(run(engine_of(other, num_pages=60, prefix_cache=False), prompts))
    engine = engine_of(model, **settings)
    old = outputs(run(engine, prompts))
    assert old != new
    engine.update_weights(other)
    outs = run(engine, prompts[:1])
    assert outputs(outs) == new[:1] and outs[0].metrics.cached_tokens == 0
    assert outputs(run(engine, prompts)) == new
    engine.update_weights(model)
    outs = run(engine, prompts[:1])
    assert outputs(outs) == old[:1] and outs[0].metrics.cached_tokens == 0  # their files went with them
    running = engine.request(engine.submit(prompts[1], GREEDY))
    for _ in range(5):
        engine.step()
    assert running is not None
    given = running.sequences[0].output
    engine.update_weights(other)
    finish(engine)
    assert given and given == old[1][0][: len(given)] == running.sequences[0].output[: len(given)]
    continued = SamplingParams(temperature=0, max_tokens=12 - len(given), ignore_eos=True)
    fresh = engine_of(other, num_pages=60, prefix_cache=False)
    assert running.sequences[0].output[len(given) :] == outputs(run(fresh, [prompts[1] + given], continued))[0][0]
    deeper = Decoder(model.config.__class__(**{**vars(model.config), "num_layers": 1}), rngs=nnx.Rngs(3))
    with pytest.raises(ValueError, match="num_layers is 1, the engine's 2"):
        engine.update_weights(deeper)
    left = engine.request(engine.submit(prompts[0], GREEDY))
    engine.step()
    engine.close()
    engine.close()
    assert left is not None and left.sequences[0].finish_reason == "abort" and not engine.scheduler.running
    for use in (engine.step, engine.reset_prefix_cache, lambda: engine.submit([1])):
        with pytest.raises(SpecaxError, match="closed"):
            use()


def test_files_of_another_model_are_not_hit(model: Decoder, tmp_path: pathlib.Path) -> None:
    """The same weights under another rotary base are another model."""
    settings = {"num_pages": 60, "host_cache_gb": 0.01, "disk_cache_dir": str(tmp_path)}
    engine = engine_of(model, **settings)
    run(engine, conversations(1)[:3])
    engine.close()
    other = Decoder(dataclasses.replace(model.config, rope_theta=5e5), rngs=nnx.Rngs(0), layout=Layout())
    nnx.update(other, nnx.state(model))
    with pytest.raises(ValueError, match="rope_theta"):
        engine_of(model, num_pages=60).update_weights(other)
    engine = engine_of(other, **settings)
    (out,) = run(engine, conversations(1)[:1])
    assert out.metrics.cached_tokens == 0 and engine.memory.tree.num_nodes > 0
    engine.close()


def test_a_step_that_breaks_off_in_the_scheduler_loses_nobody(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model, num_pages=60)
    prompts = conversations(1)[:6]
    want = outputs(run(engine, prompts))
    requests = [engine.request(engine.submit(prompt, GREEDY)) for prompt in prompts]
    reserve, calls = engine.memory.reserve, itertools.count()

    def broken(*args: Any) -> bool:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return reserve(*args)

    monkeypatch.setattr(engine.memory, "reserve", broken)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            engine.step()
    finish(engine)
    for request, right in zip(requests, want):
        assert request is not None
        (sample,) = request.sequences
        assert sample.finish_reason == "error" or [sample.output] == right
    assert sum(r is not None and r.sequences[0].finish_reason == "length" for r in requests) >= 3


# --- preemption and policies


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False},
        {},
        {"host_cache_gb": 0.01, "preemption": "swap"},
        {"host_cache_gb": 0.01, "preemption": "swap", "prefix_cache": False},
        {"host_cache_gb": 0.01, "preemption": "recompute"},
        {"host_cache_gb": 0.01, "preemption": "auto"},
    ],
    ids=str,
)
def test_preemption_changes_no_token(model: Decoder, want: list[list[list[int]]], settings: dict[str, Any]) -> None:
    engine = engine_of(model, num_pages=14, **settings)
    assert outputs(run(engine, conversations(1))) == want
    stats = engine.stats()
    assert stats["preemptions"] > 0
    if settings.get("preemption") == "swap":
        assert stats["pages_loaded"] > 0 and stats["prefix_recovered_tokens"] > 0
    if settings == {"prefix_cache": False}:
        assert engine.memory.tree.num_nodes == 0 and stats["pages_free"] == stats["pages_total"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_change_no_token(model: Decoder, want: list[list[list[int]]], policy: str) -> None:
    engine = engine_of(model, num_pages=20, policy=policy, tenant_weights={"a": 2.0})
    prompts = conversations(1)
    requests = []
    for i, prompt in enumerate(prompts):
        rid = engine.submit(prompt, GREEDY, priority=i % 3, tenant="ab"[i % 2], ttft_target=float(i % 2))
        requests.append(engine.request(rid))
    finish(engine)
    assert outputs([completed(r) for r in requests if r is not None]) == want


def test_priority_goes_first(model: Decoder) -> None:
    engine = engine_of(model, num_pages=100, policy="priority", max_rows=1)
    low, high = (engine.submit([1, 2, p], GREEDY, priority=p) for p in (0, 1))
    order = [out.request_id for _ in range(99) if engine.has_work for out in engine.step() if out.finished]
    assert order == [high, low]


def test_origins_are_checked(model: Decoder) -> None:
    engine = engine_of(model, num_pages=30)
    bad: dict[str, Any]
    for bad in ({"priority": 1.5}, {"tenant": ""}, {"cache_salt": 3}, {"ttft_target": -1.0}, {"ttft_target": True}):
        with pytest.raises(InvalidRequestError, match=next(iter(bad))):
            engine.submit([1], GREEDY, **bad)
    wrong: dict[str, Any]
    for wrong in (
        {"policy": "lifo"}, {"preemption": "never"}, {"preemption": "swap"}, {"disk_cache_dir": "x"},
        {"cache_write": "around"}, {"tenant_cache_share": 2}, {"age_bound": -1}, {"tenant_weights": {"a": 0}},
        {"host_cache_gb": -1}, {"streaming_window": 0}, {"streaming_sinks": -1},
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            EngineConfig(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0.0, 0.001])
def test_five_hundred_requests_under_pressure(model: Decoder, host: float) -> None:
    """A pool of a tenth of what runs wants, aborts among them: everyone else's output is right, and pages are back."""
    rng = np.random.default_rng(11)
    prompts = list(itertools.chain.from_iterable(conversations(seed, 10) for seed in range(50)))
    calm = engine_of(model, num_pages=3000, max_rows=32, max_batched_tokens=64, prefix_cache=False)
    right = outputs(run(calm, prompts))
    need = 32 * (30 // 4)  # pages that 32 rows want
    engine = engine_of(
        model, num_pages=max(need // 10, LENGTH // 4 + 1), max_rows=32, max_batched_tokens=64, host_cache_gb=host
    )
    requests = [engine.request(engine.submit(p, GREEDY, tenant=f"t{i % 5}")) for i, p in enumerate(prompts)]
    aborted = set()
    scheduled, budget = engine.scheduler.schedule, []

    def schedule() -> Any:
        plan = scheduled()
        budget.append(plan.num_tokens)
        return plan

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
        if rng.random() < 0.05:
            victim = requests[rng.integers(len(requests))]
            assert victim is not None
            if engine.abort(victim.id):
                aborted.add(victim.id)
        assert len(budget) < 100_000
    check_at_rest(engine)
    assert max(budget) <= 64 and engine.stats()["preemptions"] > 0 and aborted
    for request, out in zip(requests, right):
        assert request is not None
        if request.id not in aborted:
            assert [s.output for s in request.sequences] == out
