"""The engine: submit, step, abort. Plain Python around a compiled device plane; no thread of its own.

A step is: schedule → copy shared pages that will be written → one forward pass → logits → sample → commit.
Only sampled tokens (and asked-for log-probabilities) come back from the device, at the end of the step.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specax.decoding.batch import Batch, build_batch
from specax.decoding.buckets import Buckets
from specax.decoding.config import EngineConfig, choose_num_pages
from specax.decoding.errors import InvalidRequestError
from specax.decoding.logprobs import on_host, row_logprobs
from specax.decoding.outputs import CompletionOutput, Logprob, RequestOutput
from specax.decoding.request import Request
from specax.decoding.request import Sequence as Sample
from specax.decoding.runner import Runner
from specax.decoding.sampler import NO_TOKEN, SamplerOutput
from specax.decoding.sampling_params import SamplingParams
from specax.decoding.sampling_table import SamplingTable
from specax.decoding.scheduler import Plan, Scheduler, Work, forking
from specax.decoding.text import TextStream
from specax.decoding.validation import Limits, bias_row, make_request
from specax.model import Decoder
from specax.model.errors import SpecaxError
from specax.model.tokenizer import Tokenizer
from specax.paged import CacheSpec, PagePool, PageTable

type Round = list[tuple[Sample, int, dict[int, Logprob] | None]]  # each sequence's new token


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread calls it, `abort` included."""

    def __init__(self, model: Decoder, config: EngineConfig | None = None, tokenizer: Tokenizer | None = None):
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        max_len = config.max_model_len or model.config.max_position
        if max_len > model.config.max_position:
            raise InvalidRequestError(
                f"max_model_len is {max_len}, but the model was made for {model.config.max_position} positions"
            )
        spec = CacheSpec(
            layers=model.config.num_layers,
            kv_heads=model.padded.num_kv_heads,
            head_dim=model.config.head_dim,
            page_size=config.page_size,
            dtype=config.kv_dtype or str(model.dtype),
        )
        pages_per_row = -(-max_len // config.page_size)
        num_pages = config.num_pages or choose_num_pages(spec, pages_per_row * config.max_rows, model.layout)
        self.pool = PagePool(num_pages)
        self.buckets = Buckets(config.max_rows, config.max_batched_tokens, pages_per_row)
        self.scheduler = Scheduler(
            self.pool, config.page_size, config.max_rows, config.max_batched_tokens, self.buckets.max_prefill_rows
        )
        self.limits = Limits(
            vocab_size=model.config.vocab_size,
            max_len=max_len,
            max_rows=config.max_rows,
            pool_tokens=(num_pages - 1) * config.page_size,
            eos=frozenset(model.config.eos_token_ids).union(tokenizer.eos_token_ids if tokenizer else ()),
        )
        groups = model.config.kv_groups
        specs = tuple(dataclasses.replace(spec, layers=len(group.layers)) for group in groups)
        self.runner = Runner(model, specs, (num_pages,) * len(groups), config.max_rows)
        self._table = SamplingTable(config.max_rows, model.config.vocab_size)
        self._requests: dict[str, Request] = {}
        self._outbox: list[RequestOutput] = []  # of requests that ended outside a step (aborts)
        self._ids = itertools.count()
        self._stats = dict.fromkeys(
            ("steps", "prompt_tokens", "generated_tokens", "padding_tokens", "requests_finished"), 0
        )
        self._peak_pages = 0
        self._host_seconds = {"schedule": 0.0, "build": 0.0, "commit": 0.0}
        self._warm_compiles: int | None = None
        self._stepping = False
        self._late_aborts: list[str] = []

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> str:
        """Queues a prompt and returns the request's id. Nothing is computed before `step`.

        Raises:
          InvalidRequestError: the prompt or a parameter is wrong; the message says what would be right.
          CapacityError: the page pool can never hold the request.
        """
        number = next(self._ids)
        params = SamplingParams() if params is None else params
        request = make_request(f"request-{number}", prompt_token_ids, params, self.limits, self.tokenizer)
        seed = params.seed
        if seed is None:  # far apart for different requests, so that seed + index never meets another one's
            seed = int(np.random.SeedSequence((self.config.seed, number)).generate_state(1)[0])
        for index in range(params.n):
            table = PageTable(self.pool, self.config.page_size)
            sample = Sample(request, index, table, (seed + index) & 0xFFFFFFFF)
            if self.tokenizer is not None:
                stops, include = params.stop_strings, params.include_stop_str_in_output
                sample.text = TextStream(self.tokenizer, request.prompt, stops, include, params.skip_special_tokens)
            request.sequences.append(sample)
        self._requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._requests or self._outbox)

    def step(self) -> list[RequestOutput]:
        """Runs one iteration and returns what is new of each request that got something.

        If it raises (out of device memory, Ctrl-C), what was running ends with finish_reason "error", the queue
        stays, and the next step reports and goes on.
        """
        if self._stepping:
            raise SpecaxError("Engine.step was called inside a step: one loop drives an engine")
        outbox, self._outbox = self._outbox, []
        self._stepping = True
        try:
            return outbox + self._step()
        except BaseException as error:
            self._outbox = outbox + self._outbox
            self._abandon(error)
            raise
        finally:
            self._stepping = False
            late, self._late_aborts = self._late_aborts, []
            for request_id in late:
                self.abort(request_id)

    def _step(self) -> list[RequestOutput]:
        with self._timed("schedule"):
            plan = self.scheduler.schedule()
            for work in plan.prefills:
                self._note_scheduled(work.sequence.request)
            self._peak_pages = max(self._peak_pages, self.pool.num_used)
        if not plan.work:
            return []
        with self._timed("build"):
            batch = build_batch(plan, self.buckets, self.config.page_size, len(self.runner.kv.k))
        self._load_slots(plan)
        if copies := [copy for work in plan.work for copy in work.copies]:
            self.runner.copy(copies)
        rows, hidden = self.runner.forward(batch.forward)
        rounds = self._sample(batch, rows)
        self._score_prompts(batch, plan, hidden)
        with self._timed("commit"):
            outputs = self._commit(plan, rounds)
        self._stats["steps"] += 1
        self._stats["padding_tokens"] += batch.shape.tokens - plan.num_tokens
        return outputs

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._host_seconds[part] += time.perf_counter() - start

    def _note_scheduled(self, request: Request) -> None:
        if request.metrics.scheduled is None:
            request.metrics.scheduled = time.monotonic()
            self._stats["prompt_tokens"] += len(request.prompt)

    def hand_back(self, outputs: list[RequestOutput]) -> None:
        """Puts outputs back for the next `step` to return: those of requests that this caller did not submit."""
        self._outbox.extend(outputs)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its pages are free at once. The next `step` reports it. False: not known."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if self._stepping:  # from a finaliser that runs in the middle of a step
            self._late_aborts.append(request_id)
            return True
        ended = []
        for sample in request.live:
            held = sample.text.flush(stoppable=False)[0] if sample.text else ""
            self._finish(sample, "abort")
            ended.append(CompletionOutput(sample.index, [], held, "abort"))
        self._outbox.append(_output(request, ended))
        self._forget(request)
        return True

    def request(self, request_id: str) -> Request | None:
        """A request that is not finished yet."""
        return self._requests.get(request_id)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compiles every bucket; afterwards no step compiles. Returns the seconds it took."""
        seconds = self.runner.warmup(self.buckets, self.limits.max_len, progress)
        self._warm_compiles = self.runner.compiles.count
        return seconds

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made, and the pool as it is now."""
        compiles = self.runner.compiles
        steps = max(1, self._stats["steps"])
        return {
            **self._stats,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "preemptions": self.scheduler.preemptions,
            "pages_total": self.pool.num_pages - 1,
            "pages_free": self.pool.num_free,
            "pages_cached": 0,
            "pages_in_use": self.pool.num_used,
            "pages_peak": self._peak_pages,
            "compilations": compiles.count,
            "compile_seconds": compiles.seconds,
            "compilations_after_warmup": None if self._warm_compiles is None else compiles.count - self._warm_compiles,
            "host_ms_per_step": {k: 1e3 * v / steps for k, v in self._host_seconds.items()},
        }

    # --- device work of a step

    def _load_slots(self, plan: Plan) -> None:
        """Fills the sampler slots of sequences that were just admitted."""
        for work in plan.prefills:
            if work.start == 0:
                self._load_slot(work.sequence)

    def _load_slot(self, sample: Sample) -> None:
        assert sample.slot is not None  # it runs
        bias = bias_row(sample.request, self.limits)
        self._table.load(sample, biased=bias is not None)
        if bias is not None or sample.request.params.penalised:
            tokens = np.zeros(self.limits.max_len, np.int32)
            tokens[: len(sample.tokens)] = sample.tokens
            prompt_len = len(sample.request.prompt)
            blank = np.zeros(self.limits.vocab_size, np.float32)
            self.runner.load_slot(sample.slot, tokens, prompt_len, len(sample.tokens), blank if bias is None else bias)

    def _sample(self, batch: Batch, rows: jax.Array) -> list[Round]:
        """Samples every logit row once, and once more for each further fork of its sequence.

        Returns rounds of (sequence, token, logprobs). Forks start here: their prompt is computed.
        """
        if not batch.sampling:
            return []
        logits = self.runner.logits(rows)
        current: list[Sample | None] = [work.sequence for work in batch.sampling]
        children = {row: self._fork(work) for row, work in enumerate(batch.sampling) if forking(work.sequence)}
        dispatched = []
        for i in range(1 + max(map(len, children.values()), default=0)):
            if i:
                current = [None] * len(batch.sampling)
                for row, forks in children.items():
                    current[row] = forks[i - 1] if i <= len(forks) else None
            with self._timed("build"):
                inputs = self._table.inputs(current, batch.shape.logit_rows)
            dispatched.append((current, self.runner.sample(logits, inputs)))
        return [self._fetch(samples, logits, out) for samples, out in dispatched]

    def _fork(self, work: Work) -> list[Sample]:
        """Starts the forks of a sequence whose prompt this step computes."""
        work.sequence.computed = work.stop
        forks = self.scheduler.fork(work.sequence)
        for fork in forks:
            work.sequence.request.metrics.cached_tokens += fork.computed
            self._load_slot(fork)
        return forks

    def _fetch(self, samples: list[Sample | None], logits: jax.Array, out: SamplerOutput) -> Round:
        """Brings one round of results to the host."""
        wanted = [s.request.params.logprobs for s in samples if s is not None and s.request.params.logprobs is not None]
        scores = on_host(out.logprobs, out.ranks, out.top_tokens, out.top_logprobs) if wanted else None
        top = scores[2].shape[1] if scores else 0
        whole = self.runner.log_softmax(logits) if any(k < 0 or k > top for k in wanted) else None
        got = []
        for i, (sample, token) in enumerate(zip(samples, np.asarray(out.tokens).tolist(), strict=False)):
            if sample is None:
                continue
            k = sample.request.params.logprobs
            got.append((sample, token, None if k is None or not scores else row_logprobs(token, k, i, scores, whole)))
        return got

    def _score_prompts(self, batch: Batch, plan: Plan, hidden: jax.Array) -> None:
        """Log-probabilities of prompt tokens, for the requests that asked for them."""
        for index, work in enumerate(plan.decodes + plan.prefills):
            request = work.sequence.request
            k = request.params.prompt_logprobs
            if request.prompt_logprobs is None or k is None or work.sequence.index:
                continue
            # The hidden state at position p scores the prompt token at p + 1. (None yet of the recomputed ones.)
            first = max(work.start, len(request.prompt_logprobs) - 1)
            last = min(work.stop, len(request.prompt) - 1)
            if first >= last:
                continue
            at = batch.first_token.get(id(work), index) - work.start
            rows = np.arange(first + at, last + at)
            targets = np.asarray(request.prompt[first + 1 : last + 1])
            for block, (scores, whole) in enumerate(self.runner.score(hidden, rows, targets)):
                host = on_host(*scores)
                full = np.asarray(whole) if k < 0 or k > host[2].shape[1] else None
                part = targets[block * len(host[0]) :][: len(host[0])]
                for i, token in enumerate(part.tolist()):
                    request.prompt_logprobs.append(row_logprobs(token, k, i, host, full))

    # --- host work after it

    def _commit(self, plan: Plan, rounds: list[Round]) -> list[RequestOutput]:
        """Books what was computed and sampled, finishes what is done, and reports the news."""
        now = time.monotonic()
        for work in plan.work:
            work.sequence.computed = work.stop
            work.sequence.request.metrics.computed_tokens += work.stop - work.start
        news: dict[Request, list[CompletionOutput]] = {}
        for sample, token, logprobs in itertools.chain.from_iterable(rounds):
            request = sample.request
            if request.metrics.first_token is None:
                request.metrics.first_token = now
            if token == NO_TOKEN:
                why = "no token can be sampled: all of them are forbidden, or the logits are not numbers"
                self._finish(sample, "error", why)
                new = CompletionOutput(sample.index, [], "", "error", why)
            else:
                sample.tokens.append(token)
                text = self._advance(sample, token)
                new = CompletionOutput(sample.index, [token], text, sample.finish_reason, sample.stop_reason)
                if logprobs is not None:
                    sample.logprobs.append(logprobs)
                    new.logprobs = [logprobs]
            news.setdefault(request, []).append(new)
        outputs = [_output(request, samples) for request, samples in news.items()]
        self._stats["generated_tokens"] += sum(len(o.token_ids) for out in outputs for o in out.outputs)
        for out in outputs:
            if out.finished:
                self._forget(self._requests[out.request_id])
        return outputs

    def _advance(self, sample: Sample, token: int) -> str:
        """Text and end of a sequence after a new token; returns the newly final text.

        A failure here (a tokenizer's, say) ends this request alone.
        """
        request, length = sample.request, sample.output_len
        stoppable = length >= request.params.min_tokens
        try:
            ends = stoppable and token in request.stop_ids
            # The token that ends the output is not part of its text.
            text, stop = sample.text.push(token, stoppable) if sample.text and not ends else ("", None)
            full = length >= request.max_tokens
            if (ends or full) and stop is None and sample.text:
                rest, stop = sample.text.flush(stoppable and not ends)
                text += rest
        except Exception as error:
            self._finish(sample, "error", f"{type(error).__name__}: {error}")
            return ""
        if stop is not None:
            self._finish(sample, "stop", stop)
        elif ends:
            self._finish(sample, "stop", token if token not in self.limits.eos else None)
        elif full:
            self._finish(sample, "length")
        return text

    def _abandon(self, error: BaseException) -> None:
        """After a step that broke off: what was running ends with an error, as its cache may be gone.

        The queue stays, and the next `step` reports what ended here.
        """
        why = f"{type(error).__name__}: {error}"
        ended: dict[Request, list[CompletionOutput]] = {r: [] for r in self._requests.values() if r.finished}
        for sample in [s for leader in self.scheduler.running for s in (leader, *forking(leader))]:
            self._finish(sample, "error", why)
            ended.setdefault(sample.request, []).append(CompletionOutput(sample.index, [], "", "error", why))
        for request, samples in ended.items():
            self._outbox.append(_output(request, samples))
            if request.finished:
                self._forget(request)
        self.runner.recover()

    def _finish(self, sample: Sample, reason: str, detail: str | int | None = None) -> None:
        sample.finish_reason, sample.stop_reason = reason, detail
        self.scheduler.finish(sample)

    def _forget(self, request: Request) -> None:
        request.metrics.finish = time.monotonic()
        self._stats["requests_finished"] += 1
        del self._requests[request.id]


def completed(request: Request) -> RequestOutput:
    """All of a finished request."""
    outputs = [
        CompletionOutput(
            s.index, s.output, s.text.text if s.text else "", s.finish_reason, s.stop_reason,
            s.logprobs if request.params.logprobs is not None else None,
        )
        for s in request.sequences
    ]  # fmt: skip
    return _output(request, outputs)


def _output(request: Request, outputs: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput(
        request.id, request.prompt, outputs, request.finished, request.metrics, request.prompt_logprobs
    )

