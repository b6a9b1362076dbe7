"""The engine: submit, step, abort. Plain Python around a compiled device plane; no thread of its own.

A step is: schedule → copy shared pages that will be written → one forward pass → logits → sample → commit.
Only sampled tokens (and asked-for log-probabilities) come back from the device, at the end of the step.
"""

import dataclasses
import hashlib
import itertools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specax.decoding import beam_search
from specax.decoding.batch import build_batch
from specax.decoding.beam_rounds import BeamRounds
from specax.decoding.buckets import Buckets
from specax.decoding.config import EngineConfig, choose_num_pages, kv_windows
from specax.decoding.errors import InvalidRequestError
from specax.decoding.outputs import CompletionOutput, RequestOutput, report
from specax.decoding.policies import Policy, PolicyContext, make_policy
from specax.decoding.request import Request
from specax.decoding.request import Sequence as Sample
from specax.decoding.runner import Runner
from specax.decoding.sampler import NO_TOKEN
from specax.decoding.sampling_params import SamplingParams
from specax.decoding.scheduler import Plan, Scheduler, forking
from specax.decoding.stats import EngineStats
from specax.decoding.step_sampler import BeamRows, Round, StepSampler
from specax.decoding.swap_cost import SwapCost
from specax.decoding.text import TextStream, push_token
from specax.decoding.validation import Limits, make_request, set_origin
from specax.model import Decoder
from specax.model.errors import SpecaxError
from specax.paged import CacheSpec, KVMemory
from specax.paged.disk_tier import DiskTier
from specax.paged.host_tier import HostTier

if TYPE_CHECKING:  # (token ids need no tokenizer)
    from specax.model.tokenizer import Tokenizer


