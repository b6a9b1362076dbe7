"""Tables of what specax-device-check found."""

from collections.abc import Sequence
from typing import Any

from specax.decoding.gpu.device_report import Report
from specax.decoding.markdown import markdown_table

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
