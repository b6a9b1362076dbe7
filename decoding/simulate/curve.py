"""What an iteration costs the host, against what it should not depend on: the queue and the size of the cache.

A steady state is set up (rows that decode, nobody comes or ends) with real scheduler, policy and memory, and
`schedule` and the loop's commit are timed. An iteration's cost must grow with its rows only.
"""

import dataclasses
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
    """Host microseconds of an iteration, over `iterations` of them, per running row."""

    policy: str
    rows: int
    waiting: int
    nodes: int  # of the prefix cache, running sequences aside
    median: float
    mean: float
    p99: float


def curve(
    policy: str, rows: int, sizes: list[int], iterations: int = 200, progress: Callable[[int, int], None] | None = None
) -> list[Point]:
    """Points for smaller numbers of rows, then for queues and caches of the given sizes at all rows."""
    cases = [(r, 0, 0) for r in (rows // 16, rows // 4, rows) if r]
    cases += [(rows, n, 0) for n in sizes] + [(rows, 0, n) for n in sizes]
    points = []
    for done, (r, waiting, nodes) in enumerate(cases):
        if progress is not None:
            progress(done, len(cases))
        points.append(measure(policy, r, waiting, nodes, iterations))
    return points


def measure(policy: str, rows: int, waiting: int, nodes: int, iterations: int = 200) -> Point:
    """One point. With cached nodes the pool is full, so that every page a row grows by is taken from a node."""
    pages = rows * (3 + (WARMUP + iterations) // PAGE)  # what the rows need
    config = SimulationConfig(
        cache_tokens=PAGE * max(pages, nodes), max_rows=rows,
        max_batched_tokens=max(8192, rows), prefill_rows=rows, page_size=PAGE, tenant_cache_share=1.0,
    )  # fmt: skip
    output_len = WARMUP + iterations + PAGE  # nobody ends
    trace = [TraceRequest(0.0, 1 + number % PAGE, output_len, (number,)) for number in range(rows + waiting)]
    simulation = Simulation(trace[:rows], policy, FREE, config)
    _fill(simulation, nodes, rows + waiting)
    simulation.step()
    assert len(simulation.scheduler.running) == rows
    for item in trace[rows:]:
        simulation.submit(item)
    for _ in range(WARMUP + iterations):
        simulation.step()
    host = simulation.host
    seconds = np.asarray(host.schedule) + np.asarray(host.commit)
    per_row = 1e6 * seconds[-iterations:] / rows
    median, p99 = np.percentile(per_row, [50, 99]).tolist()
    return Point(policy, rows, waiting, nodes, median, float(per_row.mean()), p99)


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
