"""The simulator: its arithmetic against hand-made examples and brute force, and what it leaves behind."""

import dataclasses
import gzip
import json
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies import POLICIES
from specax.decoding.scheduler import Plan, Work
from specax.decoding.simulate.cost_model import COST_MODELS, CostModel
from specax.decoding.simulate.curve import curve, measure
from specax.decoding.simulate.loop import Result, Simulation, SimulationConfig
from specax.decoding.simulate.plots import load_pyplot, plot_curve, plot_results
from specax.decoding.simulate.report import NOBODY, Goals, jain_index, make_report, max_min_shares
from specax.decoding.simulate.trace import (
    BLOCK,
    TraceRequest,
    assign_tenants,
    read_trace,
    speed_up,
    synthetic_trace,
)
from specax.model.errors import SpecaxError
from specax.paged.host_tier import HostPage, PageSave
from specax.paged.page_table import PageCopy
from tests.decoding.test_programs import program

SECOND = CostModel(0, 0, 0, 0, 1, 1, 1, overhead=1.0)  # every step takes one
H200 = COST_MODELS["h200-8b"]


def simulate(trace: list[TraceRequest], policy: str = "fcfs", cost: CostModel = SECOND, **config: Any) -> Result:
    return Simulation(trace, policy, cost, SimulationConfig(**config)).run()


