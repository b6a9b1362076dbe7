"""specax-device-check: on the GPU at hand, are kernels and engine right, always the same, and how fast?"""

import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.device_report import Deadline, DeviceLost, Report, need_hopper
from specax.decoding.errors import InvalidRequestError
from specax.decoding.markdown import markdown_table, replace_block

ABOUT = """specax-device-check: checks and times everything that is made for a GPU, on the one at hand.

  specax-device-check --json=device.json
  specax-device-check --part=timings --update=docs/kernels.md

correctness  every attention kernel against float32, and 20 times over for the same bits, under varying load
engine       steps of small random models against float32; requests through a pool that is too small
timings      kernels and a decode step of Llama 3 8B's shape, beside XLA and jax's own Triton kernel, against the
             rates of a large copy and a large matrix product measured in the same run

Nothing is downloaded. The JSON is on disk after every entry, and says what ran when the program was stopped. Exit
code 0: all is right; 1: something is not; 2: there is no Hopper GPU; 3: the GPU hangs."""

PARTS = ("correctness", "engine", "timings")
PART = flags.DEFINE_list("part", list(PARTS), "Which of correctness, engine, timings to run.")
BUDGET = flags.DEFINE_float(
    "budget", 330.0, "Seconds for everything; what does not fit is left out, and named.", lower_bound=1.0
)
JSON = flags.DEFINE_string("json", None, "Write everything to this file, after every entry.")
MARKDOWN = flags.DEFINE_boolean("markdown", False, "Print tables in Markdown on standard output.")
UPDATE = flags.DEFINE_string("update", None, "Put them between the device-check markers of this file.")

GROUPS: dict[str, Sequence[Any]] = {"What": (PART, BUDGET), "Output": (JSON, MARKDOWN, UPDATE)}
BLOCK = "device-check"  # of a document
SHARES = {"correctness": 0.4, "engine": 0.2, "timings": 0.4}  # of the time; what one part leaves, the next ones have
GRACE = 40.0  # seconds after the budget, for what has begun


