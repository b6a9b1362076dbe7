"""The search for the attention kernels' block sizes (`block_sizes.tuned`) on a device."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import rich.table

from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.device_kernels import relative_error
from specax.decoding.gpu.device_report import FAILURES, Deadline, check_alive, first_lines
from specax.decoding.gpu.device_timings import TimingSizes, Workload
from specax.decoding.gpu.variants import (
    Inputs,
    Rows,
    Variant,
    attend,
    random_inputs,
    random_key,
)
from specax.pallas_kernels.block_sizes import (
    SHARED_MEMORY,
    BlockSizes,
    Body,
    Shapes,
    key,
    make_plan,
    max_queries,
    shared_memory,
)
from specax.pallas_kernels.dispatch import device

KEYS, STAGES, PARTS = (64, 128), (2, 3, 4, 6), (1, 2, 4)
WORTH_IT = 0.98  # of the default's time: a gain below that is noise
HOPELESS = 1.2  # times the default's on the first workload: the others need not be tried
TOLERANCE = 1e-2  # between outputs; splits and blocks of another size round otherwise

type Timer = Callable[[Workload, Inputs, BlockSizes], float]  # seconds of one call


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What a table entry is for."""

    body: Body
    head_dim: int
    page_size: int
    page_dtype: str

    def workloads(self, sizes: TimingSizes) -> list[Workload]:
        """That the entry serves, the most important first: with the most queries it packs among them."""
        s = sizes
        base = Variant("decode", self.head_dim, self.page_size, self.page_dtype, s.kv_heads)
        many, one = Rows((s.context - 1,) * s.rows), Rows((s.long - 1,))
        few = max_queries(base.shapes(1, s.context)) // base.group  # tokens, as many as have keys as rows
        tree = dataclasses.replace(base, op="tree", query_len=s.tree if self.body == "queries" else few)
        trees = Workload("trees", tree, Rows((s.context - tree.query_len,) * s.rows))
        chunk = dataclasses.replace(base, op="prefill", query_len=s.prefill)
        prompt = Workload("prefill", chunk, Rows((0,), (s.prefill,)))
        large = dataclasses.replace(base, op="tree", query_len=2 * s.tree)
        one_tree = Workload("one tree", large, Rows((s.long - large.query_len,)))  # alone: the context is split
        out = [Workload("decode", base, many), Workload("one row", base, one), trees, prompt, one_tree]
        return [w for w in out if w.variant.body == self.body]

    def default(self, workload: Workload) -> BlockSizes:
        """The blocks that the workload has without a caller's."""
        return make_plan(_shapes(workload), *device()[1:]).blocks

    def candidates(self, workloads: Sequence[Workload]) -> Iterator[BlockSizes]:
        """All others that fit every workload; the number of splits is left to the plan."""
        default = self.default(workloads[0])
        warpgroups = (1, 2) if self.body == "queries" and not workloads[0].variant.quantized else (1,)
        for keys, stages, groups, parts in itertools.product(KEYS, STAGES, warpgroups, PARTS):
            blocks = BlockSizes(keys, stages, groups, parts)
            if blocks != default and all(_fits(blocks, _shapes(w)) for w in workloads):
                yield blocks


def _fits(blocks: BlockSizes, shapes: Shapes) -> bool:
    """Whether a plan takes them, and a thread block's shared memory has room."""
    try:
        plan = make_plan(shapes, "", None, blocks)
    except ValueError:
        return False
    return shared_memory(plan.body, plan.queries, shapes, plan.blocks) <= SHARED_MEMORY


