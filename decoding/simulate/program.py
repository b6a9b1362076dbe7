"""specax-simulate: scheduling policies and KV memory on a trace, without a device."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.policies import POLICIES
from specax.decoding.simulate.cost_model import COST_MODELS
from specax.decoding.simulate.curve import Point, curve
from specax.decoding.simulate.loop import Simulation, SimulationConfig
from specax.decoding.simulate.plots import load_pyplot, plot_curve, plot_results
from specax.decoding.simulate.report import Goals, Report, make_report
from specax.decoding.simulate.trace import TraceRequest, assign_tenants, read_trace, speed_up, synthetic_trace

ABOUT = """specax-simulate: replays a trace through the engine's scheduler and KV memory; a cost model is the device.

  specax-simulate --policy=fcfs,lpm,fair
  specax-simulate --trace=trace.jsonl.gz --speed_up=2 --policy=fcfs,lpm --plot=fcfs-lpm.png
  specax-simulate --trace=trace.jsonl.gz --greedy_tenant=0.5 --policy=fcfs,fair --age_bound=inf
  specax-simulate --curve --policy=fcfs,lpm

Traces are in Mooncake's format: JSON lines with timestamp (ms), input_length, output_length and hash_ids."""

SYNTHETIC = "synthetic"
CURVE_SIZES = [1_000, 10_000, 100_000]
_DEFAULT = SimulationConfig()

