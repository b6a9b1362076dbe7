"""The loop: real scheduler, policy and KV memory; the clock is moved by a cost model, not by a device."""

import dataclasses
import math
import time
from array import array
from collections.abc import Callable
from typing import Any

from specax.decoding.errors import InvalidRequestError
from specax.decoding.outputs import RequestMetrics
from specax.decoding.policies import Policy, PolicyContext, make_policy
from specax.decoding.policies.base import DECODE_COST, PREFILL_COST
from specax.decoding.request import Request, Sequence
from specax.decoding.sampling_params import SamplingParams
from specax.decoding.scheduler import Plan, Scheduler
from specax.decoding.simulate.cost_model import CostModel
from specax.decoding.simulate.trace import TraceRequest
from specax.model.errors import SpecaxError
from specax.paged import KVMemory
from specax.paged.host_tier import HostTier

PARAMS = SamplingParams(max_tokens=None, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class SimulationConfig:
    """Sizes of the simulated engine; those of `EngineConfig`, KV memory in tokens."""

    cache_tokens: int = 400_000  # on the device
    host_tokens: int = 0  # in host memory
    page_size: int = 16
    max_rows: int = 256
    max_batched_tokens: int = 8192
    prefill_rows: int = 64
    max_tokens: int = 2048  # that requests state as their limit; one with a longer output states that
    known_lengths: bool = False  # they state how long their output will be instead
    age_bound: float = 60.0  # seconds
    prefix_cache: bool = True
    tenant_cache_share: float = 0.5
    sample_every: float = 0.25  # seconds of virtual time between samples of the state

    def __post_init__(self) -> None:
        for name in ("page_size", "max_rows", "max_batched_tokens", "prefill_rows", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cache_tokens < self.page_size:
            raise InvalidRequestError(f"cache_tokens is {self.cache_tokens}: less than a page of {self.page_size}")
        if self.max_batched_tokens < self.max_rows:
            raise InvalidRequestError(
                f"max_batched_tokens ({self.max_batched_tokens}) is below max_rows ({self.max_rows}): "
                "a step could not hold one token per running sequence"
            )


@dataclasses.dataclass(eq=False)
class SimulatedRequest(Request):
    """A request whose output ends when prompt and output are `final_len` tokens."""

    final_len: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What became of a request; times in seconds of virtual time."""

    arrival: float
    first_token: float
    finish: float
    prompt_len: int
    output_len: int
    cached_tokens: int
    tenant: str | None

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there is no other."""
        return (self.finish - self.first_token) / (self.output_len - 1) if self.output_len > 1 else None


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The engine at one time. Pages are counted without the trash page."""

    time: float
    waiting: int
    running: int
    pages_in_use: int  # by running sequences
    pages_cached: int  # others
    table_slots: int  # token slots of the running sequences' pages
    table_tokens: int  # of these, slots that hold KV after the step


@dataclasses.dataclass
class HostCost:
    """Measured seconds of host work (all other times here are virtual); one entry per iteration.

    Wall time: where other programs have the cores too, medians say more than means. (CPU clocks cost a system call,
    on some machines as long as what is measured.)
    """

    rows: array = dataclasses.field(default_factory=lambda: array("i"))  # of the step
    schedule: array = dataclasses.field(default_factory=lambda: array("d"))
    commit: array = dataclasses.field(default_factory=lambda: array("d"))  # advance, append; finishing apart
    admitted: array = dataclasses.field(default_factory=lambda: array("i"))
    steady: array = dataclasses.field(default_factory=lambda: array("b"))  # decodes only, nobody ended
    submit: float = 0.0  # seconds in all, of all requests
    finish: float = 0.0


@dataclasses.dataclass
class Result:
    """All that a simulation saw."""

    policy: str
    records: list[Record]
    rejected: int  # requests that can't ever fit
    states: list[State]
    seconds: float  # virtual, from the first arrival to the last token
    iterations: int
    preemptions: int
    max_waiting: int
    num_pages: int
    peak_pages: int  # in use by running sequences
    query_tokens: int
    hit_tokens: int
    evicted_tokens: int
    saved_tokens: int
    loaded_tokens: int
    # Per tenant until the last arrival: cost of the tokens delivered, and of those asked for (`policies.base`).
    service: dict[str | None, int]
    demand: dict[str | None, int]
    host: HostCost


class Simulation:
    """Replays a trace under one policy. Everything but `HostCost` follows from the arguments."""

    def __init__(self, trace: list[TraceRequest], policy: str, cost: CostModel, config: SimulationConfig):
        self.trace, self.cost, self.config = trace, cost, config
        size = config.page_size
        num_pages = config.cache_tokens // size + 1
        page_bytes = int(size * cost.kv_bytes)
        host = HostTier(config.host_tokens // size * page_bytes, (page_bytes,)) if config.host_tokens else None
        self.memory = KVMemory(
            (num_pages,), size, (None,), config.max_batched_tokens, config.prefix_cache, config.tenant_cache_share, host
        )
        self._longest = (num_pages - 1) * size  # tokens that have KV at the same time

        def policy_of(scheduler: Scheduler) -> Policy:
            prefilling: Any = scheduler.prefilling if config.prefix_cache else tuple
            context = PolicyContext(lambda: self.now, config.age_bound, scheduler.cached_tokens, prefilling)
            return make_policy(policy, context)

        longest = max([r.prompt_len + r.output_len for r in trace], default=1)
        self.scheduler = Scheduler(
            self.memory, policy_of, config.max_rows, config.max_batched_tokens, config.prefill_rows,
            min(-(-longest // size), num_pages - 1), cost.worth_swapping,
        )  # fmt: skip
        self.now = 0.0
        self.arrived = 0  # requests of the trace that came
        self.records: list[Record] = []
        self.states: list[State] = []
        self.host = HostCost()
        self._policy_name = policy
        self._next_token = -1  # sampled tokens are −1, −2, …: no prompt holds them
        self._live: dict[str, SimulatedRequest] = {}
        self._service: dict[str | None, int] = {r.tenant: 0 for r in trace}
        self._rejected = self._max_waiting = self._iterations = self._peak_pages = 0

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Result:
        """To the end of the last request."""
        while self.step():
            if self._iterations % 256 == 0:
                progress(len(self.records) + self._rejected, len(self.trace))
        return self._result()

    def step(self) -> bool:
        """One iteration, or a jump to the next arrival; False when all is done.

        Raises:
          SpecaxError: requests are left, but nothing can run: an error in scheduler or policy.
        """
        while self.arrived < len(self.trace) and self.trace[self.arrived].arrival <= self.now:
            self.submit(self.trace[self.arrived])
        self._max_waiting = max(self._max_waiting, self.scheduler.num_waiting)
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter() - began
        if not plan.work and not plan.ops:
            if self.arrived < len(self.trace):
                self._pass_time(self.trace[self.arrived].arrival - self.now, plan)
                return True
            if self._live:
                raise SpecaxError(f"{len(self._live)} requests are left under {self._policy_name!r}, but none can run")
            return False
        self._pass_time(self.cost.step(plan, self.config.page_size), plan)
        began = time.perf_counter()
        ended = self._commit(plan)
        committed = time.perf_counter() - began
        for sequence in ended:
            self._finish(sequence)
        self._note_host(plan, scheduled, committed, bool(ended))
        self._iterations += 1
        return True

    def submit(self, item: TraceRequest) -> None:
        """Queues a request of the trace, or rejects one that KV memory can never hold."""
        self.arrived += 1
        final_len = item.prompt_len + item.output_len
        if final_len - 1 > self._longest:
            self._rejected += 1
        else:
            config = self.config
            began = time.perf_counter()
            prompt: Any = item.prompt()
            request = SimulatedRequest(
                str(self.arrived), prompt, PARAMS,
                item.output_len if config.known_lengths else max(config.max_tokens, item.output_len),
                frozenset(), (), (), self.arrived, item.priority, item.tenant,
                metrics=RequestMetrics(arrival=item.arrival), final_len=final_len,
            )  # fmt: skip
            request.sequences.append(Sequence(request, 0, self.memory.new_table(), seed=0))
            self.scheduler.add(request)
            self.host.submit += time.perf_counter() - began
            self._live[request.id] = request
        if self.arrived == len(self.trace):
            self._note_service()

    def _commit(self, plan: Plan) -> list[Sequence]:
        """What the engine does after a step: books it, appends the tokens; returns whose output is complete."""
        self.scheduler.advance(plan)
        token, now = self._next_token, self.now
        ended: list[Sequence] = []
        for work in plan.work:
            if not work.samples:
                continue
            sequence = work.sequence
            tokens, request = sequence.tokens, sequence.request
            tokens.append(token)
            token -= 1
            if request.metrics.first_token is None:
                request.metrics.first_token = now
            if len(tokens) == request.final_len:  # type: ignore[attr-defined]
                ended.append(sequence)
        self._next_token = token
        return ended

    def _finish(self, sequence: Sequence) -> None:
        began = time.perf_counter()
        self.scheduler.finish(sequence, "length")
        self.host.finish += time.perf_counter() - began
        request = self._live.pop(sequence.request.id)
        metrics, prompt_len = request.metrics, len(request.prompt)
        first = metrics.first_token
        assert first is not None
        self.records.append(
            Record(
                metrics.arrival, first, self.now, prompt_len, request.final_len - prompt_len, metrics.cached_tokens,
                request.tenant,
            )
        )  # fmt: skip
        if self.arrived < len(self.trace):
            self._serve(sequence)

    def _pass_time(self, seconds: float, plan: Plan) -> None:
        """Moves the clock over a step that is about to run, or over idle time; the state stays as it is."""
        running, pool = self.scheduler.running, self.memory.pools[0]
        cached = self.memory.tree.evictable[0]
        in_use = pool.num_used - cached
        self._peak_pages = max(self._peak_pages, in_use)
        every, end = self.config.sample_every, self.now + seconds
        first, last = math.ceil(self.now / every), math.ceil(end / every)
        self.now = end
        if first < last:
            slots = self.config.page_size * sum([len(s.table) for s in running])
            tokens = sum([s.computed for s in running]) + plan.num_tokens
            for at in range(first, last):
                waiting = self.scheduler.num_waiting
                self.states.append(State(at * every, waiting, len(running), in_use, cached, slots, tokens))

    def _note_host(self, plan: Plan, scheduled: float, committed: float, ended: bool) -> None:
        host = self.host
        host.rows.append(len(plan.decodes) + len(plan.prefills))
        host.schedule.append(scheduled)
        host.commit.append(committed)
        host.admitted.append(len(plan.admitted))
        host.steady.append(not (plan.prefills or plan.preempted or plan.admitted or ended))

    def _serve(self, sequence: Sequence) -> None:
        prompt = len(sequence.request.prompt)
        self._service[sequence.request.tenant] += PREFILL_COST * prompt + DECODE_COST * sequence.output_len

    def _note_service(self) -> None:
        """Once the last request came: what those that are not finished got until now."""
        for request in self._live.values():
            if request.metrics.first_token is not None:
                self._serve(request.sequences[0])

    def _result(self) -> Result:
        counters, size = self.memory.counters, self.config.page_size
        demand = dict.fromkeys(self._service, 0)
        for r in self.trace:
            demand[r.tenant] += PREFILL_COST * r.prompt_len + DECODE_COST * r.output_len
        return Result(
            policy=self._policy_name,
            records=self.records,
            rejected=self._rejected,
            states=self.states,
            seconds=self.now - (self.trace[0].arrival if self.trace else 0.0),
            iterations=self._iterations,
            preemptions=self.scheduler.preemptions,
            max_waiting=self._max_waiting,
            num_pages=self.memory.pools[0].num_pages - 1,
            peak_pages=self._peak_pages,
            query_tokens=counters.query_tokens,
            hit_tokens=counters.hit_tokens,
            evicted_tokens=self.memory.tree.evicted_tokens,
            saved_tokens=counters.saved_pages * size,
            loaded_tokens=counters.loaded_pages * size,
            service=self._service,
            demand=demand,
            host=self.host,
        )