class Engine:
    """Continuous batching over a paged KV cache. Not thread-safe: one thread calls it, `abort` included."""

    def __init__(self, model: Decoder, config: EngineConfig | None = None, tokenizer: "Tokenizer | None" = None):
        self.config = config = config or EngineConfig()
        self._model_config = model.config
        self.tokenizer = tokenizer
        max_len = config.max_model_len or model.config.max_position
        if max_len > model.config.max_position and config.streaming_window is None:
            raise InvalidRequestError(
                f"max_model_len is {max_len}, but the model was made for {model.config.max_position} positions"
            )
        windows = kv_windows(config, model)
        specs = tuple(
            CacheSpec(
                layers=len(group.layers),
                kv_heads=model.padded.num_kv_heads,
                head_dim=model.config.head_dim,
                page_size=config.page_size,
                dtype=config.kv_dtype or str(model.dtype),
            )
            for group in model.config.kv_groups
        )
        num_pages = choose_num_pages(config, specs, windows, max_len, model.layout)
        pages_per_row = -(-max_len // config.page_size)
        self.buckets = Buckets(config.max_rows, config.max_batched_tokens, pages_per_row)
        streaming = windows[0] if config.streaming_window is not None else None
        self.runner = Runner(model, specs, num_pages, config.max_rows, streaming)
        self.swap_cost = SwapCost(sum(spec.page_bytes for spec in specs) / config.page_size)
        self._page_bytes = tuple(spec.page_bytes for spec in specs)
        self.memory = KVMemory(
            num_pages,
            config.page_size,
            windows,
            config.max_batched_tokens,
            config.prefix_cache,
            config.tenant_cache_share,
            self._host_tier(),
            self._open_disk(),
            config.cache_write == "through",
        )
        self.scheduler = Scheduler(
            self.memory,
            self._make_policy,
            config.max_rows,
            config.max_batched_tokens,
            self.buckets.max_prefill_rows,
            pages_per_row,
            {"recompute": lambda _: False, "swap": lambda _: True, "auto": self.swap_cost.worth_it}[config.preemption],
        )
        self.limits = Limits(
            vocab_size=model.config.vocab_size,
            max_len=max_len,
            max_rows=config.max_rows,
            pages=tuple(n - 1 for n in num_pages),
            pages_needed=self.memory.pages_needed,
            pages_shared=self.memory.pages_shared,
            eos=frozenset(model.config.eos_token_ids).union(tokenizer.eos_token_ids if tokenizer else ()),
        )
        self._stats = EngineStats()
        self._sampler = StepSampler(self.runner, self.scheduler, self.limits, self._stats)
        self._beams = BeamRounds(self.scheduler, self._sampler.load_slot)
        self._requests: dict[str, Request] = {}
        self._outbox: list[RequestOutput] = []  # of requests that ended outside a step (aborts)
        self._ids = itertools.count()
        self._closed = False
        self._stepping = False
        self._late_aborts: list[str] = []

    def _make_policy(self, scheduler: Scheduler) -> Policy:
        config = self.config
        shares = config.prefix_cache and not scheduler.memory.windowed  # what is being computed will be a hit
        prefilling = scheduler.prefilling if shares else tuple
        context = PolicyContext(
            time.monotonic, config.age_bound, scheduler.cached_tokens, prefilling, config.tenant_weights
        )
        return make_policy(config.policy, context)

    def _host_tier(self) -> HostTier | None:
        capacity = int(self.config.host_cache_gb * 2**30)
        if self.config.host_cache_gb and capacity < sum(self._page_bytes):
            raise InvalidRequestError(
                f"host_cache_gb is {self.config.host_cache_gb:g}, less than one page ({sum(self._page_bytes)} bytes)"
            )
        return HostTier(capacity, self._page_bytes) if capacity else None

    def _open_disk(self) -> DiskTier | None:
        config = self.config
        if config.disk_cache_dir is None:
            return None
        parts = (self.runner.fingerprint(), self._model_config, self._page_bytes, config.kv_dtype,
                 config.streaming_window, config.streaming_sinks)  # fmt: skip
        settings = repr(parts)
        digest = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
        folder = pathlib.Path(config.disk_cache_dir).expanduser()
        try:
            return DiskTier(folder, digest, int(config.disk_cache_gb * 2**30), config.page_size)
        except OSError as error:
            raise InvalidRequestError(f"disk_cache_dir: {error}; give a folder that can be made and written") from error

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        ttft_target: float | None = None,
    ) -> str:
        """Queues a prompt and returns the request's id. Nothing is computed before `step`.

        Args:
          priority: the higher, the sooner, under the "priority" policy.
          tenant: on whose behalf; for the "fair" policy and for shares of the cache.
          cache_salt: only requests with the same salt share cached KV.
          ttft_target: seconds from now to the first token that were promised; "priority" serves the most urgent
            of a class first.

        Raises:
          InvalidRequestError: the prompt or a parameter is wrong; the message says what would be right.
          CapacityError: the page pool can never hold the request.
        """
        self._check_open()
        number = next(self._ids)
        params = SamplingParams() if params is None else params
        request = make_request(f"request-{number}", prompt_token_ids, params, self.limits, self.tokenizer)
        set_origin(request, number, priority, tenant, cache_salt, ttft_target)
        seed = params.seed
        if seed is None:  # far apart for different requests, so that seed + index never meets another one's
            seed = int(np.random.SeedSequence((self.config.seed, number)).generate_state(1)[0])
        beams = params.beam_width > 1
        if beams:
            request.beams = beam_search.BeamGroup(request, self.limits.eos)
        for index in range(params.beam_width if beams else params.n):
            sample = Sample(request, index, self.memory.new_table(), (seed + index) & 0xFFFFFFFF)
            if self.tokenizer is not None:
                stops, include = params.stop_strings, params.include_stop_str_in_output
                sample.text = TextStream(self.tokenizer, request.prompt, stops, include, params.skip_special_tokens)
            request.sequences.append(sample)
        self.scheduler.add(request)
        self._requests[request.id] = request
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
        self._check_open()
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
        with self._stats.timed("schedule"):
            plan = self.scheduler.schedule()
            for work in plan.prefills:
                self._note_scheduled(work.sequence.request)
            self._stats.peak_pages = max(self._stats.peak_pages, self.memory.in_use())
        if plan.ops:
            self.runner.move_pages(plan.ops)
        if not plan.work:
            return []
        self.swap_cost.step_begins(plan.num_tokens, bool(plan.decodes), self.runner.compiles.count)
        with self._stats.timed("build"):
            batch = build_batch(plan, self.buckets, self.config.page_size, self.scheduler.tables)
        for sample in plan.admitted:
            self._sampler.load_slot(sample)
        rows, hidden = self.runner.forward(batch.forward)
        rounds, beams = self._sampler.sample(batch, rows)
        self._sampler.score_prompts(batch, plan, hidden)
        if batch.sampling:  # the device was waited for
            self.swap_cost.device_is_done(self.runner.compiles.count)
        with self._stats.timed("commit"):
            outputs = self._commit(plan, rounds, beams)
        self._stats.steps += 1
        self._stats.padding_tokens += batch.shape.tokens - plan.num_tokens
        return outputs

    def _note_scheduled(self, request: Request) -> None:
        if request.metrics.scheduled is None:
            request.metrics.scheduled = time.monotonic()
            self._stats.prompt_tokens += len(request.prompt)

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
        self.swap_cost.interrupted()
        ended = self._beams.end(request, request.beams.nothing("abort")) if request.beams else []
        for sample in request.live:
            held = sample.text.flush(stoppable=False)[0] if sample.text else ""
            self._finish(sample, "abort")
            ended.append(CompletionOutput(sample.index, [], held, "abort"))
        self._outbox.append(report(request, ended))
        self._forget(request)
        return True

    def request(self, request_id: str) -> Request | None:
        """A request that is not finished yet."""
        return self._requests.get(request_id)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> float:
        """Compiles every bucket; afterwards no step compiles. Returns the seconds it took."""
        tiers = self.memory.host is not None
        seconds = self.runner.warmup(self.buckets, self.limits.max_len, tiers, progress)
        if tiers:
            self.swap_cost.bytes_per_second = self.runner.bytes_per_second()
        self._stats.warm_compiles = self.runner.compiles.count
        return seconds

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made, and the pool as it is now."""
        compiles = self.runner.compiles
        return self._stats.report(self.scheduler, compiles.count, compiles.seconds)

    def reset_prefix_cache(self, keep_files: bool = False) -> None:
        """Forgets all cached KV, in every tier. Running requests start over from all the tokens that they have.

        Args:
          keep_files: leaves the disk tier alone: what it has may be hit again.
        """
        self._check_between_steps("reset_prefix_cache")
        self._drop_cache(self.memory.disk, keep_files)

    def update_weights(self, model: Decoder) -> None:
        """Goes on with new weights of the same model. What the old ones computed is forgotten, in every tier; running
        requests keep their tokens, whose KV is computed anew.

        Raises:
          ValueError: the model has another configuration, or parameters of another shape or dtype; nothing changed.
        """
        self._check_between_steps("update_weights")
        for field in dataclasses.fields(model.config):
            new, old = getattr(model.config, field.name), getattr(self._model_config, field.name)
            if new != old:
                raise ValueError(f"the new model's {field.name} is {new!r}, the engine's {old!r}")
        self.runner.check_weights(model)
        self._drop_cache(None, keep_files=False)
        self.runner.replace_weights(model)
        if self.config.disk_cache_dir is not None:
            self.memory.reset(self._open_disk(), keep_files=True)
            self._renew()

    def _drop_cache(self, disk: DiskTier | None, keep_files: bool) -> None:
        while self.scheduler.running:
            self.scheduler.restart(self.scheduler.running[0])
        self.memory.reset(disk, keep_files)
        self._renew()

    def _renew(self) -> None:
        self.scheduler.renew([s for request in self._requests.values() for s in request.live])

    def close(self) -> None:
        """Writes what is cached to the disk tier, if there is one, for a later process.

        The engine ends here: what runs or waits is aborted, and it can't be used any more.
        """
        self._check_between_steps("close")
        for request_id in list(self._requests):
            self.abort(request_id)
        if not self._closed and self.memory.disk is not None:
            self._finish_writes()
            for _ in self.memory.tiers.save_all():
                self._finish_writes()
            self.memory.disk.close()
        self._closed = True

    def _finish_writes(self) -> None:
        """Does the page work that is owed, and waits until what goes to disk is there."""
        self.runner.move_pages(self.memory.take_ops())
        self.memory.tiers.finish_writes()

    def _check_open(self) -> None:
        if self._closed:
            raise SpecaxError("the engine was closed: make a new one")

    def _check_between_steps(self, name: str) -> None:
        if self._stepping:
            raise SpecaxError(f"Engine.{name} was called inside a step")
        if name != "close":
            self._check_open()

    # --- the end of a step

    def _commit(self, plan: Plan, rounds: list[Round], beams: BeamRows) -> list[RequestOutput]:
        """Books what was computed and sampled, finishes what is done, and reports the news."""
        now = time.monotonic()
        self.scheduler.advance(plan)
        for work in plan.prefills:
            work.sequence.request.metrics.computed_tokens += work.stop - work.start
        for work in plan.decodes:
            work.sequence.request.metrics.computed_tokens += 1
        news: dict[Request, list[CompletionOutput]] = {}
        for sample, token, logprobs in itertools.chain.from_iterable(rounds):
            request = sample.request
            if request.metrics.first_token is None:
                request.metrics.first_token = now
            if token == NO_TOKEN:
                why = beam_search.NOTHING_LEFT
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
        for beam, candidates in beams:
            if beam.request.metrics.first_token is None:
                beam.request.metrics.first_token = now
            if ended := self._beams.advance(beam, candidates):
                news[beam.request] = ended
        outputs = [report(request, samples) for request, samples in news.items()]
        self._stats.generated_tokens += sum(len(o.token_ids) for out in outputs for o in out.outputs)
        for out in outputs:
            if out.finished:
                self._forget(self._requests[out.request_id])
        return outputs

    def _advance(self, sample: Sample, token: int) -> str:
        """Text and end of a sequence after a new token; returns the newly final text.

        A failure here (a tokenizer's, say) ends this request alone.
        """
        try:
            text, reason, detail = push_token(sample.text, token, sample.output_len, sample.request, self.limits.eos)
        except Exception as error:
            self._finish(sample, "error", f"{type(error).__name__}: {error}")
            return ""
        if reason is not None:
            self._finish(sample, reason, detail)
        return text

    def _abandon(self, error: BaseException) -> None:
        """After a step that broke off: what was running ends with an error, as its cache may be gone.

        The queue stays, and the next `step` reports what ended here.
        """
        why = f"{type(error).__name__}: {error}"
        self.swap_cost.interrupted()
        self.runner.recover()
        self.memory.reset(self.memory.disk, keep_files=True)  # what it held may be gone, or half booked
        self._renew()
        ended: dict[Request, list[CompletionOutput]] = {r: [] for r in self._requests.values() if r.finished}
        for request in {s.request for s in self.scheduler.running}:
            if request.beams is not None:
                ended[request] = self._beams.end(request, request.beams.nothing("error", why))
        for sample in [s for leader in self.scheduler.running for s in (leader, *forking(leader))]:
            self._finish(sample, "error", why)
            ended.setdefault(sample.request, []).append(CompletionOutput(sample.index, [], "", "error", why))
        for request, samples in ended.items():
            self._outbox.append(report(request, samples))
            if request.finished:
                self._forget(request)

    def _finish(self, sample: Sample, reason: str, detail: str | int | None = None) -> None:
        sample.finish_reason, sample.stop_reason = reason, detail
        self.scheduler.finish(sample, reason)

    def _forget(self, request: Request) -> None:
        request.metrics.finish = time.monotonic()
        self._stats.requests_finished += 1
        del self._requests[request.id]