TRACE = flags.DEFINE_string("trace", SYNTHETIC, 'JSON lines, perhaps gzipped; or "synthetic".')
LIMIT = flags.DEFINE_integer("limit", None, "Take only the first so many requests of a file.", lower_bound=1)
SPEED_UP = flags.DEFINE_float("speed_up", 1.0, "Requests arrive so many times as fast.")
REQUESTS = flags.DEFINE_integer("requests", 1000, "Requests of a synthetic trace.", lower_bound=1)
RATE = flags.DEFINE_float("rate", 10.0, "Its requests per second, on average.")
TENANTS = flags.DEFINE_integer("tenants", 4, "Its tenants, each with a prefix of its own.", 1, 10_000)
SHARED = flags.DEFINE_float("shared", 0.5, "Its share of prompts that is the tenant's prefix.", 0.0, 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the synthetic trace, and of who is who's tenant.", lower_bound=0)
GREEDY = flags.DEFINE_float("greedy_tenant", None, "Give this share of the requests to one tenant.", 0.0, 1.0)
OTHERS = flags.DEFINE_integer("other_tenants", 9, "Spread the rest over so many others.", lower_bound=1)

POLICY = flags.DEFINE_list("policy", ["fcfs"], f"Which to compare: {', '.join(POLICIES)}; or all.")
COST_MODEL = flags.DEFINE_enum("cost_model", "h200-8b", list(COST_MODELS), "Model and machine.")
CACHE_TOKENS = flags.DEFINE_integer("cache_tokens", _DEFAULT.cache_tokens, "Tokens that KV memory holds.")
HOST_TOKENS = flags.DEFINE_integer("host_tokens", 0, "And so many in host memory.", lower_bound=0)
PAGE_SIZE = flags.DEFINE_integer("page_size", _DEFAULT.page_size, "Tokens per page.")
MAX_ROWS = flags.DEFINE_integer("max_rows", _DEFAULT.max_rows, "Sequences that run at the same time.")
MAX_BATCHED = flags.DEFINE_integer("max_batched_tokens", _DEFAULT.max_batched_tokens, "Tokens per step.")
PREFILL_ROWS = flags.DEFINE_integer("prefill_rows", _DEFAULT.prefill_rows, "Prefill chunks per step.")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", _DEFAULT.max_tokens, "Output limit they state, if no longer.")
KNOWN = flags.DEFINE_boolean("known_lengths", False, "They state the true length of their output instead.")
AGE_BOUND = flags.DEFINE_float("age_bound", _DEFAULT.age_bound, "Seconds after which a request goes first.")
PREFIX_CACHE = flags.DEFINE_boolean("prefix_cache", True, "Share the KV of common prefixes.")

GOODPUT = flags.DEFINE_list("goodput", ["ttft:5000", "tpot:100"], "Goals in ms that a good request meets.")
CURVE = flags.DEFINE_boolean("curve", False, "Measure an iteration's host cost against queue and cache instead.")
JSON = flags.DEFINE_boolean("json", False, "One JSON object per policy (or point of the curve) on standard output.")
PLOT = flags.DEFINE_string("plot", None, "Draw to this file (.png, .svg, .pdf); needs matplotlib.")

GROUPS: dict[str, Sequence[Any]] = {
    "Trace": (TRACE, LIMIT, SPEED_UP, REQUESTS, RATE, TENANTS, SHARED, SEED, GREEDY, OTHERS),
    "Engine": (
        POLICY, COST_MODEL, CACHE_TOKENS, HOST_TOKENS, PAGE_SIZE, MAX_ROWS, MAX_BATCHED, PREFILL_ROWS, MAX_TOKENS,
        KNOWN, AGE_BOUND, PREFIX_CACHE,
    ),
    "Output": (GOODPUT, CURVE, JSON, PLOT),
}  # fmt: skip


def main() -> None:
    policies = list(POLICIES) if POLICY.value == ["all"] else POLICY.value
    for name in policies:
        if name not in POLICIES:
            raise InvalidRequestError(f"--policy: {name!r} is none; there are {', '.join(POLICIES)}, or all")
    if not policies:
        raise InvalidRequestError(f"--policy names none; there are {', '.join(POLICIES)}, or all")
    if PLOT.value is not None:  # rather now than after an hour
        load_pyplot()
        if pathlib.Path(PLOT.value).suffix not in (".png", ".svg", ".pdf"):
            raise InvalidRequestError(f"--plot draws .png, .svg or .pdf, got {PLOT.value!r}")
        if not pathlib.Path(PLOT.value).absolute().parent.is_dir():
            raise InvalidRequestError(f"--plot: the folder of {PLOT.value} is not there")
    if CURVE.value:
        show_curve(policies)
        return
    goals, trace, config = read_goals(GOODPUT.value), make_trace(), make_config()
    results, reports = [], []
    for name in policies:
        began = time.monotonic()
        with cli.progress_bar(name) as progress:
            result = Simulation(trace, name, COST_MODELS[COST_MODEL.value], config).run(progress)
        report = make_report(result, goals)
        cli.stderr.print(f"{name}: {report.seconds:.0f} s of {len(trace)} requests in {time.monotonic() - began:.0f} s")
        if JSON.value:
            print(json.dumps(dataclasses.asdict(report)), flush=True)
        results.append(result)
        reports.append(report)
    if not JSON.value:
        console = rich.console.Console()
        console.print(report_table(reports))
        if len(reports[0].tenants) > 1:
            console.print(tenant_table(reports))
    if PLOT.value is not None:
        plot_results(results, PLOT.value)


def make_trace() -> list[TraceRequest]:
    for flag in (SPEED_UP, RATE):
        if not 0 < flag.value < float("inf"):
            raise InvalidRequestError(f"--{flag.name} must be positive and finite, got {flag.value}")
    if TRACE.value == SYNTHETIC:
        trace = synthetic_trace(REQUESTS.value, RATE.value, TENANTS.value, SHARED.value, SEED.value)
    else:
        trace = read_trace(TRACE.value, LIMIT.value)
    if GREEDY.value is not None:
        trace = assign_tenants(trace, GREEDY.value, OTHERS.value, SEED.value)
    return speed_up(trace, SPEED_UP.value)


def make_config() -> SimulationConfig:
    return SimulationConfig(
        cache_tokens=CACHE_TOKENS.value, host_tokens=HOST_TOKENS.value, page_size=PAGE_SIZE.value,
        max_rows=MAX_ROWS.value, max_batched_tokens=MAX_BATCHED.value, prefill_rows=PREFILL_ROWS.value,
        max_tokens=MAX_TOKENS.value, known_lengths=KNOWN.value, age_bound=AGE_BOUND.value,
        prefix_cache=PREFIX_CACHE.value,
    )  # fmt: skip


def read_goals(items: list[str]) -> Goals:
    """From "ttft:5000" and "tpot:100", milliseconds; one that is left out is no goal.

    Raises:
      InvalidRequestError: an item of another form.
    """
    goals = Goals(float("inf"), float("inf"))
    for item in items:
        name, _, text = item.partition(":")
        try:
            value = float(text) / 1e3
        except ValueError:
            value = -1.0
        if name not in ("ttft", "tpot") or not value > 0:
            raise InvalidRequestError(f"--goodput takes ttft:MS and tpot:MS, as in ttft:5000,tpot:100, not {item!r}")
        goals = dataclasses.replace(goals, **{name: value})
    return goals


def _tpot(name: str) -> Callable[[Report], str]:
    return lambda r: "–" if r.tpot is None else f"{1e3 * getattr(r.tpot, name):.1f}"


ROWS: list[tuple[str, Callable[[Report], str]]] = [
    ("hit rate of the prefix cache", lambda r: f"{r.hit_rate:.1%}"),
    ("TTFT, s, mean", lambda r: f"{r.ttft.mean:.2f}"),
    ("    p50", lambda r: f"{r.ttft.p50:.2f}"),
    ("    p95", lambda r: f"{r.ttft.p95:.2f}"),
    ("    p99", lambda r: f"{r.ttft.p99:.2f}"),
    ("TPOT, ms, mean", _tpot("mean")),
    ("    p50", _tpot("p50")),
    ("    p95", _tpot("p95")),
    ("    p99", _tpot("p99")),
    ("goodput, requests/s", lambda r: f"{r.goodput:.3f}"),
    ("requests/s", lambda r: f"{r.requests_per_second:.3f}"),
    ("output tokens/s", lambda r: f"{r.tokens_per_second:.0f}"),
    ("waiting, at most", lambda r: f"{r.max_waiting}"),
    ("preemptions", lambda r: f"{r.preemptions}"),
    ("pages in use, mean", lambda r: f"{r.pages_mean:.1%}"),
    ("    peak", lambda r: f"{r.pages_peak:.1%}"),
    ("KV waste", lambda r: f"{r.kv_waste:.2%}"),
    ("evicted, million tokens", lambda r: f"{r.evicted_tokens / 1e6:.2f}"),
    ("    saved", lambda r: f"{r.saved_tokens / 1e6:.2f}"),
    ("    loaded", lambda r: f"{r.loaded_tokens / 1e6:.2f}"),
    ("fairness (Jain's index)", lambda r: f"{r.fairness:.4f}" if len(r.tenants) > 1 else "–"),
    ("iterations", lambda r: f"{r.iterations}"),
    ("host µs per row, steady, mean", lambda r: f"{r.host.per_row:.2f}"),
    ("    p50", lambda r: f"{r.host.per_row_p50:.2f}"),
    ("    p99", lambda r: f"{r.host.per_row_p99:.2f}"),
    ("host µs per request: submit", lambda r: f"{r.host.submit:.0f}"),
    ("    prefill", lambda r: f"{r.host.prefill:.0f}"),
    ("    finish", lambda r: f"{r.host.finish:.0f}"),
]


def report_table(reports: list[Report]) -> rich.table.Table:
    first = reports[0]
    title = f"{first.requests} requests ({first.rejected} rejected)"
    table = rich.table.Table("", title=title)
    for report in reports:
        table.add_column(report.policy, justify="right")
    for name, text in ROWS:
        table.add_row(name, *map(text, reports))
    return table


def tenant_table(reports: list[Report]) -> rich.table.Table:
    """Service over fair share, 1 being fair, until the last arrival; mean TTFT."""
    table = rich.table.Table("", *[r.policy for r in reports], title="service / fair share, mean TTFT in s")
    for tenant in reports[0].tenants:
        cells = []
        for report in reports:
            t = report.tenants[tenant]
            cells.append(f"{t.service / t.fair_share if t.fair_share else 1:.3f}, {t.ttft:.2f}")
        table.add_row(tenant, *cells)
    return table


def show_curve(policies: list[str]) -> None:
    points: list[Point] = []
    for name in policies:
        with cli.progress_bar(name) as progress:
            points += curve(name, MAX_ROWS.value, CURVE_SIZES, progress=progress)
    if JSON.value:
        for point in points:
            print(json.dumps(dataclasses.asdict(point)))
    else:
        columns = ("policy", "rows", "waiting", "cached nodes", "pool", "median", "mean", "p99")
        table = rich.table.Table(*columns, title="host µs per row and iteration")
        for p in points:
            numbers = [f"{v:.2f}" for v in (p.median, p.mean, p.p99)]
            table.add_row(p.policy, str(p.rows), str(p.waiting), str(p.nodes), "full" if p.full else "", *numbers)
        rich.console.Console().print(table)
    if PLOT.value is not None:
        plot_curve(points, PLOT.value)


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
