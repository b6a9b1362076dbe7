"""specax-device-check: on the GPU at hand, are kernels and engine right, always the same, and how fast?"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import rich.table
from absl import flags

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.device_parts import PARTS, PROGRAMS, run_parts, watchdog
from specax.decoding.gpu.device_report import Report, need_hopper
from specax.decoding.gpu.device_tables import markdown, tables
from specax.decoding.markdown import replace_block

ABOUT = """specax-device-check: checks and times what is made for a GPU, on the one at hand.

  specax-device-check --json=device.json
  specax-device-check --part=timings --update=docs/kernels.md

correctness  attention kernels against float32, and 20 times over for the same bits, under varying load: as many as
             fit the budget, the commonest first, then such that any two sizes or options meet early
engine       steps of small random models against float32; requests through a pool that is too small
timings      kernels and a decode step of Llama 3 8B's shape, beside XLA and jax's own Triton kernel, against the
             rates of a large copy and a large matrix product measured in the same run

Nothing is downloaded. The JSON is on disk after every entry, and says what ran when the program was stopped. Exit
code 0: everything ran and is right; 1: something is wrong; 2: there is no Hopper GPU; 3: the GPU hangs; 4: what ran
is right, but not everything ran: the end of the output says what did not, and the JSON's "left_out" names each kernel
and timing."""

PART = flags.DEFINE_list("part", list(PARTS), "Which of correctness, engine, timings to run.")
BUDGET = flags.DEFINE_float(
    "budget", 310.0, "Seconds for everything; what does not fit is left out, and named.", lower_bound=1.0
)
JSON = flags.DEFINE_string("json", None, "Write everything to this file, after every entry.")
MARKDOWN = flags.DEFINE_boolean("markdown", False, "Print tables in Markdown on standard output.")
UPDATE = flags.DEFINE_string("update", None, "Put them between the device-check markers of this file.")

GROUPS: dict[str, Sequence[Any]] = {"What": (PART, BUDGET), "Output": (JSON, MARKDOWN, UPDATE)}
BLOCK = "device-check"  # of a document
GRACE = 40.0  # seconds after the budget, for what has begun; with the budget's default, all ends within 6 minutes


def main() -> None:
    if unknown := set(PART.value) - set(PARTS):
        raise InvalidRequestError(f"--part: {', '.join(sorted(unknown))} unknown; there are {', '.join(PARTS)}")
    if UPDATE.value:
        replace_block(pathlib.Path(UPDATE.value), BLOCK, "", dry_run=True)  # finds fault before the work
    json_path = cli.output_path("json", JSON.value)
    need_hopper("specax-device-check")
    report = Report(json_path)
    parts = [part for part in PARTS if part in PART.value]
    with watchdog(report, BUDGET.value + GRACE):
        run_parts(report, parts, BUDGET.value, PROGRAMS)
    console = cli.log_console()
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
    if report.exit_code:
        sys.exit(report.exit_code)


def run() -> None:
    """Console entry point."""
    cli.run_program(main, ABOUT, GROUPS)


if __name__ == "__main__":
    run()
