"""Beam search against transformers' own results and a brute-force search without a cache, whatever the schedule."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specax import LLM, CapacityError, Engine, EngineConfig, InvalidRequestError, SamplingParams
from specax.decoding.outputs import CompletionOutput, RequestOutput, completed
from specax.decoding.policies import PolicyContext, make_policy
from specax.decoding.request import Request
from specax.decoding.request import Sequence as Beam
from specax.decoding.scheduler import Scheduler
from specax.model import Decoder
from specax.paged import KVMemory
from specax.paged.page_table import PageCopy
from tests.conftest import GOLDENS
from tests.decoding.test_text import BYTES

LENGTH, STEPS = 64, 12
STOPS = (11, 63, 114)  # ids that greedy outputs of the checkpoint are full of: beams finish early

# Two groups of beams at a time are too much for these 20 pages.
TIGHT = EngineConfig(page_size=4, num_pages=21, max_rows=8, max_batched_tokens=16, max_model_len=LENGTH)

type Outputs = list[tuple[list[int], float]]  # tokens and score, best first
type LogSoftmax = Callable[[tuple[int, ...]], np.ndarray]
type Edit = Callable[[list[int], np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def tight(golden_llm: LLM) -> Engine:
    engine = Engine(golden_llm.model, TIGHT)
    engine.warmup()
    return engine


@pytest.fixture
def roomy(golden_llm: LLM) -> Iterator[Engine]:
    yield golden_llm.engine
    check_at_rest(golden_llm.engine)


@pytest.fixture(scope="module")
def log_softmax(golden_llm: LLM) -> LogSoftmax:
    """Log-probabilities, float64 [vocab], of what follows a sequence: the model without a cache."""

    @nnx.jit
    def run(model: Decoder, tokens: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(model(tokens).logits[0], axis=-1)

    @functools.cache
    def of(tokens: tuple[int, ...]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)  # causal: what follows doesn't matter
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(golden_llm.model, jnp.asarray(padded)), np.float64)[len(tokens) - 1]

    return of


def brute_force(
    log_softmax: LogSoftmax,
    prompt: list[int],
    params: SamplingParams,
    ends: Callable[[list[int]], bool] | None = None,
    edit: Edit = lambda out, logprobs: logprobs,
) -> Outputs:
    """The textbook's loop over whole sequences, with transformers' rules for stopping."""
    ends = ends or (lambda out: out[-1] in (params.stop_token_ids or ()))
    width, steps, power = params.beam_width, params.max_tokens or 0, params.length_penalty
    open_beams: list[tuple[float, list[int]]] = [(0.0, [])]
    done: Outputs = []
    for length in range(1, steps + 1):
        pool = [
            (total + logprob, [*out, token])
            for total, out in open_beams
            for token, logprob in enumerate(edit(out, log_softmax((*prompt, *out))).tolist())
            if logprob > -np.inf
        ]
        pool.sort(key=lambda item: -item[0])
        for total, out in pool[:width]:
            if length == steps or ends(out):
                done.append((out, total / length**power))
        done = sorted(done, key=lambda item: -item[1])[:width]
        open_beams = [item for item in pool[: 4 * width + 4] if not ends(item[1])][:width]
        if not open_beams or (len(done) == width and params.early_stopping is True):
            break
        reach = steps if params.early_stopping == "never" and power > 0 else length
        if len(done) == width and open_beams[0][0] / reach**power <= done[-1][1]:
            break
    return done[: params.n]


def beam(width: int = 4, **fields: Any) -> SamplingParams:
    """Beam search for STEPS tokens; all beams are returned."""
    values = {"n": width, "max_tokens": STEPS, "ignore_eos": True, "stop_token_ids": STOPS, **fields}
    return SamplingParams(beam_width=width, **values)


STOPPING: tuple[bool | str, ...] = (False, True, "never")
# Every pair of values meets; the goldens have all combinations of the last two.
CASES = [
    beam(width, length_penalty=float(penalty), early_stopping=STOPPING[(width + penalty) % 3])
    for width, penalty in itertools.product((2, 3, 4), (0, 1, 2))
]


def prompts(count: int, shortest: int = 1, longest: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 128, rng.integers(shortest, longest + 1)).tolist() for _ in range(count)]


def submit(engine: Engine, prompt: list[int], params: SamplingParams) -> Request:
    request = engine.request(engine.submit(prompt, params))
    assert request is not None
    return request


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; the outputs of each request as they came."""
    got: dict[str, list[RequestOutput]] = {}
    for _ in range(2000):
        if not engine.has_work:
            return got
        for out in engine.step():
            got.setdefault(out.request_id, []).append(out)
    raise AssertionError("the engine does not come to an end")


