"""What specax-gpu-check makes of reports; the compiling is `make gpu-check`'s."""

import dataclasses
import pathlib
from typing import Any

import jax
import pytest

from specax.decoding import gpu_programs
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu_check import BLOCK, Result, markdown, violations
from specax.decoding.gpu_programs import Program, kernel_programs
from specax.decoding.markdown import replace_block
from specax.pallas_kernels.deviceless import Report
from specax.pallas_kernels.kernel_report import KernelReport

KERNEL = KernelReport(
    name="decode", registers=168, spill_stores=0, spill_loads=0, stack=0, shared_memory=232448, threads=384, wgmma=16,
    bulk_copies=10, mma=0,
)  # fmt: skip
REPORT = Report(
    1000, 1000, alias_bytes=800, temp_bytes=50, collectives={"all-reduce": 65}, kernels=(KERNEL,), seconds=1.0
)


def never() -> Report:
    raise AssertionError


OP = Program("decode", 1, never, attention=True)
STEP = Program("step", 8, never, in_place=800, max_temp=50)


def test_as_it_should_be() -> None:
    assert violations(OP, REPORT) == violations(STEP, REPORT) == []


@pytest.mark.parametrize(
    ("program", "kernel", "report", "message"),
    [
        (OP, {"spill_stores": 8}, {}, "spills: 8 bytes stored, 0 loaded"),
        (OP, {"registers": 176}, {}, "176 registers, 170 at most with 384 threads"),
        (OP, {"shared_memory": 232449}, {}, "232449 bytes of shared memory, 232448 at most"),
        (OP, {"wgmma": 0}, {}, "no kernel with wgmma"),
        (OP, {"bulk_copies": 0}, {}, "no kernel with wgmma.mma_async and cp.async.bulk"),
        (OP, {"notes": ("(C7510) wgmma.mma_async instructions are serialized",)}, {}, "serialized"),
        (OP, {}, {"kernels": ()}, "no kernel with wgmma"),
        (STEP, {"spill_loads": 4}, {}, "kernel decode spills"),
        (STEP, {}, {"alias_bytes": 799}, "799 bytes are updated in place, not all of 800"),
        (STEP, {}, {"temp_bytes": 51}, "51 bytes of temporary memory, 50 at most"),
    ],
)
def test_violations(program: Program, kernel: dict[str, Any], report: dict[str, Any], message: str) -> None:
    changed = {"kernels": (dataclasses.replace(KERNEL, **kernel),)} | report
    (found,) = violations(program, dataclasses.replace(REPORT, **changed))
    assert message in found


def test_a_step_may_have_kernels_without_wgmma() -> None:
    merge = dataclasses.replace(KERNEL, name="merge", wgmma=0)
    assert not violations(OP, dataclasses.replace(REPORT, kernels=(KERNEL, merge)))


def test_markdown() -> None:
    failed = Result(OP, None, ("does not compile: ValueError: x",))
    lines = markdown([Result(OP, REPORT, ()), failed, Result(STEP, REPORT, ())]).splitlines()
    assert "| decode | decode | 168 | 0/0 | 0 | 227.0 | 384 | 16 | 10 | ok |" in lines
    assert "| decode | – | – | – | – | – | – | – | – | violation |" in lines
    assert "| step | 8 | 0.00 | 0.00 | 0.0 | 65 all-reduce | 1 | ok |" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in tables[:4]}) == len({line.count("|") for line in tables[4:]}) == 1


def test_update_replaces_the_block(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "kernels.md"
    begin, end = "<!-- gpu-check:begin -->", "<!-- gpu-check:end -->"
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    for text in ("new", "newer"):
        replace_block(file, BLOCK, text)
        assert file.read_text() == f"before\n{begin}\n{text}\n{end}\nafter\n"
    file.write_text("no markers")
    with pytest.raises(InvalidRequestError, match="gpu-check:begin"):
        replace_block(file, BLOCK, "new")
    with pytest.raises(InvalidRequestError, match="can't read"):
        replace_block(tmp_path / "absent.md", BLOCK, "new")


def test_variants_fit_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and options, traced with the implementation that is always there."""
    traced = []
    monkeypatch.setattr(gpu_programs, "compile_for_h200", lambda fn, arrays: traced.append(jax.eval_shape(fn, arrays)))
    programs = kernel_programs("xla")
    for program in programs:
        program.compile()
    assert len({program.name for program in programs}) == len(traced) > 10
    assert kernel_programs("no such kernel") == []
