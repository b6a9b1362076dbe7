"""specax-gpu-check: compiles kernels and steps for NVIDIA H200 GPUs, without one, and checks what comes out."""

import dataclasses
import importlib.metadata
import io
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import rich.console
import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu_programs import LLAMA_3_8B, Program, kernel_programs, step_programs
from specax.decoding.markdown import markdown_table, replace_block
from specax.model.errors import SpecaxError
from specax.pallas_kernels.deviceless import DevicelessError, Report, topology
from specax.pallas_kernels.kernel_report import KernelReport

ABOUT = """specax-gpu-check: compiles for an H200 where there is none, and checks registers, memory and collectives.

  specax-gpu-check
  specax-gpu-check --part=steps --devices=8 --json=report.json
  specax-gpu-check --update=docs/kernels.md

Needs JAX's CUDA plugin and ptxas (pip install 'specax[gpu-check]'); `make gpu-check` provides them. Exit code 1 if
something is not as it should be."""

PARTS = ("kernels", "steps")
PART = flags.DEFINE_list("part", list(PARTS), "Which of kernels, steps to compile.")
DEVICES = flags.DEFINE_list("devices", ["1", "8"], "Numbers of GPUs of the steps, one compilation each.")
LAYERS = flags.DEFINE_integer("layers", LLAMA_3_8B.num_layers, "Layers of the steps' model.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "Write everything to this file.")
MARKDOWN = flags.DEFINE_boolean("markdown", False, "Print tables in Markdown on standard output.")
UPDATE = flags.DEFINE_string("update", None, "Put them between the gpu-check markers of this file.")

GROUPS: dict[str, Sequence[Any]] = {"What": (PART, DEVICES, LAYERS), "Output": (JSON, MARKDOWN, UPDATE)}

# Of an SM (NVIDIA Hopper tuning guide): registers, and shared memory that one block can have.
REGISTERS, SHARED_MEMORY = 65536, 227 * 1024
BLOCK = "gpu-check"  # of a document


class GpuCheckError(SpecaxError):
    """The check can't be made here."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A program, what became of it, and what is wrong with that."""

    program: Program
    report: Report | None  # None: does not compile
    violations: tuple[str, ...]


def main() -> None:
    if unknown := set(PART.value) - set(PARTS):
        raise InvalidRequestError(f"--part: {', '.join(sorted(unknown))} unknown; there are {', '.join(PARTS)}")
    if bad := [n for n in DEVICES.value if not n.isdecimal() or int(n) < 1]:
        raise InvalidRequestError(f"--devices takes numbers of GPUs from 1 on, got {bad[0]!r}")
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, "", dry_run=True)  # finds fault before the work
    jax.config.update("jax_platforms", "cpu")  # also where there is a GPU: nothing runs on it
    try:
        topology()
    except DevicelessError as error:
        raise GpuCheckError(str(error)) from error
    programs = kernel_programs() if "kernels" in PART.value else []
    if "steps" in PART.value:
        programs += [p for n in DEVICES.value for p in step_programs(int(n), LAYERS.value)]
    results = compile_all(programs)
    # A log has no width.
    console = cli.stderr if cli.stderr.is_terminal else rich.console.Console(stderr=True, width=140)
    for table in (kernel_table(results), step_table(results)):
        if table.row_count:
            console.print(table)
    if JSON.value:
        pathlib.Path(JSON.value).write_text(json.dumps(record(results), indent=1) + "\n", encoding="utf-8")
    if MARKDOWN.value:
        print(markdown(results))
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, markdown(results))
    wrong = [f"{label(r.program)}: {text}" for r in results for text in r.violations]
    for line in wrong:
        console.print(f"violation: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    if wrong:
        sys.exit(1)


def compile_all(programs: Sequence[Program]) -> list[Result]:
    results = []
    # The compilers' standard error is held back while they work; the bar goes on with a descriptor of its own.
    with (
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as terminal,
        cli.progress_bar("compiling", rich.console.Console(file=terminal)) as progress,
    ):
        for i, program in enumerate(programs):
            progress(i, len(programs))
            try:
                report = program.compile()
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                # From Python's half of the compiler, too: shared memory, layouts. The rest still is of interest.
                results.append(Result(program, None, (f"does not compile: {type(error).__name__}: {error}",)))
            else:
                results.append(Result(program, report, tuple(violations(program, report))))
    return results


def violations(program: Program, report: Report) -> list[str]:
    """What is not as it should be, one line each."""
    out = []
    for kernel in report.kernels:
        name = f"kernel {kernel.name}"
        if kernel.spill_stores or kernel.spill_loads:
            out.append(f"{name} spills: {kernel.spill_stores} bytes stored, {kernel.spill_loads} loaded, not 0")
        if kernel.registers * kernel.threads > REGISTERS:
            limit = REGISTERS // kernel.threads
            out.append(f"{name} has {kernel.registers} registers, {limit} at most with {kernel.threads} threads")
        if kernel.shared_memory > SHARED_MEMORY:
            out.append(f"{name} has {kernel.shared_memory} bytes of shared memory, {SHARED_MEMORY} at most")
        out += [f"{name}: {note}" for note in kernel.notes if "wgmma" in note and "serialized" in note]
    if program.attention and not any(kernel.wgmma and kernel.bulk_copies for kernel in report.kernels):
        out.append("no kernel with wgmma.mma_async and cp.async.bulk")
    if report.alias_bytes < program.in_place:
        out.append(f"{report.alias_bytes} bytes are updated in place, not all of {program.in_place}: a second copy")
    if program.max_temp is not None and report.temp_bytes > program.max_temp:
        out.append(f"{report.temp_bytes} bytes of temporary memory, {program.max_temp} at most")
    return out


def label(program: Program) -> str:
    return f"{program.name}, {program.devices} GPU{'s' if program.devices > 1 else ''}"


KERNEL_COLUMNS = ("program", "kernel", "registers", "spills", "stack", "shared KiB", "threads", "wgmma", "TMA", "")
STEP_COLUMNS = ("program", "GPUs", "arguments GB", "in place GB", "temporary MB", "collectives", "kernels", "")


def kernel_rows(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the kernels' table: one row per kernel of a program that is one op."""
    rows = []
    for r in results:
        if not r.program.attention:
            continue
        kernels: Sequence[KernelReport | None] = r.report.kernels if r.report else ()
        for kernel in kernels or (None,):
            cells = ["–"] * 8
            if kernel is not None:
                spills = f"{kernel.spill_stores}/{kernel.spill_loads}"
                numbers = (kernel.registers, spills, kernel.stack, f"{kernel.shared_memory / 1024:.1f}", kernel.threads)
                cells = [kernel.name, *map(str, (*numbers, kernel.wgmma, kernel.bulk_copies))]
            rows.append([r.program.name, *cells, verdict(r)])
    return rows


def step_rows(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the steps' table; memory is that of one GPU."""
    rows = []
    for r in results:
        if r.program.attention:
            continue
        cells = ["–"] * 5
        if r.report is not None:
            collectives = ", ".join(f"{n} {kind}" for kind, n in r.report.collectives.items()) or "none"
            gb = [f"{n / 1e9:.2f}" for n in (r.report.argument_bytes, r.report.alias_bytes)]
            cells = [*gb, f"{r.report.temp_bytes / 1e6:.1f}", collectives, str(len(r.report.kernels))]
        rows.append([r.program.name, str(r.program.devices), *cells, verdict(r)])
    return rows


def verdict(result: Result) -> str:
    return "violation" if result.violations else "ok"


def kernel_table(results: Sequence[Result]) -> rich.table.Table:
    return rich_table("Attention kernels, compiled for an H200", KERNEL_COLUMNS, kernel_rows(results))


def step_table(results: Sequence[Result]) -> rich.table.Table:
    return rich_table("Steps of Llama 3 8B, compiled for H200s (per GPU)", STEP_COLUMNS, step_rows(results))


def rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> rich.table.Table:
    out = rich.table.Table(title=title)
    for name in columns:
        out.add_column(name, justify="left" if name in ("program", "kernel", "collectives", "") else "right")
    for row in rows:
        out.add_row(*row)
    return out


def markdown(results: Sequence[Result]) -> str:
    """The tables, and what compiled them."""
    out = io.StringIO()
    for columns, rows in ((KERNEL_COLUMNS, kernel_rows(results)), (STEP_COLUMNS, step_rows(results))):
        if rows:
            out.write(markdown_table(columns, rows) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in compilers().items())
    out.write(f"Compiled by {versions}. Memory is per GPU; wgmma and TMA count instructions in the PTX.")
    return out.getvalue()


def compilers() -> dict[str, str]:
    names = ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    found = {dist.name: dist.version for name in names for dist in importlib.metadata.distributions(name=name)}
    return {name: found[name] for name in names if name in found}


def record(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "compilers": compilers(),
        "programs": [
            {
                "name": r.program.name,
                "devices": r.program.devices,
                "report": dataclasses.asdict(r.report) if r.report else None,
                "violations": r.violations,
            }
            for r in results
        ],
    }


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