def run(engine: Engine, many: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[CompletionOutput]]:
    """Outputs in order; of beam search in one piece at the end, and equal to the request's."""
    requests = [submit(engine, prompt, p) for prompt, p in zip(many, params, strict=True)]
    got = drain(engine)
    check_at_rest(engine)
    for request in requests:
        if request.beams is not None:
            (out,) = got[request.id]
            assert out.finished and out.outputs == completed(request).outputs
            assert [part.index for part in out.outputs] == list(range(len(out.outputs)))
    return [completed(request).outputs for request in requests]


def check_at_rest(engine: Engine) -> None:
    memory, scheduler = engine.memory, engine.scheduler
    assert not scheduler.running and not scheduler.waiting
    assert sorted(scheduler._slots) == list(range(engine.config.max_rows))
    assert all(node.locks == 0 for node in memory.tree.nodes())
    engine.reset_prefix_cache()
    assert memory.pools[0].num_used == 0


def check(got: list[CompletionOutput], want: Outputs, params: SamplingParams) -> None:
    assert [part.token_ids for part in got] == [tokens for tokens, _ in want]
    for part, (tokens, score) in zip(got, want, strict=True):
        assert part.cumulative_logprob == pytest.approx(score * len(tokens) ** params.length_penalty, abs=1e-3)
        stopped = tokens[-1] in (params.stop_token_ids or ())
        assert (part.finish_reason, part.stop_reason) == (("stop", tokens[-1]) if stopped else ("length", None))


def same(got: list[CompletionOutput], want: list[CompletionOutput]) -> bool:
    """Sums of log-probabilities may differ in the last digits: other batches, other kernels."""

    def keys(outs: list[CompletionOutput]) -> list[Any]:
        return [(part.index, part.token_ids, part.finish_reason, part.stop_reason) for part in outs]

    sums = [[part.cumulative_logprob for part in outs] for outs in (got, want)]
    return keys(got) == keys(want) and sums[0] == pytest.approx(sums[1], abs=1e-3)


def test_transformers_finds_the_same_beams(roomy: Engine, golden: dict[str, np.ndarray]) -> None:
    with np.load(GOLDENS / "smollm2_beams.npz") as data:
        beams = dict(data)
    cases, many, width, steps = beams["tokens"].shape
    early = {"False": False, "True": True, "never": "never"}
    params = [
        beam(width, max_tokens=steps, stop_token_ids=beams["eos"], length_penalty=penalty, early_stopping=early[stop])
        for penalty, stop in zip(beams["length_penalty"], beams["early_stopping"].tolist(), strict=True)
    ]
    each = [p for p in params for _ in range(many)]
    outputs = run(roomy, golden["tokens"].tolist() * cases, each)
    want_tokens, want_scores = beams["tokens"].reshape(-1, width, steps), beams["scores"].reshape(-1, width)
    for got, tokens, scores, p in zip(outputs, want_tokens, want_scores, each, strict=True):
        want = [[t for t in row if t >= 0] for row in tokens.tolist()]
        check(got, list(zip(want, scores.tolist(), strict=True)), p)
    lengths = {len(part.token_ids) for got in outputs for part in got}
    assert len(lengths) > 4 and steps in lengths