def main() -> None:
    if unknown := set(PART.value) - set(PARTS):
        raise InvalidRequestError(f"--part: {', '.join(sorted(unknown))} unknown; there are {', '.join(PARTS)}")
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, "", dry_run=True)  # finds fault before the work
    need_hopper("specax-device-check")
    try:
        report = Report(pathlib.Path(JSON.value) if JSON.value else None)
    except OSError as error:
        raise InvalidRequestError(f"--json: can't write {JSON.value}: {error.strerror}") from error
    parts = [part for part in PARTS if part in PART.value]
    with watchdog(report, BUDGET.value + GRACE):
        run_parts(report, parts, BUDGET.value, PROGRAMS)
    # A log has no width.
    console = cli.stderr if cli.stderr.is_terminal else rich.console.Console(stderr=True, width=140)
    for title, columns, rows in tables(report):
        table = rich.table.Table(title=title)
        for number, name in enumerate(columns):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if MARKDOWN.value:
        print(markdown(report))
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, markdown(report))
    for line in report.not_run:
        console.print(f"not run: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for line in report.failures:
        console.print(f"wrong: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    done = ", ".join(f"{len(entries)} of {part}" for part, entries in report.parts.items())
    console.print(f"{report.facts['kind']}: {done}; {len(report.failures)} wrong", markup=False, highlight=False)
    if report.failures:
        sys.exit(1)


class watchdog:
    """Ends the process, exit code 3, if it is still inside after `seconds`: Python can't interrupt a GPU that hangs."""

    def __init__(self, report: Report, seconds: float):
        self._report = report
        self._timer = threading.Timer(seconds, self._bite)
        self._timer.daemon = True

    def _bite(self) -> None:
        self._report.write()
        print(f"the GPU hangs, or is far too slow, in: {self._report.running}", file=sys.stderr, flush=True)
        os._exit(3)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


type Progress = Callable[[int, int], None]
type Run = Callable[[Report, Deadline, Progress], None]


def run_parts(report: Report, parts: Sequence[str], budget: float, programs: dict[str, Run]) -> None:
    """Each part until its deadline. One whose modules are not there is left out; a lost device ends everything."""
    start, whole = time.monotonic(), sum(SHARES[part] for part in parts)
    until = 0.0
    for number, part in enumerate(parts):
        until += SHARES[part] / whole
        deadline = Deadline(start + budget * until)
        if Deadline(start + budget).passed:
            report.skip(part, "everything", "out of time")
            continue
        try:
            with cli.progress_bar(part) as progress:
                programs[part](report, deadline, progress)
        except ImportError as error:
            report.skip(part, "everything", str(error))
        except DeviceLost as error:
            with report.entry(part, "the device") as entry:
                entry["wrong"] = str(error)
            for left in parts[number + 1 :]:
                report.skip(left, "everything", "the device is lost")
            return


def run_correctness(report: Report, deadline: Deadline, progress: Progress) -> None:
    from specax.decoding.device_kernels import all_checks, check_kernels

    check_kernels(report, deadline, all_checks(), progress=progress)


def run_engine(report: Report, deadline: Deadline, progress: Progress) -> None:
    from specax.decoding.device_engine import check_engine

    check_engine(report, deadline, progress=progress)


def run_timings(report: Report, deadline: Deadline, progress: Progress) -> None:
    """The kernels, the decode step, then what they are compared with."""
    from specax.decoding.device_timings import time_kernels

    ceilings = time_kernels(report, deadline, implementations=("mosaic_gpu",), progress=progress)
    try:
        from specax.decoding.device_engine import time_step
    except ImportError as error:
        report.skip("timings", "decode step", str(error))
    else:
        for implementation in ("mosaic_gpu", "xla"):
            if deadline.passed:
                report.skip("timings", f"decode step, {implementation}", "out of time")
            else:
                time_step(report, ceilings, implementation)  # type: ignore[arg-type]
    time_kernels(report, deadline, implementations=("triton", "xla"), progress=progress, ceilings=ceilings)


PROGRAMS: dict[str, Run] = {"correctness": run_correctness, "engine": run_engine, "timings": run_timings}


# --- tables

KERNEL_COLUMNS = ("kernels", "checked", "worst error", "other bits", "wrong")
TIMING_COLUMNS = ("workload", "µs", "GB/s", "of copy", "TFLOP/s", "of matmul", "XLA µs", "Triton µs")


def tables(report: Report) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """(title, columns, rows) of what is worth a table."""
    out: list[tuple[str, Sequence[str], list[list[str]]]] = []
    if kernels := [e for e in report.parts.get("correctness", []) if "different" in e]:
        out.append(("Kernels against float32", KERNEL_COLUMNS, summary(kernels)))
    if rows := timing_rows(report.parts.get("timings", [])):
        out.append(("Timings", TIMING_COLUMNS, rows))
    return out


def summary(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per op."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        op = entry["name"].partition(",")[0]
        groups.setdefault(f"{op}, XLA" if entry["name"].endswith("XLA") else op, []).append(entry)
    return [
        [
            name, str(len(es)), f"{max(e['error'] for e in es):.1e}", str(sum(e["different"] > 0 for e in es)),
            str(sum("wrong" in e for e in es)),
        ]
        for name, es in groups.items()
    ]  # fmt: skip


def timing_rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per workload, the kernel's figures beside the others' microseconds."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in entries:
        if "workload" in entry:
            found.setdefault(entry["workload"], {})[entry["implementation"]] = entry
    rows = []
    for workload, by in found.items():
        ours = by.get("mosaic_gpu", {})
        cells = [_cell(ours, "us", "{:.1f}"), _cell(ours, "gb_s", "{:.0f}"), _cell(ours, "of_copy", "{:.0%}")]
        cells += [_cell(ours, "tflop_s", "{:.0f}"), _cell(ours, "of_matmul", "{:.0%}")]
        rows.append([workload, *cells, *(_cell(by.get(name, {}), "us", "{:.1f}") for name in ("xla", "triton"))])
    return rows


def _cell(entry: dict[str, Any], name: str, form: str) -> str:
    return form.format(entry[name]) if name in entry else "–"


def markdown(report: Report) -> str:
    """The tables, what they were measured on, and what is wrong."""
    text = "".join(markdown_table(columns, rows) + "\n" for _, columns, rows in tables(report))
    facts = report.facts
    for entry in report.parts.get("timings", []):
        if "copy_gb_s" in entry:
            text += f"Ceilings: a copy {entry['copy_gb_s']:.0f} GB/s, a read {entry['read_gb_s']:.0f} GB/s, "
            text += f"a matrix product {entry['matmul_tflop_s']:.0f} TFLOP/s.\n"
    text += f"Measured on one {facts['kind']}, driver {facts['driver']}, jax {facts['jax']}, {facts['at'][:10]}.\n"
    lines = [f"- wrong: {line}" for line in report.failures] + [f"- not run: {line}" for line in report.not_run]
    return (text + "\n" + "\n".join(lines)).strip()


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
