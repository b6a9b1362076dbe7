"""The engine on a tiny checkpoint: same tokens whatever the schedule, nothing compiled late, nothing leaked."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specax import LLM, Engine, EngineConfig, SamplingParams, SpecaxError
from specax.decoding.outputs import CompletionOutput, Logprob, RequestOutput, completed
from specax.decoding.request import Request, Status
from specax.model import Decoder
from tests.conftest import TINY

VOCAB, LENGTH = 128, 64  # of the checkpoint; of every engine here
TIE = 1e-4  # two logits this close are a tie: either token is right
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

# Chunks of 32, 16 and 61 tokens; pages of 8, 4 and 16. The small pool (17 pages of 4) preempts.
SMALL = EngineConfig(page_size=4, num_pages=18, max_rows=4, max_batched_tokens=16, max_model_len=LENGTH)
LARGE = EngineConfig(page_size=16, num_pages=33, max_rows=8, max_batched_tokens=61, max_model_len=LENGTH)


@pytest.fixture(scope="module")
def small(golden_llm: LLM) -> Engine:
    engine = Engine(golden_llm.model, SMALL)
    assert engine.stats()["compilations_after_warmup"] is None
    assert engine.warmup() > 0
    return engine


@pytest.fixture(scope="module")
def large(golden_llm: LLM) -> Engine:
    return Engine(golden_llm.model, LARGE)


type LogSoftmax = Callable[[Sequence[int]], np.ndarray]


@pytest.fixture(scope="module")
def reference(golden_llm: LLM) -> LogSoftmax:
    """Log-probabilities [len, vocab] after every token of a sequence: the model without a cache."""
    model: Decoder = golden_llm.model

    @nnx.jit
    def run(model: Decoder, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(model(tokens).logits[0], axis=-1)

    def log_softmax(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)  # causal: what follows doesn't matter
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(model, jnp.asarray(padded)))[: len(tokens)]

    return log_softmax


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[RequestOutput]:
    """All outputs whole, in order."""
    each = list(params) if isinstance(params, list) else [params] * len(prompts)
    return drain(engine, [engine.submit(prompt, p) for prompt, p in zip(prompts, each, strict=True)])


def drain(engine: Engine, ids: list[str]) -> list[RequestOutput]:
    """Steps until all is done; from here on the deltas of each sample must add up to what it has more."""
    requests = {i: request_of(engine, i) for i in ids}
    had = {(i, sample.index): sample.output_len for i, r in requests.items() for sample in r.sequences}
    deltas: dict[tuple[str, int], list[int]] = {}
    finished: list[str] = []
    for _ in range(1000):
        if not engine.has_work:
            break
        for out in engine.step():
            for part in out.outputs:
                deltas.setdefault((out.request_id, part.index), []).extend(part.token_ids)
            if out.finished:
                finished.append(out.request_id)
    assert not engine.has_work
    assert len(finished) == len(set(finished)) and set(ids) <= set(finished)
    outs = [completed(requests[i]) for i in ids]
    for out in outs:
        for part in out.outputs:
            key = out.request_id, part.index
            assert deltas.get(key, []) == part.token_ids[had[key] :]
    check_at_rest(engine)
    return outs


def request_of(engine: Engine, request_id: str) -> Request:
    request = engine.request(request_id)
    assert request is not None
    return request


def check_at_rest(engine: Engine) -> None:
    memory = engine.memory
    cached = Counter(page for node in memory.tree.nodes() if node.pages is not None for page in node.pages[0].tolist())
    for group, pool in enumerate(memory.pools):
        assert pool.num_free + memory.tree.evictable[group] == pool.num_pages - 1
    assert all(memory.pools[0].references(page) == cached[page] for page in range(1, memory.pools[0].num_pages))
    assert all(node.locks == 0 for node in memory.tree.nodes())
    assert sorted(engine.scheduler._slots) == list(range(engine.config.max_rows))
    stats = engine.stats()
    assert stats["requests_running"] == stats["requests_waiting"] == stats["pages_in_use"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def tokens_of(outs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[part.token_ids for part in out.outputs] for out in outs]


def random_prompts(seed: int, count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def check_greedy(reference: LogSoftmax, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token is the likeliest after what precedes it."""
    scores = reference([*prompt, *output])[len(prompt) - 1 : -1]
    chosen = scores[np.arange(len(output)), np.asarray(output)]
    assert (scores.max(-1) - chosen < TIE).all()


