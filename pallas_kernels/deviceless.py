"""Compiles for NVIDIA H200 GPUs on a machine that has none, and reports what the compilers made of it.

The CUDA plugin contains the whole of XLA's GPU compiler, ptxas comes in a package of its own, and what they must
know of the GPU is in `h200.textproto` (XLA's `GpuTargetConfigProto`). So kernels and whole steps go through the real
compilers; only nothing runs.

    report = compile_for_h200(f, jax.ShapeDtypeStruct((64, 128), jnp.bfloat16))
    report.temp_bytes, report.kernels[0].registers

Mosaic GPU's dumps are read for this: it looks at `MOSAIC_GPU_DUMP_TO` whenever it compiles, so each compilation
gets a folder of its own. A kernel that it has compiled before in the same process is dumped no more; reports are
kept for that reason, by the digest of the kernel. JAX's persistent cache is out of use meanwhile, since programs
that come from it are not compiled at all.
"""

import contextlib
import dataclasses
import functools
import importlib.resources
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specax.pallas_kernels.block_sizes import H200_CORES
from specax.pallas_kernels.kernel_report import KernelReport, count_collectives, kernel_calls, read_kernel

_lock = threading.Lock()  # environment, standard error and JAX's cache are the process's
_reports: dict[str, tuple[KernelReport, ...]] = {}  # by the digest of the kernel


class DevicelessError(RuntimeError):
    """Something can't be compiled for an H200 here; the message has the compiler's own words."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program. Bytes are those of one device."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that reuse a donated argument's memory
    temp_bytes: int
    collectives: dict[str, int]  # how many of each kind; those in a loop count once
    kernels: tuple[KernelReport, ...]  # the distinct Mosaic kernels, without copies that only differ in constants
    kernel_calls: int  # calls of Mosaic kernels, and
    distinct_kernels: int  # how many kernels they call, copies included: each of them was compiled
    seconds: float  # of tracing and compiling


@functools.cache
def topology(devices: int = 1) -> tuple[jax.Device, ...]:
    """So many H200s of one node, to put meshes and shapes on.

    Raises:
      DevicelessError: the CUDA plugin is not installed, or does not fit JAX.
    """
    # The plugin wants to see CUDA's run-time libraries when it registers; a compiler needs none of them.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    target = importlib.resources.files("specax.pallas_kernels").joinpath("h200.textproto").read_text(encoding="utf-8")
    shape = f"1x1x{devices}"  # partitions, hosts of each, GPUs of each
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=shape, topology=shape, target_config=target
        )
    except (RuntimeError, ValueError) as error:  # NotImplementedError (a RuntimeError) without a plugin
        raise DevicelessError(
            f"compiling for an H200 needs JAX's CUDA plugin of JAX's own version ({jax.__version__}) and ptxas: "
            f"pip install 'specax[gpu-check]' ({error})"
        ) from error
    return tuple(found.devices)


def device_mesh(devices: int = 1) -> Mesh:
    """A mesh over H200s with one axis, "x"."""
    return Mesh(np.asarray(topology(devices), dtype=object), ("x",), axis_types=(AxisType.Auto,))


def on_device(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """While it is entered, Pallas traces and lowers for the mesh's devices, not for this machine's.

    `jax.sharding.get_abstract_mesh().abstract_device` names them, with `device_kind` and `platform` ("gpu").
    """
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_h200() -> contextlib.AbstractContextManager[Any]:
    """The same for one H200, without the CUDA plugin: for tracing, not for compiling."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=H200_CORES, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    )


