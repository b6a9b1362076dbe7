"""Reports of a compilation without a GPU, read from texts that the compilers wrote (jax 0.12.0.1, ptxas 12.9.86).

Compiling itself needs packages that are not here in the ordinary run; `make gpu-check` does it.
"""

import dataclasses
import pathlib

import pytest
from jax.experimental import topologies

from specax.pallas_kernels import deviceless
from specax.pallas_kernels.kernel_report import (
    KernelReport,
    count_collectives,
    kernel_calls,
    launch_shared_memory,
    read_kernel,
)

# A tree attention kernel with heads of 256, which has too much to hold.
SPILLING = """\
ptxas warning : Registers are spilled to local memory in function 'tree_mosaic_gpu_kernel', 808 bytes spill stores, 612 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tree_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for tree_mosaic_gpu_kernel
    360 bytes stack frame, 808 bytes spill stores, 612 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 360 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compile time = 177.646 ms
"""  # noqa: E501

PTX = """\
.version 9.0
.target sm_90a
.visible .entry tree_mosaic_gpu_kernel(
	.param .align 64 .b8 tree_mosaic_gpu_kernel_param_5[512]
)
.maxntid 384, 1, 1
.minnctapersm 1
{
	.shared .align 16 .b8 __dynamic_shmem__0;
	@%p1 prefetch.tensormap [%rd1];
	@%p9 cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r3,%r4,%r5,%r6}], [%r7];
	@%p9 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%rd3], [%rd4], %r8, [%r9];
	cp.async.bulk.commit_group;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 { %f1, %f2}, %rd3, %rd4, p, 1, 1, 0, 1;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 { %f1, %f2}, %rd5, %rd6, p, 1, 1, 0, 1;
	wgmma.commit_group.sync.aligned;
	@%p8 cp.async.bulk.global.shared::cta.bulk_group [%rd7], [%r8], 512;
	cp.async.bulk.wait_group.read 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f2};
	ret;
}
"""  # noqa: E501

# The first dump with a launch_func; the kernel beside it has values of the same names.
PASSES = """\
// -----// IR Dump Before ResolveTrivialLocationsPass: mosaic-gpu-resolve-trivial-locations //----- //
  func.func @tree_mosaic_gpu(%arg0: !llvm.ptr, %arg1: !llvm.ptr) attributes {llvm.emit_c_interface} {
    %0 = arith.constant 7 : i32 loc(#loc1)
    %56 = gpu.launch async [%3] blocks(%a, %b, %c) in (%d = %c1, %e = %c1, %f = %c1) dynamic_shared_memory_size %0 {
// -----// IR Dump Before ConvertToLLVM //----- //
  gpu.module @tree_mosaic_gpu_kernel {
    gpu.func @tree_mosaic_gpu_kernel(%arg0: !llvm.ptr) kernel {
      %c216144_i32 = arith.constant 5 : i32
  func.func @tree_mosaic_gpu(%arg0: !llvm.ptr, %arg1: !llvm.ptr) attributes {llvm.emit_c_interface} {
    %c384 = arith.constant 384 : index
    %c216144_i32 = arith.constant 216144 : i32 loc(#loc)
    %241 = gpu.launch_func async [%10] @tree::@tree blocks in (%c1, %c8, %c64) threads in (%c384, %c1, %c1)  dynamic_shared_memory_size %c216144_i32 args(%87 : !llvm.ptr) loc(#loc1)
    %c216144_i32 = arith.constant 9 : i32
"""  # noqa: E501

TREE = KernelReport(
    name="tree", registers=168, spill_stores=808, spill_loads=612, stack=360, shared_memory=216144, threads=384,
    wgmma=2, bulk_copies=3, mma=1, plain_loads=1, notes=(SPILLING.splitlines()[0],),
)  # fmt: skip

# Two kernels of the same name, one of them called twice; modules are MLIR bytecode, cut short.
HLO = r"""
  %a.1 = f32[64,128]{1,0} custom-call(%x, %y), custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI, backend_config={kernel_hash = "\08\C1", module = "ML\EFR\01MLIR\00\22stable_mosaic_gpu\00stable_mosaic_gpu.version\00tree\00mpmd_map\00tree_mosaic_gpu\00a\0A", use_custom_barrier = false}
  %a.2 = f32[64,128]{1,0} custom-call(%y, %x), custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI, backend_config={kernel_hash = "\08\C1", module = "ML\EFR\01MLIR\00\22stable_mosaic_gpu\00stable_mosaic_gpu.version\00tree\00mpmd_map\00tree_mosaic_gpu\00a\0A", use_custom_barrier = false}
  %a.3 = f32[64,128]{1,0} custom-call(%y, %x), custom_call_target="mosaic_gpu_v2", api_version=API_VERSION_TYPED_FFI, backend_config={kernel_hash = "\09\C1", module = "ML\EFR\01MLIR\00\\stable_mosaic_gpu\00stable_mosaic_gpu.version\00tree\00mpmd_map\00tree_mosaic_gpu\00b\0A", use_custom_barrier = false}
  %b.1 = f32[8,8]{1,0} custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"module":"tree_mosaic_gpu"}
"""  # noqa: E501


