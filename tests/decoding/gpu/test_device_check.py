"""specax-device-check where there is no GPU: kernels in the interpreter, tiny sizes, and what it makes of results."""

import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specax.decoding.gpu import device_kernels, device_report, roofline
from specax.decoding.gpu.device_kernels import (
    Check,
    KernelSizes,
    Load,
    all_checks,
    check_kernels,
    count_different,
    dense_attention,
    relative_error,
)
from specax.decoding.gpu.device_parts import PARTS, run_parts
from specax.decoding.gpu.device_report import Deadline, DeviceLost, NoDeviceError, Report, need_hopper
from specax.decoding.gpu.device_tables import markdown, summary, timing_rows
from specax.decoding.gpu.device_timings import (
    Ceilings,
    TimingSizes,
    Workload,
    rates,
    time_kernels,
    time_turns,
    workloads,
)
from specax.decoding.gpu.variants import Rows, Variant, Work, attend, random_inputs, random_key
from specax.model import ModelConfig
from specax.pallas_kernels import Window, interpreted

SMALL = Variant("decode", 64, kv_heads=1)
SIZES = KernelSizes(contexts=(70, -1, 3), prefill=((40, 20), (0, 7), (3, 0)), repeats=2, load=64, workers=2)
TIMINGS = TimingSizes(
    rows=2, context=64, long=130, many_rows=3, short=48, prefill=40, chunk=16, tree=16, kv_heads=1, latent_heads=(16,),
    pool=1 << 16, copied=1 << 20, matrix=128, seconds=1e-9, repeats=1,
)  # fmt: skip


def forever() -> Deadline:
    return Deadline(math.inf)


