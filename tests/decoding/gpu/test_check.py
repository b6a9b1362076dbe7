"""What specax-gpu-check compiles, and what it makes of reports; the compiling is `make gpu-check`'s."""

import dataclasses
import itertools
import os
import pathlib
from functools import partial
from typing import Any, cast

import jax
import pytest

from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu.check import BLOCK, GpuCheckError, compile_all
from specax.decoding.gpu.check_kernels import HEAD_DIMS, KERNELS, PAGE_DTYPES, PAGE_SIZES, KernelCase, kernel_cases
from specax.decoding.gpu.check_steps import Program
from specax.decoding.gpu.check_tables import Result, blocks_per_sm, markdown, violations
from specax.decoding.markdown import replace_block
from specax.pallas_kernels.attention_options import AttentionOptions
from specax.pallas_kernels.deviceless import Report, on_h200
from specax.pallas_kernels.dispatch import choose
from specax.pallas_kernels.kernel_report import KernelReport

KERNEL = KernelReport(
    name="decode", registers=168, spill_stores=0, spill_loads=0, stack=0, shared_memory=232448, threads=384, wgmma=16,
    bulk_copies=10, mma=0,
)  # fmt: skip
REPORT = Report(
    1000, 1000, alias_bytes=800, temp_bytes=50, collectives={"all-reduce": 65}, kernels=(KERNEL,), kernel_calls=1,
    distinct_kernels=1, seconds=1.0,
)  # fmt: skip


def never() -> Report:
    raise AssertionError


OP = Program("decode", 1, never, kernel=KernelCase("decode"))
STEP = Program("step", 8, never, segments=1, layers=1, in_place=800, max_temp=50)


def test_as_it_should_be() -> None:
    assert violations(OP, REPORT) == violations(STEP, REPORT) == []


@pytest.mark.parametrize(
    ("program", "kernel", "report", "message"),
    [
        (OP, {"spill_stores": 8}, {}, "spills: 8 bytes stored, 0 loaded"),
        (OP, {"registers": 176}, {}, "176 registers, 170 at most with 384 threads"),
        (OP, {"shared_memory": 232449}, {}, "232449 bytes of shared memory, 232448 at most"),
        (OP, {"wgmma": 0}, {}, "kernel decode has no wgmma"),
        (OP, {"bulk_copies": 0}, {}, "or no cp.async.bulk"),
        (OP, {"notes": ("(C7510) wgmma.mma_async instructions are serialized",)}, {}, "serialized"),
        (STEP, {"wgmma": 0}, {}, "kernel decode has no wgmma"),
        (OP, {}, {"kernels": (), "kernel_calls": 0, "distinct_kernels": 0}, "0 calls of 0 kernels, not 1 calls of 1"),
        (STEP, {}, {"kernel_calls": 32, "distinct_kernels": 32}, "32 calls of 32 kernels, not 1 calls of 1"),
        (STEP, {"spill_loads": 4}, {}, "kernel decode spills"),
        (STEP, {}, {"alias_bytes": 799}, "799 bytes are updated in place, not all of 800"),
        (STEP, {}, {"temp_bytes": 51}, "51 bytes of temporary memory, 50 at most"),
    ],
)
def test_violations(program: Program, kernel: dict[str, Any], report: dict[str, Any], message: str) -> None:
    changed = {"kernels": (dataclasses.replace(KERNEL, **kernel),)} | report
    (found,) = violations(program, dataclasses.replace(REPORT, **changed))
    assert message in found


def test_scales_need_copies_that_may_begin_anywhere() -> None:
    """Eight for a block of 64 keys in pages of 16: keys' and values'. Through tensor maps they would be misaligned."""
    eight_bits = dataclasses.replace(OP, kernel=KernelCase("decode", page_dtype="int8"))
    for plain, found in ((8, []), (2, ["kernel decode has 2 plain copies, not 8: scales of pages are misaligned"])):
        kernels = (dataclasses.replace(KERNEL, plain_loads=plain),)
        assert violations(eight_bits, dataclasses.replace(REPORT, kernels=kernels)) == found


@pytest.mark.parametrize(
    ("registers", "shared_memory", "threads", "blocks"),
    [
        (168, 73800, 384, 1),  # 64,512 of 65,536 registers
        (80, 73800, 256, 3),  # 3 · 20,480 registers, 3 · 74,824 bytes
        (81, 1024, 256, 2),  # 81 registers take 88
        (32, 115712, 256, 2),  # exactly half an SM
        (32, 115713, 256, 1),
        (16, 0, 512, 4),  # 2,048 threads
    ],
)
def test_blocks_per_sm(registers: int, shared_memory: int, threads: int, blocks: int) -> None:
    kernel = dataclasses.replace(KERNEL, registers=registers, shared_memory=shared_memory, threads=threads)
    assert blocks_per_sm(kernel) == blocks


