"""What specax-gpu-check makes of reports: violations, and tables for the terminal, for the docs and as JSON."""

import dataclasses
import importlib.metadata
import io
from collections.abc import Sequence
from typing import Any

import rich.table

from specax.decoding.gpu import roofline
from specax.decoding.gpu.check_kernels import KernelCase
from specax.decoding.gpu.check_steps import LLAMA_3_8B, Program
from specax.decoding.markdown import markdown_table
from specax.pallas_kernels.block_sizes import RESERVED, SHARED_MEMORY, SM_SHARED_MEMORY
from specax.pallas_kernels.deviceless import Report
from specax.pallas_kernels.kernel_report import KernelReport

REGISTERS, THREADS = 65536, 2048  # of an SM (NVIDIA Hopper tuning guide)

KERNEL_COLUMNS = (
    "head dim", "page", "dtype", "with", "rows", "queries", "stages", "splits", "registers", "spills", "shared KiB",
    "blocks/SM", "wgmma", "TMA", "",
)  # fmt: skip
STEP_COLUMNS = ("program", "GPUs", "arguments GB", "in place GB", "temporary MB", "collectives", "kernels", "")
ROOFLINE_COLUMNS = ("", "GB", "TFLOP", "FLOP/B", "memory µs", "arithmetic µs", "bound by", "µs at 80 %")
LEFT = {"program", "dtype", "with", "rows", "collectives", ""}  # the others are numbers


@dataclasses.dataclass(frozen=True)
class Result:
    """A program, what became of it, and what is wrong with that."""

    program: Program
    report: Report | None  # None: does not compile
    violations: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, report: Report | str) -> "Result":
        """`report`: or why there is none."""
        if isinstance(report, str):
            return cls(program, None, (report,))
        return cls(program, report, tuple(violations(program, report)))

    @property
    def label(self) -> str:
        devices = self.program.devices
        return f"{self.program.name}, {devices} GPU{'s' if devices > 1 else ''}"


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
        if (program.kernel or program.segments) and not (kernel.wgmma and kernel.bulk_copies):
            out.append(f"{name} has no wgmma.mma_async, or no cp.async.bulk")
        if (case := program.kernel) and (scales := case.scale_copies) > kernel.plain_loads:
            out.append(f"{name} has {kernel.plain_loads} plain copies, not {scales}: scales of pages are misaligned")
    calls, distinct = program.layers * program.segments, program.segments
    if program.kernel is not None:
        calls, distinct = program.kernel.kernel_calls, 1
    if (report.kernel_calls, report.distinct_kernels) != (calls, distinct):
        found = f"{report.kernel_calls} calls of {report.distinct_kernels} kernels"
        out.append(f"{found}, not {calls} calls of {distinct}: Mosaic is not in place, or layers do not share a kernel")
    if report.alias_bytes < program.in_place:
        out.append(f"{report.alias_bytes} bytes are updated in place, not all of {program.in_place}: a second copy")
    if program.max_temp is not None and report.temp_bytes > program.max_temp:
        out.append(f"{report.temp_bytes} bytes of temporary memory, {program.max_temp} at most")
    return out