def compile_for_h200(
    fn: Callable[..., Any], *specs: Any, donate_argnums: int | Sequence[int] = (), mesh: Mesh | None = None
) -> Report:
    """Compiles `fn(*specs)` and reports.

    Args:
      fn: a function, jitted or not.
      specs: trees of arrays or `jax.ShapeDtypeStruct`s. Those without a sharding (and arrays of this machine) are
        whole on every device.
      donate_argnums: as for `jax.jit`; in addition to what a jitted `fn` says itself.
      mesh: of devices of `topology`; None: one H200.

    Raises:
      DevicelessError: no plugin; XLA, Mosaic or ptxas refused (with what they said); a kernel was compiled before
        in this process by other means, so that its report is lost.
    """
    mesh = device_mesh() if mesh is None else mesh
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole if sharding is None else sharding)

    jitted = fn if hasattr(fn, "trace") and not donate_argnums else jax.jit(fn, donate_argnums=donate_argnums)
    name = getattr(fn, "__name__", type(fn).__name__)
    start = time.monotonic()
    with _lock, tempfile.TemporaryDirectory(prefix="mosaic-") as folder, _dumping(folder), _without_cache():
        with on_device(mesh):
            lowered = jitted.trace(*jax.tree.map(placed, specs)).lower()
            try:
                with _without_known_complaints():
                    compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                raise DevicelessError(f"{name} does not compile for an H200:\n{error}") from error
        hlo = compiled.as_text() or ""
        calls = kernel_calls(hlo)
        kernels = _kernels(name, dict(calls), pathlib.Path(folder))
    memory = compiled.memory_analysis()
    if memory is None:
        raise DevicelessError(f"{name}: this version of JAX ({jax.__version__}) gives no memory analysis")
    return Report(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        collectives=count_collectives(hlo),
        kernels=kernels,
        kernel_calls=len(calls),
        distinct_kernels=len(dict(calls)),
        seconds=time.monotonic() - start,
    )


def _kernels(program: str, called: dict[str, str], folder: pathlib.Path) -> tuple[KernelReport, ...]:
    """Reports of the kernels `called`, {digest: name}, from this compilation's dumps or from earlier ones."""
    fresh: dict[str, list[KernelReport]] = {}
    for ptx in sorted(folder.glob("*.ptx")):
        name = ptx.stem.rpartition("_")[0]  # the rest is a serial number
        try:
            with ptx.with_suffix(".mlir-passes.log").open(encoding="utf-8", errors="replace") as passes:
                ptxas = ptx.with_suffix(".ptxas").read_text(encoding="utf-8")
                report = read_kernel(name, ptx.read_text(encoding="utf-8"), ptxas, passes)
        except (OSError, ValueError) as error:
            raise DevicelessError(
                f"{program}: can't read Mosaic's dump of kernel {name} (jax {jax.__version__}): {error}"
            ) from error
        fresh.setdefault(name, []).append(report)
    found: dict[KernelReport, None] = {}  # in the order of the program
    for digest, name in called.items():
        if digest not in _reports:
            # Of several new kernels of the same name (a kernel for each layer, say) nothing tells which dump is whose:
            # each is taken to be all of them, so that another program with only one of them may show too much.
            if name not in fresh:
                raise DevicelessError(
                    f"{program}: no report of kernel {name}; it was compiled earlier in this process, "
                    "and not by compile_for_h200"
                )
            _reports[digest] = tuple(dict.fromkeys(fresh[name]))
        found |= dict.fromkeys(_reports[digest])
    return tuple(found)


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder  # every kind of dump; without it they'd go to standard output
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        else:
            os.environ["MOSAIC_GPU_DUMP_TO"] = before


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """JAX decides once whether it uses its persistent cache, so it is made to decide anew before and after."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _without_known_complaints() -> Iterator[None]:
    """Holds standard error back, and drops from it what is always said here and does not matter.

    That there is no nvdisasm (it is in none of the packages), and that XLA sorts by its own kernels where it would
    call CUB's on a GPU.
    """
    known_complaints = ("nvdisasm invocation failed", "Missing deviceless CUB scratch size data")
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            text = held.read().decode(errors="replace")
            for block in text.split("\n\n"):
                if block.strip() and not any(known in block for known in known_complaints):
                    print(block, file=sys.stderr)
