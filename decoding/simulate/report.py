"""What a simulation comes to: latencies, goodput, use of memory, fairness, and what the host's work cost."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from specax.decoding.errors import InvalidRequestError
from specax.decoding.simulate.loop import HostCost, Record, Result

NOBODY = "(none)"  # how requests without a tenant are shown


@dataclasses.dataclass(frozen=True)
class Goals:
    """What a request must meet to count as good, in seconds (Zhong et al., "DistServe", OSDI 2024)."""

    ttft: float = 5.0
    tpot: float = 0.1

    def met_by(self, record: Record) -> bool:
        tpot = record.tpot
        return record.ttft <= self.ttft and (tpot is None or tpot <= self.tpot)


@dataclasses.dataclass(frozen=True)
class Distribution:
    mean: float
    p50: float
    p95: float
    p99: float


@dataclasses.dataclass(frozen=True)
class TenantReport:
    """Service, demand and fair share: until the last arrival, in costs of `policies.base` (a prefill token is 1)."""

    requests: int
    ttft: float  # mean, seconds
    service: int
    demand: int
    fair_share: float


@dataclasses.dataclass(frozen=True)
class HostReport:
    """Microseconds, measured."""

    per_row: float  # a steady iteration's (decodes only, nobody ended), over its rows: mean, median, …
    per_row_p50: float
    per_row_p99: float
    steady_iterations: int
    prefill: float  # per request: what iterations with admissions, prefill or ends cost beyond steady ones
    submit: float  # per request: checking it in, the queue
    finish: float  # per request


@dataclasses.dataclass(frozen=True)
class Report:
    """Times in seconds of virtual time, the host's aside."""

    policy: str
    requests: int  # that finished
    rejected: int
    seconds: float
    iterations: int
    hit_rate: float  # prompt tokens that came from the cache, over all
    ttft: Distribution
    tpot: Distribution | None  # None: no output has a second token
    goodput: float  # requests per second that meet the goals
    requests_per_second: float
    tokens_per_second: float  # output
    max_waiting: int
    preemptions: int
    pages_mean: float  # share of the pages that running sequences use, over time
    pages_peak: float
    kv_waste: float  # share of the token slots of running sequences' pages that hold nothing, over time
    evicted_tokens: int
    saved_tokens: int
    loaded_tokens: int
    fairness: float  # Jain's index of service over fair share; near 1 wherever all that is asked for gets done
    tenants: dict[str, TenantReport]
    host: HostReport


def make_report(result: Result, goals: Goals) -> Report:
    """InvalidRequestError if no request could run."""
    records = result.records
    if not records:
        raise InvalidRequestError(f"none of the {result.rejected} requests fits into KV memory: raise cache_tokens")
    seconds = result.seconds
    tpots = [tpot for r in records if (tpot := r.tpot) is not None]
    used = np.asarray([s.pages_in_use for s in result.states]) / result.num_pages
    waste = [1 - s.table_tokens / s.table_slots for s in result.states if s.table_slots]
    tenants = _tenants(result)
    return Report(
        policy=result.policy,
        requests=len(records),
        rejected=result.rejected,
        seconds=seconds,
        iterations=result.iterations,
        hit_rate=result.hit_tokens / result.query_tokens,
        ttft=distribution([r.ttft for r in records]),
        tpot=distribution(tpots) if tpots else None,
        goodput=sum(map(goals.met_by, records)) / seconds,
        requests_per_second=len(records) / seconds,
        tokens_per_second=sum(r.output_len for r in records) / seconds,
        max_waiting=result.max_waiting,
        preemptions=result.preemptions,
        pages_mean=float(used.mean()),
        pages_peak=result.peak_pages / result.num_pages,
        kv_waste=float(np.mean(waste)),
        evicted_tokens=result.evicted_tokens,
        saved_tokens=result.saved_tokens,
        loaded_tokens=result.loaded_tokens,
        fairness=jain_index([t.service / t.fair_share for t in tenants.values() if t.fair_share > 0]),
        tenants=tenants,
        host=_host(result.host, len(records)),
    )


def distribution(values: Iterable[float]) -> Distribution:
    array = np.fromiter(values, float)
    return Distribution(float(array.mean()), *np.percentile(array, [50, 95, 99]).tolist())


def jain_index(values: Iterable[float]) -> float:
    """(Σx)² / (n·Σx²): 1 if all are equal, 1/n if one has everything. (Jain, Chiu and Hawe, DEC TR-301, 1984)

    As in the report, x is an allocation over the fair one, which is max-min fair (`max_min_shares`). 1 if all are 0.
    """
    x = np.fromiter(values, float)
    squares = float((x * x).sum())
    return float(x.sum()) ** 2 / (len(x) * squares) if squares else 1.0


def max_min_shares[T](demand: Mapping[T, float], capacity: float) -> dict[T, float]:
    """Max-min fair shares of a capacity: nobody gets more than demanded; who gets less gets as much as any other."""
    shares: dict[T, float] = {}
    for left, name in zip(range(len(demand), 0, -1), sorted(demand, key=demand.__getitem__)):
        shares[name] = min(demand[name], capacity / left)
        capacity -= shares[name]
    return shares


def _tenants(result: Result) -> dict[str, TenantReport]:
    ttfts: dict[str | None, list[float]] = {tenant: [] for tenant in result.demand}
    for record in result.records:
        ttfts[record.tenant].append(record.ttft)
    shares = max_min_shares(result.demand, sum(result.service.values()))
    return {
        NOBODY if tenant is None else tenant: TenantReport(
            len(values), float(np.mean(values)), result.service[tenant], result.demand[tenant], shares[tenant]
        )
        for tenant, values in sorted(ttfts.items(), key=lambda item: str(item[0]))
        if values
    }


def _host(host: HostCost, requests: int) -> HostReport:
    rows, steady = np.asarray(host.rows), np.asarray(host.steady, np.bool_)
    seconds = np.asarray(host.schedule) + np.asarray(host.commit)
    steady &= rows > 0
    per_row = p50 = p99 = 0.0
    if steady.any():
        per_row = float(seconds[steady].sum() / rows[steady].sum())
        p50, p99 = np.percentile(seconds[steady] / rows[steady], [50, 99]).tolist()
    beyond = float((seconds - per_row * rows)[~steady].sum())
    return HostReport(
        1e6 * per_row, 1e6 * p50, 1e6 * p99, int(steady.sum()),
        1e6 * max(0.0, beyond) / requests, 1e6 * host.submit / requests, 1e6 * host.finish / requests,
    )  # fmt: skip