def blocks_per_sm(kernel: KernelReport) -> int:
    """Thread blocks that an SM holds at a time. A warp's registers come in 256s, so a thread's in 8s."""
    registers = -(-kernel.registers // 8) * 8 * kernel.threads
    shared = kernel.shared_memory + RESERVED
    return min(REGISTERS // registers, SM_SHARED_MEMORY // shared, THREADS // kernel.threads)


def kernel_rows(results: Sequence[Result]) -> dict[str, list[list[str]]]:
    """Cells of the kernel tables: the kernel → a row for each of its cases."""
    tables: dict[str, list[list[str]]] = {}
    for r in results:
        if r.program.kernel is not None:
            row = _kernel_row(r.program.kernel, r.report.kernels if r.report else ())
            tables.setdefault(r.program.kernel.kernel, []).append([*row, verdict(r)])
    return tables


def _kernel_row(case: KernelCase, kernels: Sequence[KernelReport]) -> list[str]:
    plan = case.plan()
    groups = plan.blocks.warpgroups
    queries = f"{groups} × {plan.queries}" if groups > 1 else str(plan.queries)
    sizes = (case.head_dim, case.page_size, case.page_dtype, ", ".join(case.special))
    row = [*map(str, sizes), plan.body, queries, str(plan.blocks.stages), str(plan.splits)]
    if not kernels:
        return row + ["–"] * 6
    kernel = kernels[0]
    spills = kernel.spill_stores + kernel.spill_loads
    numbers = (kernel.registers, spills, f"{kernel.shared_memory / 1024:.0f}", blocks_per_sm(kernel))
    return [*row, *map(str, (*numbers, kernel.wgmma, kernel.bulk_copies))]


def step_rows(results: Sequence[Result]) -> list[list[str]]:
    """Cells of the steps' table; memory is that of one GPU."""
    rows = []
    for r in results:
        if r.program.kernel is not None:
            continue
        cells = ["–"] * 5
        if r.report is not None:
            collectives = ", ".join(f"{n} {kind}" for kind, n in r.report.collectives.items()) or "none"
            gb = [f"{n / 1e9:.2f}" for n in (r.report.argument_bytes, r.report.alias_bytes)]
            kernels = "none"
            if r.report.kernel_calls:
                kernels = f"{r.report.kernel_calls} calls of {r.report.distinct_kernels}"
            cells = [*gb, f"{r.report.temp_bytes / 1e6:.1f}", collectives, kernels]
        rows.append([r.program.name, str(r.program.devices), *cells, verdict(r)])
    return rows


def roofline_rows() -> list[list[str]]:
    """Cells of the table of least times: one layer's attention, and whole steps."""
    rows = []
    for name, work in roofline.examples(LLAMA_3_8B).items():
        micros = [f"{1e6 * x:,.1f}" for x in (work.memory_seconds, work.arithmetic_seconds)]
        sizes = [f"{work.bytes / 1e9:.3f}", f"{work.flops / 1e12:.3f}", f"{work.flops / work.bytes:.0f}"]
        rows.append([name, *sizes, *micros, work.bound, f"{1e6 * work.seconds / 0.8:,.1f}"])
    return rows


def verdict(result: Result) -> str:
    return "violation" if result.violations else "ok"


def rich_tables(results: Sequence[Result]) -> list[rich.table.Table]:
    tables: list[tuple[str, Sequence[str], list[list[str]]]]
    tables = [(f"Kernel: {name}", KERNEL_COLUMNS, rows) for name, rows in kernel_rows(results).items()]
    if steps := step_rows(results):
        tables.append(("Steps of Llama 3 8B (per GPU)", STEP_COLUMNS, steps))
    out = []
    for title, columns, rows in tables:
        table = rich.table.Table(title=title)
        for name in columns:
            table.add_column(name, justify="left" if name in LEFT else "right")
        for row in rows:
            table.add_row(*row)
        out.append(table)
    return out


def markdown(results: Sequence[Result]) -> str:
    """The tables, and what compiled them."""
    out = io.StringIO()
    versions = ", ".join(f"{name} {version}" for name, version in compilers().items())
    out.write(f"Compiled by {versions}.\n\n")
    if steps := step_rows(results):
        out.write(f"### Steps of Llama 3 8B, bfloat16, per GPU\n\n{markdown_table(STEP_COLUMNS, steps)}\n")
    out.write(f"### Least times of Llama 3 8B on H200s\n\n{markdown_table(ROOFLINE_COLUMNS, roofline_rows())}\n")
    for name, rows in kernel_rows(results).items():
        out.write(f"### Kernel: {name}\n\n{markdown_table(KERNEL_COLUMNS, rows)}\n")
    return out.getvalue().rstrip()


def compilers() -> dict[str, str]:
    names = ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    found = {dist.name: dist.version for name in names for dist in importlib.metadata.distributions(name=name)}
    return {name: found[name] for name in names if name in found}


def record(results: Sequence[Result]) -> dict[str, Any]:
    """All of it, for JSON."""
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