def request(arrival: float, prompt_len: int, output_len: int, first_block: int) -> TraceRequest:
    count = -(-prompt_len // BLOCK)
    return TraceRequest(arrival, prompt_len, output_len, tuple(range(first_block, first_block + count)))


# --- the loop


def test_times_by_hand() -> None:
    """
    step ends at   1          2             3           11         12         13
                   A prefill  A + B prefill A           C chunk 1  C chunk 2  C
    """
    trace = [request(0.0, 4, 3, 0), request(0.5, 4, 1, 1), request(10.0, 12, 2, 2)]
    result = simulate(trace, max_rows=4, max_batched_tokens=8, page_size=4, cache_tokens=64)
    b, a, c = result.records  # in the order in which they end
    assert (a.arrival, a.first_token, a.finish, a.ttft, a.tpot) == (0.0, 1.0, 3.0, 1.0, 1.0)
    assert (b.arrival, b.first_token, b.finish, b.ttft, b.tpot) == (0.5, 2.0, 2.0, 1.5, None)
    assert (c.arrival, c.first_token, c.finish, c.ttft, c.tpot) == (10.0, 12.0, 13.0, 2.0, 1.0)
    assert result.iterations == 6 and result.seconds == 13.0 and result.max_waiting == 1

    report = make_report(result, Goals(ttft=1.5, tpot=1.0))
    assert report.goodput == pytest.approx(2 / 13) and report.requests_per_second == pytest.approx(3 / 13)
    assert make_report(result, Goals(ttft=9.0, tpot=0.9)).goodput == pytest.approx(1 / 13)  # B has no TPOT
    assert report.tokens_per_second == pytest.approx(6 / 13)
    assert report.ttft.mean == pytest.approx(1.5) and report.ttft.p50 == 1.5
    assert report.tpot is not None and report.tpot.mean == 1.0
    # Pages of 4: A has 1 in the first step; A 2 and B 1; A 2; none for 7 s; C 2, 3, then 4, over 13 s.
    assert report.pages_mean == pytest.approx((1 + 3 + 2 + 0 * 7 + 2 + 3 + 4) / 13 / 16)
    assert report.pages_peak == pytest.approx(4 / 16)
    # Empty slots: 0 of 4; 3 of 12; 2 of 8; 0 of 8; 0 of 12; 3 of 16. Mean over the time in which something ran.
    assert report.kv_waste == pytest.approx((0 + 3 / 12 + 2 / 8 + 0 + 0 + 3 / 16) / 6)


def test_the_clock_follows_the_cost_model() -> None:
    result = simulate([request(0.0, 1000, 3, 0)], cost=H200)
    (record,) = result.records
    assert record.ttft == pytest.approx(H200.seconds(1000, 1000, 1000 * 1001 // 2))
    assert record.finish - record.first_token == pytest.approx(
        H200.seconds(1, 1001, 1001) + H200.seconds(1, 1002, 1002)
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_tokens", [0, 4000])
def test_all_finish_and_give_everything_back(policy: str, host_tokens: int) -> None:
    trace = synthetic_trace(60, rate=50, tenants=3, shared=0.4, seed=1)
    trace = [dataclasses.replace(r, prompt_len=len(r.blocks) * 16, output_len=min(r.output_len, 99)) for r in trace]
    config = SimulationConfig(
        cache_tokens=704, host_tokens=host_tokens, page_size=8, max_rows=24, max_batched_tokens=128, age_bound=5.0
    )
    simulation = Simulation(trace, policy, COST_MODELS["cpu-135m"], config)
    result = simulation.run()
    assert result.rejected == 0 and result.preemptions > 0 and result.evicted_tokens > 0
    assert sorted(r.arrival for r in result.records) == [r.arrival for r in trace]
    assert sorted((r.prompt_len, r.output_len) for r in result.records) == sorted(
        (r.prompt_len, r.output_len) for r in trace
    )
    memory, scheduler = simulation.memory, simulation.scheduler
    assert not scheduler.running and not scheduler.num_waiting
    assert memory.pools[0].num_used == memory.tree.evictable[0]  # all that is left is cached, and nobody's
    assert (result.saved_tokens > 0) == (host_tokens > 0)
    memory.forget(())
    assert memory.pools[0].num_used == 0
    assert memory.host is None or memory.host.used_bytes == 0


def test_a_request_that_can_never_fit_is_counted_and_left_out() -> None:
    trace = [request(0.0, 30, 3, 0), request(0.0, 31, 3, 1), request(0.0, 8, 2, 2)]  # 32 and 33 tokens have KV
    result = simulate(trace, page_size=8, cache_tokens=32, max_batched_tokens=256)
    assert result.rejected == 1 and sorted(r.prompt_len for r in result.records) == [8, 30]
    with pytest.raises(InvalidRequestError, match="none of the 1 requests fits into KV memory"):
        make_report(simulate(trace[1:2], page_size=8, cache_tokens=32), Goals())


def test_hit_rate_is_what_brute_force_counts(rng: np.random.Generator) -> None:
    """Fcfs, memory for all, one after the other: hits are the longest prefix that an earlier prompt had."""
    trace: list[TraceRequest] = []
    for number in range(40):
        count = int(rng.integers(1, 5))
        blocks = [0 if rng.random() < 0.8 else 1000 + number]
        for depth in range(1, count):
            blocks.append(blocks[-1] * 3 + depth if rng.random() < 0.7 else 2000 + 10 * number + depth)
        prompt_len = count * BLOCK - int(rng.integers(BLOCK))
        trace.append(TraceRequest(20.0 * number, prompt_len, 3, tuple(blocks)))
    hits = 0
    for at, item in enumerate(trace):
        prompt = item.prompt()
        best = 0
        for earlier in trace[:at]:
            other = earlier.prompt()
            n = min(len(prompt), len(other))
            differs = np.flatnonzero(prompt[:n] != other[:n])
            best = max(best, int(differs[0]) if len(differs) else n)
        hits += min(best, len(prompt) - 1)  # the last token is always computed
    assert hits > 0
    result = simulate(trace, cache_tokens=10**6)
    assert (result.hit_tokens, result.query_tokens) == (hits, sum(r.prompt_len for r in trace))
    assert sum(r.cached_tokens for r in result.records) == hits
    assert make_report(simulate(trace, prefix_cache=False), Goals()).hit_rate == 0


def test_same_arguments_same_report() -> None:
    def report() -> dict[str, Any]:
        trace = synthetic_trace(80, rate=40, tenants=3, shared=0.5, seed=3)
        result = simulate(trace, "fair", H200, cache_tokens=20_000)
        return {**dataclasses.asdict(make_report(result, Goals())), "host": None}

    assert report() == report()


def test_known_lengths_let_the_shortest_output_go_first() -> None:
    trace = [request(0.0, 16, 50, 0), request(0.1, 16, 40, 1), request(0.2, 16, 5, 2)]
    for known, order in ((False, [50, 40, 5]), (True, [50, 5, 40])):
        result = simulate(trace, "sjf", known_lengths=known, max_rows=1, max_batched_tokens=64, age_bound=1e9)
        assert [r.output_len for r in result.records] == order


def test_a_greedy_tenant_gains_less_under_fair() -> None:
    trace = assign_tenants(synthetic_trace(120, rate=200, tenants=1, shared=0.0), greedy=0.7, others=3)
    jain = {
        policy: make_report(simulate(trace, policy, H200, cache_tokens=50_000, age_bound=1e9), Goals())
        for policy in ("fcfs", "fair")
    }
    assert jain["fcfs"].fairness < jain["fair"].fairness <= 1
    others = [name for name in jain["fair"].tenants if name != "greedy"]
    assert len(others) == 3
    for name in others:
        assert jain["fair"].tenants[name].ttft < jain["fcfs"].tenants[name].ttft


# --- the cost model


def test_forward_cost_counts_every_pair() -> None:
    def work(start: int, stop: int) -> Work:
        return Work(types.SimpleNamespace(tokens=range(stop)), start, stop)  # type: ignore[arg-type]

    plan = Plan(decodes=[work(9, 10), work(3, 4)], prefills=[work(0, 5), work(16, 48)])
    pairs = sum(p + 1 for w in plan.work for p in range(w.start, w.stop))
    tokens, context = 2 + 5 + 32, 10 + 4 + 5 + 48
    compute = CostModel(0, 0, 7, 11, 1, 1, 1)
    assert compute.forward(plan) == 2 * 7 * tokens + 11 * pairs
    memory = CostModel(100, 3, 0, 0, 2, 1, 1, overhead=0.5)
    assert memory.forward(plan) == (100 + 3 * context) / 2 + 0.5
    plan.ops = [PageCopy(0, 1, 2), PageSave(0, 3, HostPage()), PageSave(0, 4, HostPage())]
    link = CostModel(0, 3, 0, 0, 6, 1, 2)
    assert link.step(plan, page_size=4) == 3 * context / 6 + 2 * 12 / 6 + 2 * 12 / 2


# --- the report


def test_jains_index() -> None:
    assert jain_index([3, 3, 3]) == 1 and jain_index([0, 0]) == 1
    assert jain_index([1, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain_index([1, 2]) == pytest.approx(9 / 10)


def test_max_min_shares(rng: np.random.Generator) -> None:
    assert max_min_shares({"a": 10, "b": 1, "c": 2}, 9) == {"a": 6, "b": 1, "c": 2}
    for _ in range(50):
        demand = dict(enumerate(rng.uniform(0, 10, rng.integers(1, 8)).tolist()))
        capacity = float(rng.uniform(0, 60))
        shares = max_min_shares(demand, capacity)
        assert sum(shares.values()) == pytest.approx(min(capacity, sum(demand.values())))
        most = max(shares.values())
        for name, share in shares.items():  # who wants more has as much as any other
            assert share == pytest.approx(demand[name]) or share == pytest.approx(most)


def test_service_is_counted_until_the_last_arrival() -> None:
    """At 2.5 the last one comes; A has 3 of its 10 tokens at the end of that step, and B all."""
    trace = [
        dataclasses.replace(request(0.0, 4, 10, 0), tenant="a"), dataclasses.replace(request(0.0, 8, 2, 1), tenant="b"),
        request(2.5, 4, 1, 2),
    ]  # fmt: skip
    result = simulate(trace)
    assert result.service == {"a": 4 + 4 * 3, "b": 8 + 4 * 2, None: 0}
    assert result.demand == {"a": 4 + 4 * 10, "b": 8 + 4 * 2, None: 4 + 4 * 1}
    report = make_report(result, Goals())
    assert {name: t.fair_share for name, t in report.tenants.items()} == {"a": 12, "b": 12, NOBODY: 8}
    assert report.fairness == pytest.approx((16 / 12 + 16 / 12) ** 2 / (3 * 2 * (16 / 12) ** 2))


# --- traces


def line(**changes: Any) -> str:
    return json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [3, 9], **changes})


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_read_trace(tmp_path: pathlib.Path, name: str) -> None:
    text = "\n".join([line(), "", line(timestamp=500, tenant="x", priority=2), line()])
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    first, second, _ = read_trace(str(tmp_path / name))
    assert first == TraceRequest(0.5, 600, 7, (3, 9), "x", 2)
    assert second == TraceRequest(1.5, 600, 7, (3, 9))
    prompt = first.prompt()
    assert prompt.dtype == np.int32 and len(prompt) == 600
    assert prompt.tolist() == [*range(3 * 512, 4 * 512), *range(9 * 512, 9 * 512 + 88)]
    assert len(read_trace(str(tmp_path / name), limit=2)) == 2
    assert [r.arrival for r in speed_up([first, second], 4.0)] == [0.0, 0.25]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{nonsense", "line 2: Expecting property name"),
        ("[1, 2]", r"line 2: must be an object, got \[1, 2\]"),
        ('{"timestamp": 1}', "line 2: 'input_length' is missing"),
        (line(timestamp=-3), "line 2: timestamp must be milliseconds ≥ 0, got -3"),
        (line(output_length=0), "line 2: output_length must be an integer ≥ 1, got 0"),
        (line(input_length=513, hash_ids=[1]), "line 2: input_length 513 needs 2 hash_ids, one per 512 tokens, got 1"),
        (line(hash_ids=[1, 2**22]), "line 2: hash_ids must be a list of integers in 0…4194303"),
        (line(tenant=5), "line 2: tenant must be a string, got 5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: pathlib.Path, bad: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line() + "\n" + bad + "\n")
    with pytest.raises(InvalidRequestError, match=f"bad.jsonl, {message}"):
        read_trace(str(file))


def test_unreadable_traces(tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.gz").write_text("not gzipped")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (("absent", "No such"), ("plain.gz", "ot a gzipped"), ("empty.jsonl", "holds no request")):
        with pytest.raises(InvalidRequestError, match=message):
            read_trace(str(tmp_path / name))


def test_synthetic_traces() -> None:
    trace = synthetic_trace(400, rate=20, tenants=3, shared=0.5, seed=5)
    assert trace == synthetic_trace(400, rate=20, tenants=3, shared=0.5, seed=5)
    assert trace != synthetic_trace(400, rate=20, tenants=3, shared=0.5, seed=6)
    assert all(len(r.blocks) == -(-r.prompt_len // BLOCK) for r in trace)
    assert trace[-1].arrival == pytest.approx(400 / 20, rel=0.2)
    owners: dict[int, set[str | None]] = {}
    for r in trace:
        for block in r.blocks:
            owners.setdefault(block, set()).add(r.tenant)
    assert all(len(tenants) == 1 for tenants in owners.values()), "tenants share nothing with each other"
    for r in trace:
        same = sum(block < 3 * 256 for block in r.blocks)
        assert same == round(0.5 * len(r.blocks))
    named = assign_tenants(trace, greedy=0.25, others=4)
    assert {r.tenant for r in named} == {"greedy", *(f"tenant-{i}" for i in range(4))}
    assert sum(r.tenant == "greedy" for r in named) / 400 == pytest.approx(0.25, abs=0.07)


# --- host cost, figures, the program


def test_measure_sets_up_a_steady_state() -> None:
    point = measure("lpm", rows=8, waiting=20, nodes=50, iterations=5)
    assert (point.rows, point.waiting, point.nodes) == (8, 20, 50)
    assert 0 < point.median <= point.p99
    assert [(p.rows, p.waiting, p.nodes, p.full) for p in curve("fcfs", 16, [5, 100], iterations=3)] == [
        (1, 0, 0, False), (4, 0, 0, False), (16, 0, 0, False), (16, 5, 0, False), (16, 100, 0, False),
        (16, 0, 5, False), (16, 0, 100, False), (16, 0, 100, True),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_an_iteration_costs_what_its_rows_cost(policy: str) -> None:
    """Ten thousand waiting requests, or cached nodes, against none. (Wide: other programs run.)"""
    bare = measure(policy, 256, 0, 0).median
    assert measure(policy, 256, 10_000, 0).median < 3 * bare
    assert measure(policy, 256, 0, 10_000).median < 2 * bare
    assert measure(policy, 256, 0, 10_000, full=True).median < 6 * bare  # every page is taken from a node


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SpecaxError, match=r"needs matplotlib: pip install 'specax\[plot\]'"):
        load_pyplot()


def test_plots(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    plot_results([simulate([request(0.0, 20, 3, 0), request(1.0, 20, 3, 0)])], str(tmp_path / "runs.png"))
    plot_curve([measure("fcfs", 4, n, 0, iterations=3) for n in (0, 10)], str(tmp_path / "curve.png"))
    for name in ("runs.png", "curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_program(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(line(timestamp=100 * i) + "\n" for i in range(8)))
    args = (f"--trace={file}", "--policy=fcfs,fair", "--greedy_tenant=0.5", "--goodput=ttft:200", "--json")
    done = program("simulate.program", *args)
    assert done.returncode == 0, done.stderr
    fcfs, fair = [json.loads(text) for text in done.stdout.splitlines()]
    assert (fcfs["policy"], fair["policy"]) == ("fcfs", "fair")
    assert fcfs["requests"] == 8 and fcfs["hit_rate"] == pytest.approx(7 * 599 / (8 * 600))
    assert fcfs["goodput"] == pytest.approx(fcfs["requests_per_second"])
    assert "greedy" in fcfs["tenants"]


def test_program_errors() -> None:
    done = program("simulate.program", "--policy=fcsf")
    assert done.returncode == 2
    assert "'fcsf' is none; there are fcfs, priority" in " ".join(done.stderr.split())
