"""specax-tune-kernels: looks for the attention kernels' block sizes on the GPU at hand."""

import dataclasses
import importlib.resources
import json
import pathlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import rich.console
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.device_report import FAILURES, Deadline, DeviceLost, facts, first_lines, need_hopper
from specax.decoding.gpu.device_timings import TimingSizes, Workload, time_inputs
from specax.decoding.gpu.tuning import Tuned, geometries, result_table, tune, update_table
from specax.decoding.gpu.variants import LATENT, PAGE_DTYPES, Inputs
from specax.pallas_kernels.block_sizes import BlockSizes
from specax.pallas_kernels.dispatch import HEAD_DIMS, PAGE_SIZES

ABOUT = """specax-tune-kernels: tries block sizes on the GPU at hand, and keeps those that beat the built-in rule.

  specax-tune-kernels
  specax-tune-kernels --head_dim=128 --page_size=16 --dtype=bfloat16,int8 --report=tuning.json

For each body (which of keys and queries are the tensor core's rows), head dim, page size and dtype, every candidate
is timed on the workloads that run with it, the commonest geometry first. It must compile for all of them, fit shared
memory, and give the default's output. Winners go into the table that the kernels read, under this GPU's name, after
each geometry. Exit code 2: there is no Hopper GPU."""

BODY = flags.DEFINE_list("body", ["keys", "queries"], "Which bodies.")
HEAD_DIM = flags.DEFINE_list("head_dim", [*map(str, HEAD_DIMS), str(LATENT[0])], "Which head dims; 576 is of latents.")
PAGE_SIZE = flags.DEFINE_list("page_size", [*map(str, PAGE_SIZES)], "Which page sizes.")
DTYPE = flags.DEFINE_list("dtype", list(PAGE_DTYPES), "Which dtypes of pages.")
BUDGET = flags.DEFINE_float("budget", 540.0, "Seconds for everything; what does not fit is left out.", lower_bound=1.0)
OUTPUT = flags.DEFINE_string("output", None, "The table to update; default: the one that the kernels read.")
REPORT = flags.DEFINE_string("report", None, "Write all that was measured to this JSON file.")

GROUPS: dict[str, Sequence[Any]] = {"What": (BODY, HEAD_DIM, PAGE_SIZE, DTYPE, BUDGET), "Output": (OUTPUT, REPORT)}

def main() -> None:
    chosen = geometries(
        _chosen(BODY, ("keys", "queries")),
        _chosen(HEAD_DIM, (*HEAD_DIMS, LATENT[0])),
        _chosen(PAGE_SIZE, PAGE_SIZES),
        _chosen(DTYPE, PAGE_DTYPES),
    )
    need_hopper("specax-tune-kernels")
    sizes = TimingSizes(seconds=0.01, repeats=3)
    path = pathlib.Path(OUTPUT.value or str(importlib.resources.files("specax.pallas_kernels") / "tuned.json"))
    deadline, results, left = Deadline(time.monotonic() + BUDGET.value), [], 0
    failed: dict[str, str] = {}
    with cli.progress_bar("tuning") as progress:
        for done, geometry in enumerate(chosen):
            progress(done, len(chosen))
            if deadline.passed:
                left = len(chosen) - done
                break
            try:
                result = tune(geometry, partial(_seconds, sizes), deadline, sizes)
            except DeviceLost as error:
                failed[str(geometry)], left = str(error), len(chosen) - done - 1
                break
            except FAILURES as error:  # the default itself
                failed[str(geometry)] = f"{type(error).__name__}: {first_lines(error)}"
                continue
            if result is not None:
                results.append(result)
                update_table(path, result)
                if REPORT.value:
                    _write_report(pathlib.Path(REPORT.value), results, failed)
    console = cli.stderr if cli.stderr.is_terminal else rich.console.Console(stderr=True, width=140)
    console.print(result_table(results))
    for name, why in failed.items():
        console.print(f"failed: {name}: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    if left:
        console.print(f"out of time: {left} of {len(chosen)} geometries not tried", style="yellow")
    console.print(f"{sum(r.best != r.default for r in results)} entries written to {path}", highlight=False)


def _seconds(sizes: TimingSizes, workload: Workload, inputs: Inputs, blocks: BlockSizes) -> float:
    return time_inputs(workload, inputs, "mosaic_gpu", sizes, blocks)


def _chosen(flag: flags.FlagHolder, known: Sequence[Any]) -> list[Any]:
    """A list flag's values, as `known` has them."""
    by_name = {str(value): value for value in known}
    if unknown := [name for name in flag.value if name not in by_name]:
        raise InvalidRequestError(f"--{flag.name}: {', '.join(unknown)} unknown; there are {', '.join(by_name)}")
    return [by_name[name] for name in flag.value]


def _write_report(path: pathlib.Path, results: Sequence[Tuned], failed: dict[str, str]) -> None:
    tuned = [{**dataclasses.asdict(r), "gain": r.gain} for r in results]
    record = {"device": facts(), "tuned": tuned, "failed": failed}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