def test_markdown() -> None:
    failed = dataclasses.replace(OP, kernel=KernelCase("prefill", 64, 32, "int8", dtype="float16"))
    lines = markdown([Result.of(OP, REPORT), Result.of(failed, "no"), Result.of(STEP, REPORT)]).splitlines()
    assert "| 128 | 16 | bfloat16 |  | keys | 8 | 2 | 1 | 168 | 0 | 227 | 1 | 16 | 10 | ok |" in lines
    row = "| 64 | 32 | int8 | float16 queries | queries | 64 | 4 | 1 | – | – | – | – | – | – | violation |"
    assert row in lines
    assert "| step | 8 | 0.00 | 0.00 | 0.0 | 65 all-reduce | 1 calls of 1 | ok |" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables if "kernel" not in line} >= {16, 9}
    decode = next(line for line in lines if line.startswith("| decode attention, 64 rows × 4,096 keys"))
    assert decode.endswith("| 1.075 | 0.004 | 4 | 250.0 | 5.4 | memory | 312.5 |")  # by hand: 1.075 GB at 4.3 TB/s


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


def test_the_whole_table() -> None:
    cases = kernel_cases()
    sizes = {(c.kernel, c.head_dim, c.page_size, c.page_dtype) for c in cases}
    assert sizes >= set(itertools.product(KERNELS, HEAD_DIMS, PAGE_SIZES, PAGE_DTYPES))
    assert len({c.title for c in cases}) == len(set(cases)) == len(cases)
    for case in cases:
        plan = case.plan()
        if not case.special:
            keys_are_rows = case.kernel in ("decode", "widest, keys as rows")
            assert plan.body == ("keys" if keys_are_rows else "queries"), case.title
        assert case.splits in (plan.splits, None), case.title


def test_the_quick_part_has_every_pair() -> None:
    def pairs(cases: list[KernelCase]) -> set[tuple[Any, ...]]:
        main = [c for c in cases if c.kernel in KERNELS and c.page_size in PAGE_SIZES]
        sizes = [enumerate((c.kernel, c.head_dim, c.page_size, c.page_dtype)) for c in main]
        return {pair for one in sizes for pair in itertools.combinations(one, 2)}

    quick, every = kernel_cases(quick=True), kernel_cases()
    assert pairs(quick) == pairs(every)
    assert set(quick) <= set(every) and len(quick) < len(every) / 3
    assert {c.kernel for c in quick} == {c.kernel for c in every}


def test_cases_fit_the_ops() -> None:
    """Shapes and options, traced with the implementation that is always there; on an H200 Mosaic's serves them."""
    chosen: list[str] = []

    def implementation(arrays: dict[str, jax.Array], value_dim: int | None) -> None:
        pages = arrays["latent_pages" if "latent_pages" in arrays else "k_pages"]
        options = AttentionOptions(0, 1.0, k_scales=arrays.get("k_scales"), v_scales=arrays.get("v_scales"))
        chosen.append(choose(None, arrays["query"], pages, options, value_dim))

    for case in kernel_cases(quick=True)[::6]:
        arrays = case.arrays()
        assert jax.eval_shape(case.call("xla"), arrays).shape[:-1] == arrays["query"].shape[:-1]
        with on_h200():  # (a function of its own each time: traces are cached)
            jax.eval_shape(partial(implementation, value_dim=512 if case.kernel == "latent" else None), arrays)
        assert chosen.pop() == "mosaic_gpu", case.title


def test_compiling_in_a_process_of_its_own() -> None:
    good, bad = partial(dataclasses.replace, REPORT), cast(Any, partial(int, "no number"))
    programs = [dataclasses.replace(OP, compile=good), dataclasses.replace(STEP, compile=bad)]
    first, second = compile_all(programs, jobs=1)
    assert first == Result(programs[0], REPORT, ())
    assert second.report is None and "does not compile: ValueError: invalid literal" in second.violations[0]


@pytest.mark.slow
def test_a_process_that_dies() -> None:
    with pytest.raises(GpuCheckError, match="lower --jobs"):
        compile_all([dataclasses.replace(OP, compile=partial(os._exit, 3))], jobs=1)