# --- greedy


def test_greedy_equals_transformers(
    golden_llm: LLM, small: Engine, large: Engine, golden: dict[str, np.ndarray]
) -> None:
    """In one batch and alone, in three page and chunk sizes, forwards and backwards, preempted or not."""
    prompts, want = golden["tokens"].tolist(), golden["greedy"].tolist()
    assert golden["greedy_gap"].min() > TIE
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    preemptions = small.stats()["preemptions"]
    for engine in (golden_llm.engine, small, large):
        assert tokens_of(run(engine, prompts, params)) == [[row] for row in want]
        assert tokens_of(run(engine, prompts[::-1], params)) == [[row] for row in want[::-1]]
        assert tokens_of(run(engine, prompts[:1], params)) == [[want[0]]]
    assert small.stats()["preemptions"] > preemptions


def test_greedy_is_independent_of_the_schedule(
    golden_llm: LLM, small: Engine, large: Engine, reference: LogSoftmax
) -> None:
    prompts = random_prompts(seed=1, count=12)
    preemptions = small.stats()["preemptions"]
    outs = tokens_of(run(large, prompts))
    for prompt, (output,) in zip(prompts, outs):
        assert len(output) == 24
        check_greedy(reference, prompt, output)
    assert tokens_of(run(golden_llm.engine, prompts)) == outs
    assert tokens_of(run(small, prompts)) == outs
    order = np.random.default_rng(2).permutation(len(prompts)).tolist()
    assert tokens_of(run(small, [prompts[i] for i in order])) == [outs[i] for i in order]
    assert small.stats()["preemptions"] > preemptions + 2
    # One after the other, and arriving while others run.
    assert [tokens_of(run(small, [prompt]))[0] for prompt in prompts[:3]] == outs[:3]
    ids: list[str] = []
    for prompt in prompts:
        ids.append(small.submit(prompt, GREEDY))
        requests = [small.request(i) for i in ids]
        small.step()
        for i, request in enumerate(requests):
            if request is not None and request.finished:
                assert request.sequences[0].output == outs[i][0]
    drain(small, [i for i in ids if small.request(i)])


def test_batch_mates_of_every_kind_change_nothing(small: Engine, reference: LogSoftmax) -> None:
    prompts = random_prompts(seed=3, count=4, longest=12)
    alone = tokens_of(run(small, prompts[:1]))[0]
    check_greedy(reference, prompts[0], alone[0])
    kinds = [
        SamplingParams(seed=1, max_tokens=24, repetition_penalty=1.5, presence_penalty=1.0, logprobs=-1),
        SamplingParams(seed=2, max_tokens=24, top_k=3, top_p=0.5, logit_bias={5: 50.0}, prompt_logprobs=3),
        SamplingParams(seed=3, max_tokens=24, allowed_token_ids=[7, 8], min_tokens=20, stop_token_ids=[9]),
    ]
    mixed = run(small, prompts, [GREEDY, *kinds])
    assert mixed[0].outputs[0].token_ids == alone[0]
    assert set(mixed[3].outputs[0].token_ids) <= {7, 8}


# --- sampling


SAMPLED = SamplingParams(
    seed=11, max_tokens=12, ignore_eos=True, temperature=1.3, top_k=40, top_p=0.95, min_p=0.001,
    presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={3: 1.5, 90: -4.0},
)  # fmt: skip


def test_same_seed_same_output_whatever_the_batch_mates(golden_llm: LLM, small: Engine, large: Engine) -> None:
    prompt, *others = random_prompts(seed=4, count=8, longest=20)
    want = tokens_of(run(large, [prompt], SAMPLED))[0]
    preemptions = small.stats()["preemptions"]
    for engine in (golden_llm.engine, small):
        mates = [SamplingParams(seed=i, max_tokens=20, temperature=0.5 + i / 4) for i in range(len(others))]
        outs = tokens_of(run(engine, [*others, prompt], [*mates, SAMPLED]))
        assert outs[-1] == want
        # Newest first: here it is the one that is preempted, and its penalties are counted again.
        mates = [dataclasses.replace(GREEDY, max_tokens=30) for _ in others]
        assert tokens_of(run(engine, [*others, prompt], [*mates, SAMPLED]))[-1] == want
    assert small.stats()["preemptions"] > preemptions
    assert tokens_of(run(large, [prompt], dataclasses.replace(SAMPLED, seed=12)))[0] != want


