"""What an iteration costs the host, against what it should not depend on: the queue and the size of the cache.

A steady state is set up (rows that decode, nobody comes or ends) with real scheduler, policy and memory, and
`schedule` and the loop's commit are timed. An iteration's cost must grow with its rows only; where the pool is full,
each page that a row grows by adds an eviction.
"""

import dataclasses
import gc
from collections.abc import Callable

import numpy as np

from specax.decoding.simulate.cost_model import CostModel
from specax.decoding.simulate.loop import Simulation, SimulationConfig
from specax.decoding.simulate.trace import BLOCK, TraceRequest

FREE = CostModel(1, 1, 1, 0, 1e30, 1e30, 1e30)  # time stands still
PAGE = 16
WARMUP = 20  # iterations


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Host microseconds of an iteration, per running row."""

    policy: str
    rows: int
    waiting: int
    nodes: int  # of the prefix cache, a page each, running sequences aside
    full: bool  # no page is free: all that rows grow by is taken from these nodes
    median: float
    mean: float
    p99: float


def curve(
    policy: str, rows: int, sizes: list[int], iterations: int = 200, progress: Callable[[int, int], None] | None = None
) -> list[Point]:
    """Points for smaller numbers of rows, then for queues and caches of the given sizes at all rows.

    Caches also with a full pool, if they have enough nodes to evict.
    """
    cases = [(r, 0, 0, False) for r in (rows // 16, rows // 4, rows) if r]
    cases += [(rows, n, 0, False) for n in sizes] + [(rows, 0, n, False) for n in sizes]
    cases += [(rows, 0, n, True) for n in sizes if n >= _pages(rows, iterations)]
    points = []
    for done, (r, waiting, nodes, full) in enumerate(cases):
        if progress is not None:
            progress(done, len(cases))
        points.append(measure(policy, r, waiting, nodes, full, iterations))
    return points


def _pages(rows: int, iterations: int) -> int:
    """What rows need, with some to spare."""
    return rows * (3 + (WARMUP + iterations) // PAGE)


def measure(policy: str, rows: int, waiting: int, nodes: int, full: bool = False, iterations: int = 200) -> Point:
    """One point. A full pool needs enough nodes for all pages that the rows use."""
    pages = _pages(rows, iterations)
    assert nodes >= pages or not full
    config = SimulationConfig(
        cache_tokens=PAGE * (nodes if full else nodes + pages), max_rows=rows, max_batched_tokens=max(8192, rows),
        prefill_rows=rows, page_size=PAGE, tenant_cache_share=1.0,
    )  # fmt: skip
    output_len = WARMUP + iterations + PAGE  # nobody ends
    trace = [TraceRequest(0.0, 1 + number % PAGE, output_len, (number,)) for number in range(rows + waiting)]
    simulation = Simulation(trace[:rows], policy, FREE, config)
    _fill(simulation, nodes, rows + waiting)
    simulation.step()
    assert len(simulation.scheduler.running) == rows
    for item in trace[rows:]:
        simulation.submit(item)
    gc.collect()  # what setting up left behind is no part of it
    for _ in range(WARMUP + iterations):
        simulation.step()
    host = simulation.host
    seconds = np.asarray(host.schedule) + np.asarray(host.commit)
    per_row = 1e6 * seconds[-iterations:] / rows
    median, p99 = np.percentile(per_row, [50, 99]).tolist()
    return Point(policy, rows, waiting, nodes, full, median, float(per_row.mean()), p99)


def _fill(simulation: Simulation, nodes: int, first_block: int) -> None:
    """Puts prompts of a page each into the prefix cache."""
    memory = simulation.memory
    size = memory.page_size
    for number in range(nodes):
        table = memory.new_table()
        assert memory.reserve(table, 0, size)
        tokens = np.arange(size, dtype=np.int32) + (first_block + number) * BLOCK
        memory.store(table, tokens, (), None, running=False)
        table.release()
