"""specax-tune-kernels where there is no GPU: what it makes of times, and its candidates in the interpreter."""

import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import pytest

from specax.decoding import cli
from specax.decoding.errors import InvalidRequestError
from specax.decoding.gpu import tuning
from specax.decoding.gpu.device_report import Deadline, DeviceLost
from specax.decoding.gpu.device_timings import TimingSizes
from specax.decoding.gpu.tuning import Geometry, geometries, read_table, tune, tune_or_name, update_table
from specax.decoding.gpu.variants import PAGE_DTYPES
from specax.pallas_kernels import BlockSizes, interpreted
from specax.pallas_kernels.block_sizes import SHARED_MEMORY, key, make_plan, shared_memory
from specax.pallas_kernels.dispatch import HEAD_DIMS, PAGE_SIZES

SIZES = TimingSizes(rows=2, context=64, long=130, prefill=40, tree=16, kv_heads=1, pool=1)
COMMON = Geometry("keys", 64, 16, "bfloat16")
FOREVER = Deadline(math.inf)


def fake_timer(us: dict[BlockSizes, dict[str, float]]) -> Any:
    """So many microseconds for a candidate's workloads; 100 for others."""
    return lambda workload, inputs, blocks: 1e-6 * us.get(blocks, {}).get(workload.name, 100.0)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[BlockSizes, float]:
    """Kernels that give ones, or what the dictionary says for a candidate."""
    values: dict[BlockSizes, float] = {}

    def run(workload: Any, inputs: Any, blocks: BlockSizes) -> Any:
        if (value := values.get(blocks, 1.0)) == math.inf:
            raise ValueError("shared memory: 300000 bytes")
        return jnp.full((2, 4), value)

    monkeypatch.setattr(tuning, "_run", run)
    return values


def test_the_best_on_average_wins(outputs: dict[BlockSizes, float], tmp_path: pathlib.Path) -> None:
    good, uneven, wrong, large = (BlockSizes(64, stages) for stages in (2, 3, 5, 6))
    outputs |= {wrong: 1.1, large: math.inf}
    us = {
        good: {"decode": 80.0, "one row": 90.0},
        uneven: {"decode": 60.0, "one row": 200.0},
        wrong: dict.fromkeys(("decode", "one row", "trees"), 1.0),
    }
    result = tune(COMMON, fake_timer(us), FOREVER, SIZES, [uneven, good, wrong, large])
    assert result is not None and result.best == good and result.tried == 4
    assert result.best_us == pytest.approx({"decode": 80, "one row": 90, "trees": 100})
    assert result.gain == pytest.approx((0.8 * 0.9) ** (-1 / 3))
    assert [why.partition(":")[0] for why in result.refused.values()] == ["ValueError"] * 2
    assert "differs by 1.0e-01" in next(iter(result.refused.values()))
    path = tmp_path / "tuned.json"
    path.write_text('{"other": {"keys": 64}}')
    update_table(path, result)
    assert result.key == "cpu/keys/64/16/bfloat16"
    assert json.loads(path.read_text()) == {
        "other": {"keys": 64},
        result.key: {"keys": 64, "stages": 2, "warpgroups": 1, "value_parts": 1},
    }


def test_noise_does_not_win(outputs: dict[BlockSizes, float], tmp_path: pathlib.Path) -> None:
    other = BlockSizes(64, 3)
    result = tune(COMMON, fake_timer({other: {"decode": 98.0}}), FOREVER, SIZES, [other])
    assert result is not None and result.best == result.default != other and result.gain == 1
    update_table(tmp_path / "new.json", result)
    assert json.loads((tmp_path / "new.json").read_text()) == {}


def test_what_is_hopeless_or_late_is_not_tried_on_everything(outputs: dict[BlockSizes, float]) -> None:
    slow, timed = BlockSizes(64, 3), []

    def timer(workload: Any, inputs: Any, blocks: BlockSizes) -> float:
        timed.append((workload.name, blocks))
        return 1.0 if blocks == slow else 0.1

    tune(COMMON, timer, FOREVER, SIZES, [slow])
    assert [name for name, blocks in timed if blocks == slow] == ["decode"]
    late = tune(COMMON, timer, Deadline(0.0, clock=lambda: 1.0), SIZES, [slow])
    assert late is not None and late.tried == 0


def test_candidates_fit_every_workload() -> None:
    """What one workload's plan takes, those of the others do; the table's key is the one that kernels ask for."""
    chosen = geometries(["keys", "queries"], HEAD_DIMS, PAGE_SIZES, PAGE_DTYPES)
    assert len(chosen) == len(set(chosen)) == 2 * 3 * 5 * 4
    assert chosen[0] == Geometry("keys", 128, 16, "bfloat16")
    for geometry in chosen:
        served = geometry.workloads(TimingSizes())
        assert served, geometry
        candidates = list(geometry.candidates(served))
        assert len(candidates) == len(set(candidates)) > 2
        for workload in served:
            shapes = tuning._shapes(workload)
            want = f"H200/{geometry.body}/{geometry.head_dim}/{geometry.page_size}/{geometry.page_dtype}"
            assert key("H200", make_plan(shapes, "", None).body, shapes) == want
            for blocks in candidates:
                plan = make_plan(shapes, "", None, blocks)
                assert shared_memory(plan.body, plan.queries, shapes, plan.blocks) <= SHARED_MEMORY
        splits = {make_plan(tuning._shapes(w), "", None).splits > 1 for w in served}
        assert splits == {False, True}


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"])
def test_a_broken_table_is_named(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequestError, match=r"--output: .*tuned\.json"):
        read_table(path)


def test_a_default_that_fails_is_named_and_a_lost_device_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("illegal\naddress")

    def lost() -> None:
        raise DeviceLost("the device is lost")

    failed: dict[str, str] = {}
    timer = fake_timer({})
    monkeypatch.setattr(tuning, "tune", fails)
    assert tune_or_name(COMMON, timer, FOREVER, SIZES, failed) is None  # the CPU still adds
    assert failed == {str(COMMON): "RuntimeError: illegal address"}
    monkeypatch.setattr(tuning, "check_alive", lost)
    with pytest.raises(DeviceLost):
        tune_or_name(COMMON, timer, FOREVER, SIZES, failed)


def test_output_files_are_probed(tmp_path: pathlib.Path) -> None:
    assert cli.output_path("json", None) is None
    assert cli.output_path("json", str(tmp_path / "new.json")) == tmp_path / "new.json"
    for bad, why in ((tmp_path, "it is a directory"), (tmp_path / "no" / "x.json", "there is no directory")):
        with pytest.raises(InvalidRequestError, match=rf"--json: can't write .*: {why}"):
            cli.output_path("json", str(bad))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """Another number of stages gives the same output; the real path from candidate to kernel."""
    with interpreted():
        result = tune(COMMON, fake_timer({BlockSizes(64, 2): {"decode": 50.0}}), FOREVER, SIZES, [BlockSizes(64, 2)])
    assert result is not None and result.best == BlockSizes(64, 2) and not result.refused