def test_requests_without_a_seed_differ(large: Engine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=2.0)
    first, second = tokens_of(run(large, [[5, 6, 7], [5, 6, 7]], params))
    assert first != second


def test_samples_of_one_request_are_those_of_their_seeds(small: Engine, large: Engine) -> None:
    """Sample i uses seed + i: forks that share pages equal requests that share nothing."""
    prompts = random_prompts(seed=5, count=3, longest=21)
    for params in (SAMPLED, SamplingParams(seed=7, max_tokens=12, ignore_eos=True)):
        forked = dataclasses.replace(params, n=4)
        apart = [dataclasses.replace(params, seed=params.seed + i) for i in range(4)]  # type: ignore[operator]
        want = [[tokens_of(run(large, [prompt], p))[0][0] for p in apart] for prompt in prompts]
        assert len({tuple(tokens) for tokens in want[0]}) == 4
        assert tokens_of(run(small, prompts, forked)) == want
        outs = run(large, prompts, forked)
        assert tokens_of(outs) == want
        # Sample 0 finds all but the last token in the cache, the others share its prompt.
        assert [out.metrics.cached_tokens for out in outs] == [4 * len(prompt) - 1 for prompt in prompts]


def test_forked_samples_survive_preemption(small: Engine, large: Engine) -> None:
    prompts = random_prompts(seed=6, count=5, longest=25)
    params = dataclasses.replace(SAMPLED, n=3, max_tokens=30)
    preemptions = small.stats()["preemptions"]
    outs = run(small, prompts, params)
    assert small.stats()["preemptions"] > preemptions
    assert tokens_of(outs) == tokens_of(run(large, prompts, params))


# --- log-probabilities


def check_logprobs(got: dict[int, Logprob] | None, token: int, want: np.ndarray, top: int) -> None:
    """The token, then the `top` likeliest, with their values and ranks."""
    assert got is not None
    assert next(iter(got)) == token
    count = VOCAB if top < 0 else top
    assert len(got) in (count, count + 1)
    np.testing.assert_allclose([entry.logprob for entry in got.values()], want[list(got)], atol=1e-4)
    assert abs(sum(1 for value in want if value > want[token] + TIE) + 1 - got[token].rank) <= 1
    ranked = sorted((entry.rank, entry.logprob) for entry in got.values())
    assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
    assert [rank for rank, _ in ranked][:count] == list(range(1, count + 1))


@pytest.mark.parametrize("crowded", [False, True], ids=["chunked", "preempted"])
def test_logprobs_equal_the_model_without_a_cache(small: Engine, reference: LogSoftmax, crowded: bool) -> None:
    prompts = [*random_prompts(seed=7, count=2, longest=4), *random_prompts(seed=8, count=3, longest=40)]
    prompts[-1] = (prompts[-1] * 40)[:40]  # three chunks, and more prompt tokens than are scored at a time
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=0),
        SamplingParams(seed=1, max_tokens=20, logprobs=0, prompt_logprobs=5, repetition_penalty=2.0, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=20, logprobs=-1, prompt_logprobs=-1, top_k=5, ignore_eos=True),
        SamplingParams(seed=3, max_tokens=20, logprobs=30, prompt_logprobs=25, temperature=3.0, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=20, logprobs=20, prompt_logprobs=20, n=2, ignore_eos=True),
    ]
    preemptions = small.stats()["preemptions"]
    if crowded:
        outs = run(small, prompts, kinds)
        assert small.stats()["preemptions"] > preemptions
    else:
        outs = [run(small, [prompt], params)[0] for prompt, params in zip(prompts[:4], kinds[:4])]
    for out, params in zip(outs, kinds):
        prompt = out.prompt_token_ids
        scores = out.prompt_logprobs
        assert scores is not None and len(scores) == len(prompt) and scores[0] is None
        for part in out.outputs:
            want = reference([*prompt, *part.token_ids])
            assert part.logprobs is not None and len(part.logprobs) == len(part.token_ids)
            for i in range(1, len(prompt)):
                check_logprobs(scores[i], prompt[i], want[i - 1], params.prompt_logprobs or 0)
            for i, token in enumerate(part.token_ids):
                check_logprobs(part.logprobs[i], token, want[len(prompt) + i - 1], params.logprobs or 0)


