"""specax-tune-kernels: looks for the attention kernels' block sizes on the GPU at hand."""

import dataclasses
import importlib.resources
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.device_report import (
    Deadline,
    DeviceLost,
    facts,
    need_hopper,
)
from specax.decoding.gpu.device_timings import TimingSizes, Workload, time_inputs
from specax.decoding.gpu.tuning import Tuned, geometries, read_table, result_table, tune_or_name, update_table
from specax.decoding.gpu.variants import PAGE_DTYPES, Inputs
from specax.pallas_kernels.block_sizes import BlockSizes
from specax.pallas_kernels.dispatch import HEAD_DIMS, PAGE_SIZES

ABOUT = """specax-tune-kernels: tries block sizes on the GPU at hand, and keeps those that beat what is used now.

  specax-tune-kernels
  specax-tune-kernels --head_dim=128 --page_size=16 --dtype=bfloat16,int8 --json=tuning.json

For each body (which of keys and queries are the tensor core's rows), head dim, page size and dtype, every candidate
that fits shared memory is timed on the workloads that run with it, the commonest geometry first. It must compile for
all of them, and give the default's output. The default is what is used now: the table's entry, or the built-in rule's.
Winners go into the table that the kernels read, under this GPU's name, after each geometry. Of latents, whose pages
leave no choice, nothing is tried. Exit code 1: a default failed, or the device is lost; 2: there is no Hopper GPU."""

BODY = flags.DEFINE_list("body", ["keys", "queries"], "Which bodies.")
HEAD_DIM = flags.DEFINE_list("head_dim", [*map(str, HEAD_DIMS)], "Which head dims.")
PAGE_SIZE = flags.DEFINE_list("page_size", [*map(str, PAGE_SIZES)], "Which page sizes.")
DTYPE = flags.DEFINE_list("dtype", list(PAGE_DTYPES), "Which dtypes of pages.")
BUDGET = flags.DEFINE_float("budget", 540.0, "Seconds for everything; what does not fit is left out.", lower_bound=1.0)
OUTPUT = flags.DEFINE_string("output", None, "The table to update; default: the one that the kernels read.")
JSON = flags.DEFINE_string("json", None, "Write all that was measured to this file, after every geometry.")

GROUPS: dict[str, Sequence[Any]] = {"What": (BODY, HEAD_DIM, PAGE_SIZE, DTYPE, BUDGET), "Output": (OUTPUT, JSON)}


def main() -> None:
    chosen = geometries(
        _chosen(BODY, ("keys", "queries")),
        _chosen(HEAD_DIM, HEAD_DIMS),
        _chosen(PAGE_SIZE, PAGE_SIZES),
        _chosen(DTYPE, PAGE_DTYPES),
    )
    own = str(importlib.resources.files("specax.pallas_kernels") / "tuned.json")
    path, json_path = cli.output_path("output", OUTPUT.value or own), cli.output_path("json", JSON.value)
    assert path is not None
    read_table(path)  # finds fault before the work
    need_hopper("specax-tune-kernels")
    sizes = TimingSizes(seconds=0.01, repeats=3)
    deadline, left, why = Deadline(time.monotonic() + BUDGET.value), 0, "out of time"
    results: list[Tuned] = []
    failed: dict[str, str] = {}
    timer = partial(_seconds, sizes)
    with cli.progress_bar("tuning") as progress:
        for done, geometry in enumerate(chosen):
            progress(done, len(chosen))
            if deadline.passed:
                left = len(chosen) - done
                break
            try:
                if (result := tune_or_name(geometry, timer, deadline, sizes, failed)) is not None:
                    results.append(result)
                    update_table(path, result)
            except DeviceLost as error:
                failed["the device"], left, why = str(error), len(chosen) - done - 1, "the device is lost"
                break
            finally:
                if json_path is not None:
                    _write_report(json_path, results, failed)
    console = cli.log_console()
    console.print(result_table(results))
    for name, error_text in failed.items():
        console.print(f"failed: {name}: {error_text}", style="red", markup=False, highlight=False, soft_wrap=True)
    if left:
        console.print(f"{why}: {left} of {len(chosen)} geometries not tried", style="yellow")
    console.print(f"{sum(r.best != r.default for r in results)} entries written to {path}", highlight=False)
    if failed:
        sys.exit(1)


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