def _shapes(workload: Workload) -> Shapes:
    variant, rows = workload.variant, workload.rows
    count, columns = rows.table(variant)
    tokens = sum(rows.lengths) if variant.op == "prefill" else None
    return variant.shapes(count, columns * variant.page_size, tokens)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What came of one geometry. Times are in microseconds, by workload."""

    key: str
    default: BlockSizes
    best: BlockSizes  # the default where nothing is better
    default_us: dict[str, float]
    best_us: dict[str, float]
    tried: int
    refused: dict[str, str]  # candidate → why it is out of the question

    @property
    def gain(self) -> float:
        """Of the best over the default: geometric mean over the workloads of how many times as fast it is."""
        return 1 / _ratio(self.best_us, self.default_us)


def _ratio(us: dict[str, float], default_us: dict[str, float]) -> float:
    return math.prod(us[name] / default_us[name] for name in us) ** (1 / len(us))


def tune(
    geometry: Geometry,
    timer: Timer,
    deadline: Deadline,
    sizes: TimingSizes,
    candidates: Sequence[BlockSizes] | None = None,
) -> Tuned | None:
    """Tries a geometry's candidates; None if no workload runs with it.

    Raises:
      DeviceLost: an error that stays.
    """
    workloads = [w.with_copies(sizes.pool) for w in geometry.workloads(sizes)]
    if not workloads:
        return None
    default = geometry.default(workloads[0])
    inputs = [random_inputs(w.variant, w.rows, random_key(0)) for w in workloads]
    wanted = [_run(w, x, geometry.default(w)) for w, x in zip(workloads, inputs, strict=True)]
    default_us = {w.name: 1e6 * timer(w, x, geometry.default(w)) for w, x in zip(workloads, inputs, strict=True)}
    best, best_us, tried, refused = default, default_us, 0, {}
    for blocks in geometry.candidates(workloads) if candidates is None else candidates:
        if deadline.passed:
            break
        tried += 1
        us: dict[str, float] = {}
        try:
            for workload, x, want in zip(workloads, inputs, wanted, strict=True):
                error = float(relative_error(_run(workload, x, blocks), want.astype("float32")))
                if not error <= TOLERANCE:
                    raise ValueError(f"its output differs by {error:.1e} ({workload.name})")
                us[workload.name] = 1e6 * timer(workload, x, blocks)
                if len(us) == 1 and us[workload.name] > HOPELESS * default_us[workload.name]:
                    break
        except FAILURES as error:  # does not compile, or takes too much shared memory
            refused[_short(blocks)] = f"{type(error).__name__}: {first_lines(error, 160)}"
            check_alive()
            continue
        if len(us) == len(workloads) and _ratio(us, default_us) < min(WORTH_IT, _ratio(best_us, default_us)):
            best, best_us = blocks, us
    _, kind, _ = device()
    name = key(kind, geometry.body, _shapes(workloads[0]))
    return Tuned(name, default, best, default_us, best_us, tried, refused)


def tune_or_name(
    geometry: Geometry, timer: Timer, deadline: Deadline, sizes: TimingSizes, failed: dict[str, str]
) -> Tuned | None:
    """`tune`; None also where the default itself fails, which is put into `failed`.

    Raises:
      DeviceLost: an error that stays.
    """
    try:
        return tune(geometry, timer, deadline, sizes)
    except FAILURES as error:
        failed[str(geometry)] = f"{type(error).__name__}: {first_lines(error)}"
        check_alive()
        return None


def _run(workload: Workload, inputs: Inputs, blocks: BlockSizes) -> jax.Array:
    call = partial(attend, workload.variant, implementation="mosaic_gpu", block_sizes=blocks)
    return jax.jit(call)(inputs)


def _short(blocks: BlockSizes) -> str:
    b = blocks
    return f"{b.keys} keys, {b.stages} stages, {b.warpgroups} warpgroups, {b.value_parts} value parts"


def geometries(
    bodies: Sequence[Body], head_dims: Sequence[int], page_sizes: Sequence[int], dtypes: Sequence[str]
) -> list[Geometry]:
    """All, the commonest first. Latents are not among them: only one choice of their blocks fits shared memory."""

    def rarity(g: Geometry) -> int:
        return (g.head_dim != 128) + (g.page_size != 16) + (g.page_dtype != "bfloat16")

    return sorted((Geometry(*g) for g in itertools.product(bodies, head_dims, page_sizes, dtypes)), key=rarity)


def read_table(path: pathlib.Path) -> dict[str, dict[str, int]]:
    """A table's entries; of a file that is not there, none.

    Raises:
      InvalidRequestError: it is no table.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # (of JSON, and of UTF-8)
        raise InvalidRequestError(f"--output: {path} can't be read as JSON: {error}; mend or remove it") from error
    if not isinstance(table, dict):
        found = type(table).__name__
        raise InvalidRequestError(f"--output: {path} must hold one JSON object, {{key: block sizes}}, got a {found}")
    return table


def update_table(path: pathlib.Path, result: Tuned) -> None:
    """Writes a winner into the table; other entries stay."""
    table = read_table(path)
    if result.best != result.default:
        table[result.key] = {k: v for k, v in dataclasses.asdict(result.best).items() if k != "splits"}
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)


def result_table(results: Sequence[Tuned]) -> rich.table.Table:
    out = rich.table.Table(title="Block sizes (µs by workload)")
    for name in ("geometry", "default", "default µs", "best", "best µs", "gain", "tried", "refused"):
        out.add_column(name)
    for r in results:
        before, after = (", ".join(f"{name} {us:.0f}" for name, us in x.items()) for x in (r.default_us, r.best_us))
        best = "–" if r.best == r.default else _short(r.best)
        out.add_row(r.key, _short(r.default), before, best, after, f"{r.gain:.2f}", str(r.tried), str(len(r.refused)))
    return out