def test_logprobs_are_absent_unless_asked_for(small: Engine) -> None:
    asked, plain = run(small, [[1, 2], [1, 2]], [dataclasses.replace(GREEDY, logprobs=1), GREEDY])
    assert asked.outputs[0].token_ids == plain.outputs[0].token_ids
    assert plain.outputs[0].logprobs is None and plain.prompt_logprobs is None and asked.prompt_logprobs is None


# --- ends


def test_every_end_gives_everything_back(small: Engine, golden: dict[str, np.ndarray]) -> None:
    prompt, greedy = golden["tokens"][0].tolist(), golden["greedy"][0].tolist()
    stop = greedy[6]
    at = greedy.index(stop)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    (out,) = run(small, [prompt], params)
    part = out.outputs[0]
    assert (part.token_ids, part.finish_reason, part.stop_reason) == (greedy[: at + 1], "stop", stop)
    (out,) = run(small, [prompt], GREEDY)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("length", None)
    # The model's length is a limit too.
    (out,) = run(small, [prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(prompt) + len(out.outputs[0].token_ids) == LENGTH and out.outputs[0].finish_reason == "length"
    # A prompt of the greatest length leaves room for one token.
    (out,) = run(small, [(prompt * 3)[: LENGTH - 1]], SamplingParams(temperature=0, max_tokens=9))
    assert len(out.outputs[0].token_ids) == 1


def test_abort_in_every_state(small: Engine) -> None:
    prompts = random_prompts(seed=9, count=6, longest=30)
    long = [(prompt * 28)[:28] for prompt in prompts]
    params = dataclasses.replace(GREEDY, max_tokens=30)

    def state(request_id: str) -> Status:
        return request_of(small, request_id).sequences[0].status

    def abort(request_id: str) -> None:
        request = request_of(small, request_id)
        assert small.abort(request_id)
        assert request.finished and not any(len(s.table) for s in request.sequences)  # at once
        assert small.request(request_id) is None and not small.abort(request_id)
        (report,) = [out for out in small.step() if out.request_id == request_id]
        assert report.finished and [part.finish_reason for part in report.outputs] == ["abort"] * request.params.n

    # Waiting: before any step, and behind others.
    first = small.submit(long[0], params)
    assert state(first) is Status.WAITING and small.has_work
    abort(first)
    check_at_rest(small)
    assert not small.has_work and small.step() == []
    # Mid-prefill, and one behind it.
    first, second = small.submit(long[0], params), small.submit(long[1], params)
    small.step()
    assert 0 < request_of(small, first).sequences[0].computed < 28
    abort(second)
    abort(first)
    check_at_rest(small)
    # Decoding.
    first = small.submit(prompts[0], params)
    while request_of(small, first).sequences[0].output_len < 3:
        small.step()
    abort(first)
    check_at_rest(small)
    # Preempted: it waits with tokens that it generated.
    ids = [small.submit(prompt, params) for prompt in long[:3]]
    while not (preempted := [i for i in ids if (r := small.request(i)) and r.metrics.preemptions]):
        small.step()
    assert state(preempted[0]) is Status.WAITING
    abort(preempted[0])
    drain(small, [i for i in ids if i != preempted[0] and small.request(i)])
    # Forking (samples wait for the prompt) and forked.
    many = SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True)
    first = small.submit(long[0], many)
    small.step()
    assert [s.status for s in request_of(small, first).sequences] == [
        Status.RUNNING,
        Status.FORKING,
        Status.FORKING,
    ]
    abort(first)
    check_at_rest(small)
    first = small.submit(long[0], many)
    while request_of(small, first).sequences[2].output_len < 2:
        small.step()
    assert small.memory.in_use() < 3 * 8  # the prompt is shared
    abort(first)
    check_at_rest(small)
    assert not small.abort("request-none") and not small.abort(first)


def test_abort_harms_no_batch_mate(small: Engine) -> None:
    prompts = random_prompts(seed=10, count=4, longest=12)
    want = tokens_of(run(small, prompts))
    ids = [small.submit(prompt, GREEDY) for prompt in prompts]
    requests = [request_of(small, i) for i in ids]
    for _ in range(6):
        small.step()
    small.abort(ids[1])
    while small.has_work:
        small.step()
    assert [[r.sequences[0].output] for i, r in enumerate(requests) if i != 1] == [want[i] for i in (0, 2, 3)]
    partial = requests[1].sequences[0]
    assert partial.finish_reason == "abort" and partial.output == want[1][0][: partial.output_len]
    check_at_rest(small)


class BrokenText:
    """A detokeniser that fails at its third token."""

    def __init__(self) -> None:
        self.count, self.text = 0, ""

    def push(self, token: int, stoppable: bool) -> tuple[str, str | None]:
        self.count += 1
        if self.count == 3:
            raise KeyError("no such piece")
        return "x", None

    def flush(self, stoppable: bool) -> tuple[str, str | None]:
        return "", None


def test_a_failing_detokeniser_ends_its_request_alone(small: Engine) -> None:
    prompts = random_prompts(seed=11, count=3, longest=10)
    want = tokens_of(run(small, prompts))
    ids = [small.submit(prompt, GREEDY) for prompt in prompts]
    request_of(small, ids[1]).sequences[0].text = BrokenText()
    outs = drain(small, ids)
    assert [out.outputs[0].token_ids for out in outs] == [want[0][0], want[1][0][:3], want[2][0]]
    assert [out.outputs[0].finish_reason for out in outs] == ["length", "error", "length"]
    assert outs[1].outputs[0].stop_reason == "KeyError: 'no such piece'"


# --- a long random workload


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Every option, each now and then."""
    fields: dict[str, Any] = {"max_tokens": int(rng.integers(1, 25)), "ignore_eos": bool(rng.integers(2))}
    if rng.random() < 0.7:
        fields |= {"seed": int(rng.integers(1000)), "temperature": float(rng.uniform(0.3, 2))}
        fields |= {"n": int(rng.choice([1, 1, 1, 2, 4]))}
        fields |= {"top_k": int(rng.choice([0, 5])), "top_p": float(rng.choice([1, 0.8])), "min_p": 0.01}
    else:
        fields |= {"temperature": 0}
    options: list[dict[str, Any]] = [
        {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.3},
        {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 40}, {"logprobs": -1},
        {"prompt_logprobs": 0}, {"prompt_logprobs": 25}, {"prompt_logprobs": -1},
        {"logit_bias": {4: 3.0}}, {"allowed_token_ids": [3, 4, 5]}, {"stop_token_ids": [7, 8]},
        {"min_tokens": 1, "stop_token_ids": [9]},
    ]  # fmt: skip
    for option in options:
        if rng.random() < 0.2:
            fields |= option
    return SamplingParams(**fields)


def test_nothing_compiles_after_warmup(small: Engine) -> None:
    rng = np.random.default_rng(12)
    before = small.stats()
    assert before["compilations"] > 0 and before["compile_seconds"] > 0
    live: list[str] = []
    submitted = finished = 0
    while submitted < 60 or small.has_work:
        if submitted < 60 and rng.random() < 0.4:
            prompt = rng.integers(0, VOCAB, rng.integers(1, 40)).tolist()
            live.append(small.submit(prompt, random_params(rng)))
            submitted += 1
        if live and rng.random() < 0.02:
            small.abort(live[rng.integers(len(live))])
        for out in small.step():
            if out.finished:
                finished += 1
                live.remove(out.request_id)
    after = small.stats()
    assert finished == 60 and after["preemptions"] > before["preemptions"]
    assert after["compilations_after_warmup"] == 0
    assert after["compilations"] == before["compilations"]
    check_at_rest(small)


def test_stats_and_metrics(small: Engine) -> None:
    before = small.stats()
    prompts = random_prompts(seed=13, count=3, longest=9)
    outs = run(small, prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    after = small.stats()
    assert {"pages_total", "pages_free", "pages_cached", "pages_in_use", "steps", "preemptions", "padding_tokens",
            "compilations_after_warmup", "requests_running", "requests_waiting"} <= after.keys()  # fmt: skip
    grown = {key: after[key] - before[key] for key in ("prompt_tokens", "generated_tokens", "requests_finished")}
    assert grown == {"prompt_tokens": sum(map(len, prompts)), "generated_tokens": 15, "requests_finished": 3}
    assert after["steps"] > before["steps"] and after["padding_tokens"] >= before["padding_tokens"]
    assert after["host_ms_per_step"].keys() == {"schedule", "build", "commit"}
    for out, prompt in zip(outs, prompts):
        m = out.metrics
        assert m.scheduled is not None and m.first_token is not None and m.finish is not None
        assert m.arrival <= m.scheduled <= m.first_token <= m.finish
        assert m.computed_tokens == len(prompt) + 4  # the last token's KV is never needed
        assert m.cached_tokens == m.preemptions == 0


def test_an_overflow_ends_one_request_alone() -> None:
    """NaN logits are an error of their request; batch-mates, and later requests on its pages, are unharmed."""
    model = Decoder(TINY, rngs=nnx.Rngs(7))
    model.embed[...] = model.embed[...].at[96].set(jnp.inf)
    engine = Engine(model, EngineConfig(page_size=4, num_pages=16, max_rows=4, max_batched_tokens=16))
    greedy = SamplingParams(temperature=0, max_tokens=6)

    def run(*prompts: list[int]) -> list[CompletionOutput]:
        requests = [engine.request(engine.submit(prompt, greedy)) for prompt in prompts]
        while engine.has_work:
            engine.step()
        return [completed(r).outputs[0] for r in requests if r is not None]

    (alone,) = run([5, 6, 7])
    mate, broken = run([5, 6, 7], [96] * 20)
    (later,) = run([5, 6, 7])
    assert broken.finish_reason == "error" and "not numbers" in str(broken.stop_reason) and not broken.token_ids
    assert alone.token_ids == mate.token_ids == later.token_ids
    assert engine.memory.in_use() == 0


def test_a_step_that_breaks_off_leaves_a_working_engine(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran ends with an error, what waits is served, and the donated cache is made anew."""
    running = small.request(small.submit([5, 6, 7], GREEDY))
    small.step()
    waiting = small.request(small.submit([8, 9], GREEDY))
    forward = small.runner.forward

    def broken(batch: Any) -> Any:
        forward(batch)
        for array in jax.tree.leaves(small.runner.kv):
            array.delete()
        raise MemoryError("device memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(small.scheduler, "_admit", lambda plan, budget: None)
        patch.setattr(small.runner, "forward", broken)
        with pytest.raises(MemoryError):
            small.step()
    reported = [out for _ in range(60) if small.has_work for out in small.step()]
    assert running is not None and waiting is not None
    assert running.sequences[0].finish_reason == "error"
    assert "device memory is full" in str(running.sequences[0].stop_reason)
    assert any(out.request_id == running.id and out.finished for out in reported)
    assert waiting.sequences[0].finish_reason == "length" and small.memory.in_use() == 0
    again = small.request(small.submit([8, 9], GREEDY))
    while small.has_work:
        small.step()
    assert again is not None and again.sequences[0].output == waiting.sequences[0].output


def test_seeds_of_requests_never_meet(large: Engine) -> None:
    requests = [large.request(large.submit([1, 2], SamplingParams(n=8, max_tokens=1))) for _ in range(40)]
    seeds = [s.seed for r in requests if r is not None for s in r.sequences]
    for request in requests:
        assert request is not None and large.abort(request.id)
    large.step()
    assert len(set(seeds)) == len(seeds) == 320


def test_an_abort_in_the_middle_of_a_step_waits_for_its_end(large: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finaliser would do it that the garbage collector runs anywhere."""
    first, second = (large.request(large.submit([4, 5, i], GREEDY)) for i in (6, 7))
    assert first is not None and second is not None
    sample = large.runner.sample

    def aborting(*args: Any) -> Any:
        assert large.abort(first.id)
        with pytest.raises(SpecaxError, match="inside a step"):
            large.step()
        return sample(*args)

    with monkeypatch.context() as patch:
        patch.setattr(large.runner, "sample", aborting)
        large.step()
    assert first.sequences[0].finish_reason == "abort" and second.live
    finished = [out for _ in range(99) if large.has_work for out in large.step() if out.finished]
    assert [out.request_id for out in finished] == [first.id, second.id]
    assert second.sequences[0].finish_reason == "length" and large.memory.in_use() == 0


def test_outputs_of_others_stay_with_the_engine(golden_llm: LLM) -> None:
    other = golden_llm.engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    golden_llm.generate([[4, 5, 6]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    outs = golden_llm.engine.step()
    assert [o.request_id for o in outs] == [other, other] and outs[-1].finished
    assert not golden_llm.engine.has_work
