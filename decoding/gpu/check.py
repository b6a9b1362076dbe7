"""specax-gpu-check: compiles kernels and steps for NVIDIA H200 GPUs, without one, and checks what comes out."""

import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.check_steps import LLAMA_3_8B, Program, kernel_programs, step_programs
from specax.decoding.gpu.check_tables import Result, markdown, record, rich_tables
from specax.decoding.markdown import replace_block
from specax.model.errors import SpecaxError
from specax.pallas_kernels.deviceless import DevicelessError, Report, topology

ABOUT = """specax-gpu-check: compiles for an H200 where there is none, and checks registers, memory and collectives.

  specax-gpu-check --quick
  specax-gpu-check --part=steps --devices=8 --json=report.json
  specax-gpu-check --update=docs/kernels.md

Needs JAX's CUDA plugin and ptxas (pip install 'specax[gpu-check]'); `make gpu-check` provides them. Exit code 1 if
something is not as it should be."""

PARTS = ("kernels", "steps")
PART = flags.DEFINE_list("part", list(PARTS), "Which of kernels, steps to compile.")
QUICK = flags.DEFINE_boolean("quick", False, "Only a part of the kernels, in which every two sizes meet.")
DEVICES = flags.DEFINE_list("devices", ["1", "8"], "Numbers of GPUs of the steps, one compilation each.")
LAYERS = flags.DEFINE_integer("layers", LLAMA_3_8B.num_layers, "Layers of the steps' model.", lower_bound=1)
JOBS = flags.DEFINE_integer("jobs", os.cpu_count() or 1, "Processes that compile; each takes 1 GB.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Write everything to this file.")
MARKDOWN = flags.DEFINE_boolean("markdown", False, "Print tables in Markdown on standard output.")
UPDATE = flags.DEFINE_string("update", None, "Put them between the gpu-check markers of this file.")

GROUPS: dict[str, Sequence[Any]] = {
    "What": (PART, QUICK, DEVICES, LAYERS, JOBS), "Output": (JSON, MARKDOWN, UPDATE),
}  # fmt: skip

BLOCK = "gpu-check"  # of a document


class GpuCheckError(SpecaxError):
    """The check can't be made here."""


def main() -> None:
    if unknown := set(PART.value) - set(PARTS):
        raise InvalidRequestError(f"--part: {', '.join(sorted(unknown))} unknown; there are {', '.join(PARTS)}")
    if bad := [n for n in DEVICES.value if not n.isdecimal() or int(n) < 1]:
        raise InvalidRequestError(f"--devices takes numbers of GPUs from 1 on, got {bad[0]!r}")
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, "", dry_run=True)  # finds fault before the work
    json_path = cli.output_path("json", JSON.value)
    without_gpu()
    try:
        topology()
    except DevicelessError as error:
        raise GpuCheckError(str(error)) from error
    programs = kernel_programs(QUICK.value) if "kernels" in PART.value else []
    if "steps" in PART.value:
        programs += [p for n in DEVICES.value for p in step_programs(int(n), LAYERS.value)]
    results = compile_all(programs, JOBS.value)
    console = cli.log_console()
    for table in rich_tables(results):
        console.print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(record(results), indent=1) + "\n", encoding="utf-8")
    if MARKDOWN.value:
        print(markdown(results))
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, markdown(results))
    wrong = [f"{r.label}: {text}" for r in results for text in r.violations]
    for line in wrong:
        console.print(f"violation: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong:
        sys.exit(1)


def without_gpu() -> None:
    """Also where there is a GPU, nothing runs on it."""
    jax.config.update("jax_platforms", "cpu")


def compile_all(programs: Sequence[Program], jobs: int) -> list[Result]:
    """Compiles in `jobs` processes of their own, since within one only one program compiles at a time.

    Raises:
      GpuCheckError: a process died.
    """
    context = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
    with (
        cli.progress_bar("compiling") as progress,
        ProcessPoolExecutor(jobs, context, initializer=without_gpu) as pool,
    ):
        # Steps take longest: they start first.
        order = sorted(range(len(programs)), key=lambda i: programs[i].kernel is not None)
        futures: dict[Future[Report | str], int] = {pool.submit(attempt, programs[i]): i for i in order}
        results: dict[int, Result] = {}
        try:
            for future in as_completed(futures):
                i = futures[future]
                results[i] = Result.of(programs[i], future.result())
                progress(len(results), len(programs))
        except BrokenProcessPool as error:
            message = f"a process that compiles died ({error}); if for want of memory, lower --jobs from {jobs}"
            raise GpuCheckError(message) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [results[i] for i in range(len(programs))]


def attempt(program: Program) -> Report | str:
    """The report, or why there is none; the rest still is of interest."""
    try:
        return program.compile()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # From Python's half of the compiler, too: shared memory, layouts.
        return f"does not compile: {type(error).__name__}: {error}"


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