@pytest.mark.parametrize("pressure", ["none", "pages", "pages, no prefix cache"])
def test_a_brute_force_search_finds_the_same_beams(
    pressure: str, golden_llm: LLM, tight: Engine, log_softmax: LogSoftmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = golden_llm.engine if pressure == "none" else tight
    if pressure.endswith("cache"):
        monkeypatch.setattr(engine.memory, "prefix_cache", False)
    before = engine.stats()["preemptions"]
    mates = prompts(3, shortest=8)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = run(golden_llm.engine, mates, [greedy] * 3)
    # Batch-mates between them, so that groups of beams meet others, and pages run out at any time.
    mixed: list[tuple[list[int], SamplingParams]] = []
    for i, case in enumerate(zip(prompts(len(CASES)), CASES, strict=True)):
        mixed += [case] if i % 3 else [(mates[i // 3], greedy), case]
    outputs = run(engine, *zip(*mixed, strict=True))
    for (prompt, params), got in zip(mixed, outputs, strict=True):
        if params is greedy:
            assert got == alone[mates.index(prompt)]
        else:
            check(got, brute_force(log_softmax, prompt, params), params)
    assert (engine.stats()["preemptions"] > before) == (pressure != "none")
    assert engine is not tight or engine.stats()["compilations_after_warmup"] == 0


def test_biases_bans_and_few_candidates(roomy: Engine, log_softmax: LogSoftmax) -> None:
    def only(*allowed: int) -> Edit:
        return lambda out, logprobs: np.where(np.isin(np.arange(len(logprobs)), allowed), logprobs, -np.inf)

    def bias(out: list[int], logprobs: np.ndarray) -> np.ndarray:
        return logprobs + 2.0 * (np.arange(len(logprobs)) == 40)

    def late(out: list[int], logprobs: np.ndarray) -> np.ndarray:
        return np.where(np.isin(np.arange(len(logprobs)), STOPS) & (len(out) < 5), -np.inf, logprobs)

    cases: list[tuple[SamplingParams, Edit]] = [
        (beam(4, logit_bias={40: 2.0}), bias),
        (beam(4, min_tokens=5), late),
        (beam(4, allowed_token_ids=[7, 11], max_tokens=4), only(7, 11)),
        (beam(4, allowed_token_ids=[7, 8], max_tokens=1), only(7, 8)),
        (beam(3, allowed_token_ids=[5]), only(5)),
        (beam(3, allowed_token_ids=[11]), only(11)),
    ]
    (prompt,) = prompts(1)
    outputs = run(roomy, [prompt] * len(cases), [params for params, _ in cases])
    for (params, edit), got in zip(cases, outputs, strict=True):
        check(got, brute_force(log_softmax, prompt, params, edit=edit), params)
    assert [len(got) for got in outputs] == [4, 4, 4, 2, 1, 1]  # there are no more


def test_logprobs_are_those_of_the_path(roomy: Engine, log_softmax: LogSoftmax) -> None:
    (prompt,) = prompts(1)
    (outputs,) = run(roomy, [prompt], [beam(3, logprobs=2, prompt_logprobs=0, stop_token_ids=None)])
    for part in outputs:
        assert part.logprobs is not None and len(part.logprobs) == len(part.token_ids)
        total = 0.0
        for at, token in enumerate(part.token_ids):
            want = log_softmax((*prompt, *part.token_ids[:at]))
            entry = part.logprobs[at]
            assert entry is not None
            assert entry[token].logprob == pytest.approx(want[token], abs=1e-4)
            assert entry[token].rank == 1 + np.count_nonzero(want > want[token])
            assert set(entry) == {token, *np.argsort(-want)[:2].tolist()}
            total += entry[token].logprob
        assert part.cumulative_logprob == pytest.approx(total)


def test_stop_strings_finish_beams(roomy: Engine, log_softmax: LogSoftmax, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roomy, "tokenizer", BYTES)
    (prompt,) = prompts(1)
    free = beam(4, stop_token_ids=None)
    (outputs,) = run(roomy, [prompt], [free])
    text = bytes(outputs[0].token_ids).decode()
    assert [part.text for part in outputs] == [bytes(part.token_ids).decode() for part in outputs]
    stops = [text[3:5], text[7]]
    params = beam(4, stop_token_ids=None, stop=stops)
    (got,) = run(roomy, [prompt], [params])
    want = brute_force(log_softmax, prompt, params, ends=lambda out: any(s in bytes(out).decode() for s in stops))
    assert [part.token_ids for part in got] == [tokens for tokens, _ in want]
    for part in got:
        whole = bytes(part.token_ids).decode()
        found = [stop for stop in stops if stop in whole]
        assert part.finish_reason == ("stop" if found else "length")
        if found:
            assert part.stop_reason == found[0] and whole == part.text + found[0]
    assert any(part.finish_reason == "stop" for part in got)


def test_beams_share_pages_and_copy_only_the_last(roomy: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    width, prompt = 4, np.random.default_rng(2).integers(0, 128, 96).tolist()
    assert roomy.config.page_size == 8
    copies: list[PageCopy] = []
    move = roomy.runner.move_pages

    def counted(ops: Any) -> None:
        assert all(isinstance(op, PageCopy) for op in ops)
        copies.extend(ops)
        last = {int(s.table.pages[0, -1]) for s in request.sequences}
        assert {op.target for op in ops} <= last and len(ops) < width
        move(ops)

    monkeypatch.setattr(roomy.runner, "move_pages", counted)
    request = submit(roomy, prompt, beam(width, stop_token_ids=None))
    while request.sequences[-1].table is None or len(request.sequences[-1].table) < 13:
        roomy.step()
    assert roomy.stats()["pages_shared"] == 96 // 8 and roomy.stats()["pages_in_use"] == 96 // 8 + width
    assert not copies  # the prompt ends with a page
    while roomy.has_work:
        used = roomy.stats()["pages_in_use"]
        assert used <= 96 // 8 + 2 * width
        roomy.step()
    assert copies


@pytest.mark.parametrize("width", [2, 4])
def test_abort_at_any_time_leaves_nothing(width: int, tight: Engine) -> None:
    first, second = prompts(2, shortest=10)
    for steps in range(1, 16):
        one, other = submit(tight, first, beam(width)), submit(tight, second, beam(width))
        reported = [out for _ in range(steps) for out in tight.step()]
        if not one.finished:
            assert tight.abort(one.id) and not tight.abort(one.id)
            reported += tight.step()
            (out,) = [out for out in reported if out.request_id == one.id]
            assert [(part.token_ids, part.finish_reason) for part in out.outputs] == [([], "abort")] * width
            assert completed(one).outputs == out.outputs
        if other.live:
            tight.abort(other.id)
        drain(tight)
        check_at_rest(tight)


def test_starting_over_in_the_middle_changes_nothing(tight: Engine) -> None:
    many, params = prompts(2, shortest=10), [beam(3), beam(4)]
    want = run(tight, many, params)
    requests = [submit(tight, prompt, p) for prompt, p in zip(many, params, strict=True)]
    for step in range(400):
        tight.step()
        if step in (3, 6, 7, 9, 30):
            tight.reset_prefix_cache()
    assert not tight.has_work
    assert all(same(completed(request).outputs, outs) for request, outs in zip(requests, want, strict=True))
    check_at_rest(tight)


def test_a_beam_that_is_not_a_number_ends_its_request_alone(tight: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    many, params = prompts(2, shortest=5), [beam(2), beam(3)]
    _, want = run(tight, many, params)
    candidates = tight.runner.candidates

    def broken(logits: jax.Array, inputs: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, logprobs = candidates(logits, inputs)
        if bad.request.params.beam_width == 2 and bad.output_len == 4 and bad.slot is not None:
            logprobs = np.where((inputs.slots == bad.slot)[:, None], np.nan, logprobs)
        return tokens, logprobs

    monkeypatch.setattr(tight.runner, "candidates", broken)
    one, other = (submit(tight, prompt, p) for prompt, p in zip(many, params, strict=True))
    bad = one.sequences[1]
    drain(tight)
    assert [(part.token_ids, part.finish_reason) for part in completed(one).outputs] == [([], "error")] * 2
    assert "can be sampled" in str(completed(one).outputs[0].stop_reason)
    assert same(completed(other).outputs, want)
    check_at_rest(tight)


def test_a_step_that_raises_ends_what_runs(tight: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(1)
    request = submit(tight, prompt, beam(3))
    for _ in range(5):
        tight.step()

    def fail(batch: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(tight.runner, "forward", fail)
        with pytest.raises(RuntimeError):
            tight.step()
    (out,) = drain(tight)[request.id]
    assert out.finished and [part.finish_reason for part in out.outputs] == ["error"] * 3
    check_at_rest(tight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "at most as many"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 2.0}, "beam_width above 1"),
    ],
)
def test_wrong_parameters_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


def test_what_the_engine_cannot_hold_is_refused(roomy: Engine, tight: Engine, golden_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max_rows"):
        roomy.submit([1], beam(9))
    with pytest.raises(InvalidRequestError, match="stop tokens"):
        roomy.submit([1], beam(2, stop_token_ids=range(17)))
    with pytest.raises(CapacityError, match="4 beams"):
        tight.submit([1] * 16, beam(4, max_tokens=18))  # 4 + 4 · (9 − 4) = 24 of 20 pages
    assert len(run(tight, [[1] * 16], [beam(4, max_tokens=17)])[0]) == 4  # 4 + 4 · 4
    with pytest.raises(InvalidRequestError, match="use generate"):
        golden_llm.stream([1], beam(2))


def test_a_lock_on_the_cache_does_not_starve_the_last_one() -> None:
    """A sequence that needs all pages shares half of one: its copy and the locked original are one too many."""
    memory = KVMemory((5,), page_size=4)
    context = PolicyContext(time.monotonic)
    scheduler = Scheduler(memory, lambda _: make_policy("fcfs", context), 2, 32, 2, 8)
    for number, (length, new) in enumerate(((6, 1), (7, 9))):
        prompt = list(range(length))
        request = Request(f"r{number}", prompt, SamplingParams(), new, frozenset(), (), (), number)
        sequence = Beam(request, 0, memory.new_table(), 0)
        request.sequences.append(sequence)
        scheduler.add(request)
        for _ in range(new):
            plan = scheduler.schedule()
            assert plan.work
            scheduler.advance(plan)
            sequence.tokens.append(50)
        scheduler.finish(sequence, "length")
    assert memory.counters.hit_tokens == 6