def test_a_kernel() -> None:
    assert read_kernel("tree", PTX, SPILLING, PASSES.splitlines()) == TREE


def test_functions_that_were_not_inlined_count() -> None:
    called = "ptxas info    : Function properties for __internal_trig_reduction_slowpathd\n"
    called += "    400 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
    report = read_kernel("tree", PTX, SPILLING + called, PASSES.splitlines())
    assert report == dataclasses.replace(TREE, stack=400, spill_stores=816, spill_loads=616)


def test_static_shared_memory_adds_up() -> None:
    report = read_kernel("tree", PTX, SPILLING.replace("1 bytes smem", "1024 bytes smem"), PASSES.splitlines())
    assert report.shared_memory == 216144 + 1024


def test_a_remark_is_kept() -> None:
    remark = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    assert remark in read_kernel("tree", PTX, f"{SPILLING}{remark}\n{remark}\n", PASSES.splitlines()).notes


@pytest.mark.parametrize(
    ("ptx", "ptxas", "passes", "message"),
    [
        (PTX, "", PASSES, "no registers or no spills"),
        (PTX.replace(".maxntid", ".reqntid"), SPILLING, PASSES, r"no \.maxntid"),
        (PTX, SPILLING, "", r"no gpu\.launch_func"),
        (PTX, SPILLING, "gpu.launch_func x dynamic_shared_memory_size %3 args()", "no constant"),
    ],
)
def test_a_text_of_another_form(ptx: str, ptxas: str, passes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_kernel("tree", ptx, ptxas, passes.splitlines())


def test_a_launch_without_dynamic_shared_memory() -> None:
    assert launch_shared_memory(["  %1 = gpu.launch_func async [%0] @a::@a blocks in (%c1) args()"]) == 0


def test_collectives() -> None:
    hlo = """
  %all-reduce.1 = bf16[64,4096]{1,0} all-reduce(%fusion.1), channel_id=1, to_apply=%add
  %all-reduce-start.2 = bf16[64,4096]{1,0} all-reduce-start(%fusion.2), channel_id=2
  %all-reduce-done.2 = bf16[64,4096]{1,0} all-reduce-done(%all-reduce-start.2)
  %fusion.3 = bf16[64,4096]{1,0} fusion(%all-reduce.1), kind=kLoop, calls=%fused_all-reduce, metadata={op_name="psum"}
  ROOT %all-gather.4 = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}
"""
    assert count_collectives(hlo) == {"all-gather": 1, "all-reduce": 2}
    assert count_collectives("") == {}


def test_kernel_calls() -> None:
    calls = kernel_calls(HLO)
    assert [name for _, name in calls] == ["tree"] * 3
    assert calls[0] == calls[1] != calls[2]  # the first two call one kernel


def dump(folder: pathlib.Path, serial: int, ptxas: str = SPILLING) -> None:
    """As Mosaic leaves it."""
    (folder / f"tree_{serial}.ptx").write_text(PTX)
    (folder / f"tree_{serial}.ptxas").write_text(ptxas)
    (folder / f"tree_{serial}.mlir-passes.log").write_text(PASSES)


def test_kernels_that_were_compiled_before(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "_reports", {})
    both = dict(kernel_calls(HLO))
    one, other = ({digest: name} for digest, name in both.items())
    first, second, third = (tmp_path / name for name in "abc")
    for folder in (first, second, third):
        folder.mkdir()
    dump(first, 0)
    assert deviceless._kernels("f", one, first) == (TREE,)
    assert deviceless._kernels("f", one, second) == (TREE,)  # Mosaic compiles nothing, and dumps nothing
    with pytest.raises(deviceless.DevicelessError, match="no report of kernel tree"):
        deviceless._kernels("f", both, second)
    dump(second, 1, SPILLING.replace("Used 168", "Used 90"))
    smaller = dataclasses.replace(TREE, registers=90)
    assert deviceless._kernels("f", both, second) == (TREE, smaller)
    assert deviceless._kernels("f", other, third) == (smaller,)


def test_an_unreadable_dump_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "_reports", {})
    dump(tmp_path, 0, ptxas="")
    with pytest.raises(deviceless.DevicelessError, match=r"dump of kernel tree.*no registers"):
        deviceless._kernels("f", dict(kernel_calls(HLO)), tmp_path)


def test_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(**_: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", absent)
    deviceless.topology.cache_clear()
    with pytest.raises(deviceless.DevicelessError, match=r"pip install 'specax\[gpu-check\]'"):
        deviceless.topology()


def test_the_target_is_an_h200() -> None:
    text = (pathlib.Path(deviceless.__file__).parent / "h200.textproto").read_text()
    assert '"NVIDIA H200"' in text and "core_count: 132" in text and "major: 9" in text
