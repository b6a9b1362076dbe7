"""Figures of simulations. Needs matplotlib, which is an optional dependency."""

import importlib
from typing import Any

import numpy as np

from specax.decoding.simulate.curve import Point
from specax.decoding.simulate.loop import Result
from specax.model.errors import SpecaxError


def load_pyplot() -> Any:
    """matplotlib.pyplot, drawing to files; SpecaxError if it is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise SpecaxError("--plot needs matplotlib: pip install 'specax[plot]'") from error


def plot_results(results: list[Result], path: str) -> None:
    """Distribution of TTFT; queue and pages in use over time."""
    figure, (left, middle, right) = load_pyplot().subplots(1, 3, figsize=(15, 4), layout="constrained")
    for result in results:
        ttfts = np.sort([r.ttft for r in result.records])
        left.plot(ttfts, np.arange(1, len(ttfts) + 1) / len(ttfts), label=result.policy)
        times = [s.time for s in result.states]
        middle.plot(times, [s.waiting for s in result.states], label=result.policy)
        right.plot(times, [100 * s.pages_in_use / result.num_pages for s in result.states], label=result.policy)
    left.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", ylim=(0, 1))
    middle.set(xlabel="time, s", ylabel="waiting requests")
    right.set(xlabel="time, s", ylabel="pages in use, %", ylim=(0, 100))
    left.legend()
    figure.savefig(path)


def plot_curve(points: list[Point], path: str) -> None:
    """Host cost of an iteration per row, against rows, queue and cache."""
    figure, axes = load_pyplot().subplots(1, 3, figsize=(15, 4), layout="constrained", sharey=True)
    most = max(p.rows for p in points)
    for policy in dict.fromkeys(p.policy for p in points):
        mine = [p for p in points if p.policy == policy]
        bare = [p for p in mine if not p.waiting and not p.nodes]
        base = [p for p in bare if p.rows == most]
        for axis, name, style, label, shown in (
            (axes[0], "rows", "o-", policy, bare),
            (axes[1], "waiting", "o-", policy, [p for p in mine if p.waiting]),
            (axes[2], "nodes", "o-", policy, [p for p in mine if p.nodes and not p.full]),
            (axes[2], "nodes", "s--", f"{policy}, full pool", [p for p in mine if p.full]),
        ):
            line = [*base, *shown] if name != "rows" and not style.startswith("s") else shown
            axis.plot([max(1, getattr(p, name)) for p in line], [p.median for p in line], style, label=label)
    for axis, label in zip(axes, ("running rows", "waiting requests", "cached nodes")):
        axis.set(xscale="log", xlabel=label, ylim=(0, None))
    axes[0].set(ylabel="host µs per row and iteration (median)")
    axes[2].legend()
    figure.savefig(path)