def test_without_a_gpu() -> None:
    with pytest.raises(NoDeviceError, match=r"specax-x needs a Hopper GPU .* found 'cpu' on 'cpu'"):
        need_hopper("specax-x")


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize\nbackend 'cuda'"), AssertionError()])
def test_without_a_platform(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """JAX_PLATFORMS=cuda where there is no plugin, or no driver."""

    def devices() -> Any:
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(NoDeviceError, match=r"specax-x needs .* finds no device: (Unable|no platform)") as caught:
        need_hopper("specax-x")
    assert "\n" not in str(caught.value)


# --- the report


def test_the_file_has_everything_so_far(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "out.json"
    report = Report(path)
    with report.entry("a", "first") as entry:
        assert json.loads(path.read_text())["running"] == "a: first"
        entry["x"] = 1
    with report.entry("a", "second"):
        raise RuntimeError("no\nway")
    assert Report().exit_code == 0
    report.skip("b", "the rest", "out of time")
    assert report.exit_code == 1
    read = json.loads(path.read_text())
    assert read["running"] == "" and read["failures"] == ["a: second: RuntimeError: no way"] == report.failures
    assert read["not_run"] == ["b: the rest: out of time"] and read["parts"]["a"][0]["x"] == 1
    with pytest.raises(KeyboardInterrupt), report.entry("a", "third"):
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise DeviceLost("the device is lost")

    def breaks(report: Report, *_: Any) -> None:
        monkeypatch.setattr(device_report, "check_alive", lost)
        with report.entry("correctness", "kernel"):
            raise RuntimeError("illegal address")

    report = Report()
    never: Any = None  # would raise TypeError
    run_parts(report, ["correctness", "timings"], 60.0, {"correctness": breaks, "timings": never})
    assert report.failures[0] == "correctness: kernel: RuntimeError: illegal address" and len(report.failures) == 2
    assert report.not_run == ["timings: everything: the device is lost"]


def test_parts_share_the_time_and_go_without_modules() -> None:
    left: dict[str, float] = {}

    def part(name: str) -> Any:
        def run(report: Report, deadline: Deadline, progress: Any) -> None:
            left[name] = deadline.left
            if name == "engine":
                raise ModuleNotFoundError("No module named 'flax'")

        return run

    report = Report()
    run_parts(report, PARTS, 1000.0, {name: part(name) for name in PARTS})
    assert left == pytest.approx({"correctness": 400, "engine": 600, "timings": 1000}, abs=20)
    assert report.not_run == ["engine: everything: No module named 'flax'"] and not report.failures
    run_parts(report, ["engine"], 0.0, {})
    assert report.not_run[-1] == "engine: everything: out of time" and report.exit_code == 4


# --- correctness


def test_kernels_against_the_dense_reference() -> None:
    """In the interpreter; one that can't serve its call is a failure, and the rest goes on."""
    prefill = Variant("prefill", 64, kv_heads=1, window=Window(30), sink_logits=True, soft_cap=5.0)
    checks = [Check(SMALL), Check(Variant("decode", 96)), Check(prefill, implementation="xla")]
    report = Report()
    with interpreted():
        check_kernels(report, forever(), checks, SIZES)
    reference, kernel, refused, xla = report.parts["correctness"]
    assert reference["error"] < 1e-5
    assert kernel["error"] < 5e-3 and kernel["different"] == 0 and "wrong" not in kernel
    assert "head_dim must be one of" in refused["wrong"]
    assert xla["error"] < 8e-3


OPTIONS = [
    Variant("decode", 64, page_dtype="float32", window=Window(32, sinks=5, granularity=16), soft_cap=2.0),
    Variant("prefill", 64, page_dtype="float32", window=Window(32, sinks=5, granularity=16), sink_logits=True),
    Variant("tree", 64, page_dtype="float32", query_len=6, window=Window(5), group=7),
    Variant("latent", 576, page_dtype="float32", kv_heads=1, query_len=6),
    Variant("decode", 64, page_dtype="int8", dtype="float32"),
]


@pytest.mark.parametrize("variant", OPTIONS, ids=lambda v: v.name)
def test_the_reference_knows_the_options(variant: Variant) -> None:
    """Beside the XLA path, which tests/pallas_kernels holds to loops in NumPy."""
    rows = SIZES.rows(variant)
    inputs = random_inputs(variant, rows, random_key(3))
    got = attend(variant, inputs, implementation="xla")
    assert float(relative_error(got, dense_attention(variant, inputs, rows))) < 1e-5
    if variant.window_sinks:  # the other query counts
        swapped = dataclasses.replace(inputs, sink_query=inputs.query)
        assert float(relative_error(got, dense_attention(variant, swapped, rows))) > 0.1


def test_what_is_off_or_changes_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(variant: Variant, inputs: Any, **_: Any) -> jax.Array:
        return jnp.zeros_like(inputs.query).at[0, 0, 0, 0].set(jnp.nan)

    monkeypatch.setattr(device_kernels, "attend", off)
    monkeypatch.setattr(device_kernels, "reference_error", lambda: 1.0)
    report = Report()
    check_kernels(report, forever(), [Check(SMALL)], SIZES)
    wrong = [entry["wrong"] for entry in report.parts["correctness"]]
    assert wrong == ["off by 1.0e+00, 1e-05 at most", "off by nan, 5e-03 at most"]
    outs = iter([jnp.zeros(4), -jnp.zeros(4), jnp.zeros(4), jnp.ones(4)])
    inputs: Any = None
    assert count_different(lambda _: next(outs), inputs, jnp.zeros(4), 4, Load(8)) == 2


def test_what_there_is_no_time_for_is_named() -> None:
    report, checks = Report(), all_checks()
    late = Deadline(time.monotonic() - 1)
    assert len({check.name for check in checks}) == len(checks) > 290
    check_kernels(report, late, [Check(SMALL, implementation="xla")] * 2, SIZES)
    assert report.not_run == [f"correctness: 2 of 2 kernels, from “{SMALL.name}, XLA” on: out of time"]
    assert report.record()["left_out"] == [f"correctness: {SMALL.name}, XLA"] * 2


# --- timings


def test_rates() -> None:
    llama = workloads()[0]
    assert llama.name == "decode, 64 × 4096 keys"
    got = rates(llama, 300e-6, Ceilings(copy=4e12, read=4e12, matmul=8e14))
    assert got["us"] == pytest.approx(300) and got["gb_s"] == pytest.approx(3583, rel=1e-3)
    assert got["of_copy"] == pytest.approx(0.896, abs=1e-3) and got["of_matmul"] == pytest.approx(0.0179, abs=1e-3)
    assert len({w.name for w in workloads()}) == len(workloads())


def test_work_is_that_of_the_roofline() -> None:
    """Two derivations of the same formulas; a tree's own tokens count as a chain's."""
    config = ModelConfig(128, 64, 64, 1, num_heads=32, num_kv_heads=8, head_dim=128, max_position=8192)
    for workload in workloads():
        v, rows = workload.variant, workload.rows
        if v.op == "latent":
            want = roofline.latent_attention(v.heads, len(rows.contexts), rows.contexts[0])
        else:
            config = dataclasses.replace(config, head_dim=v.head_dim)
            widths = {"kv_bytes": 1, "scale_bytes": 4} if v.quantized else {}
            want = roofline.attention(config, len(rows.contexts), v.query_len, rows.contexts[0], **widths)
        got = Work.of(v, rows)
        assert (got.bytes, got.flops) == (want.bytes, want.flops), workload.name


def test_a_loop_goes_through_other_pages() -> None:
    workload = Workload("x", SMALL, Rows((60, 9))).with_copies(TIMINGS.pool)
    assert workload.rows.copies == 2  # of 2 rows of 4 pages, keys and values of 2 KiB each
    inputs, seen = random_inputs(workload.variant, workload.rows, random_key(0)), []

    def call(inputs: Any) -> jax.Array:
        jax.debug.callback(lambda first: seen.append(int(first)), inputs.page_table[0, 0])
        return inputs.page_table

    assert time_turns(call, inputs, workload, TIMINGS, guess=True) > 0
    jax.effects_barrier()
    first = int(inputs.page_table[0, 0])
    assert seen == [first, first + 8] * (1 + TIMINGS.repeats)


def test_timings_of_xla_and_of_what_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specax.decoding.gpu.device_timings.workloads", lambda sizes: workloads(sizes)[:1])
    report = Report()
    ceilings = time_kernels(report, forever(), TIMINGS, implementations=("triton", "xla", "mosaic_gpu"))
    entries = {e["name"].rpartition(", ")[2]: e for e in report.parts["timings"]}
    assert ceilings is not None and entries["ceilings"]["copy_gb_s"] > 0 and entries["an empty turn"]["us"] > 0
    assert entries["xla"]["us"] > 0 and entries["triton"]["note"].startswith("does not run")
    assert "needs a Hopper GPU" in entries["mosaic_gpu"]["wrong"] and len(report.failures) == 1


def test_tables() -> None:
    timings: list[dict[str, Any]] = [
        {"name": "ceilings", "copy_gb_s": 4300.0, "read_gb_s": 4500.0, "matmul_tflop_s": 790.0},
        {"workload": "w", "implementation": "mosaic_gpu", "us": 300.04, "gb_s": 3583.2, "of_copy": 0.896,
         "tflop_s": 14.3, "of_matmul": 0.018},
        {"workload": "w", "implementation": "xla", "us": 9000.0},
        {"workload": "w", "implementation": "triton", "note": "does not run"},
    ]  # fmt: skip
    assert timing_rows(timings) == [["w", "300.0", "3583", "90%", "14", "2%", "9000.0", "–"]]
    checks: list[dict[str, Any]] = [
        {"name": "decode, d64", "error": 1e-3, "different": 0},
        {"name": "decode, d128", "error": 2e-2, "different": 3, "wrong": "x"},
        {"name": "decode, d128, XLA", "error": 4e-3, "different": 0},
    ]
    assert summary(checks) == [["decode", "2", "2.0e-02", "1", "1"], ["decode, XLA", "1", "4.0e-03", "0", "0"]]
    report = Report()
    report.parts = {"correctness": checks, "timings": timings}
    report.skip("engine", "everything", "no flax")
    lines = markdown(report).splitlines()
    assert "| w | 300.0 | 3583 | 90% | 14 | 2% | 9000.0 | – |" in lines
    assert lines[-2:] == ["- wrong: correctness: decode, d128: x", "- not run: engine: everything: no flax"]


@pytest.mark.slow
def test_engine_part() -> None:

    from specax.decoding.gpu.device_engine import NARROW, EngineSizes, check_engine, compare_steps, time_step

    tiny = dataclasses.replace(
        NARROW, num_layers=1, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=128
    )
    sizes = EngineSizes(models=(tiny,), prompts=(70, 9), chunk=8, tree=5, max_tokens=40, requests=6)
    report = Report()
    check_engine(report, forever(), sizes, kernels="xla")
    time_step(report, None, "xla", tiny, rows=2, context=40, calls=2)
    with interpreted():
        compare_steps(report, tiny, sizes, "mosaic_gpu")
    steps, requests, again = report.parts["engine"]
    assert not report.failures and requests["preemptions"] and report.parts["timings"][0]["us"] > 0
    assert steps["decode"]["error"] == steps["decode"]["error_xla"] != again["decode"]["error"]
