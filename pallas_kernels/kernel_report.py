"""Reads what the compiler says of Mosaic GPU kernels: ptxas' report, the PTX, the launch, the compiled HLO.

Plain text in, plain numbers out. `deviceless.py` provides the texts.
"""

import dataclasses
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable

COLLECTIVES = (
    "all-reduce", "all-gather", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One compiled kernel. Registers are per thread, memory is in bytes: spills and stack per thread, shared per block.

    Instruction counts are of the PTX text: a loop's body counts once.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared_memory: int
    threads: int  # of a block
    wgmma: int  # wgmma.mma_async: products of a whole warp group
    bulk_copies: int  # cp.async.bulk, with or without a tensor map: copies by the TMA unit
    mma: int  # mma.sync: products of one warp, a sign that wgmma was not used
    plain_loads: int = 0  # those bulk copies into shared memory that need no tensor map, nor 128-byte alignment
    notes: tuple[str, ...] = ()  # ptxas' warnings and remarks, such as that it had to serialise wgmma


def read_kernel(name: str, ptx: str, ptxas: str, passes: Iterable[str]) -> KernelReport:
    """The report of one kernel.

    Args:
      ptx: the module, with one entry function.
      ptxas: what `ptxas -v` printed for it. Stack and spills of functions that were not inlined count, too.
      passes: lines of the MLIR pass log, up to the kernel's launch at least.

    Raises:
      ValueError: a text does not have the expected form (another version of the compiler?).
    """
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    registers = re.findall(r"Used (\d+) registers", ptxas)
    block = re.search(r"^\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", ptx, re.MULTILINE)
    if not frames or not registers:
        raise ValueError(f"ptxas' report of {name} names no registers or no spills:\n{ptxas}")
    if block is None:
        raise ValueError(f"the PTX of {name} has no .maxntid, which gives the threads of a block")
    stack, stores, loads = ([int(frame[i]) for frame in frames] for i in range(3))
    # Mosaic declares one byte of static shared memory, which only marks where the dynamic one begins.
    static = max((int(n) for n in re.findall(r"(\d+) bytes smem", ptxas)), default=0)
    return KernelReport(
        name=name,
        registers=max(map(int, registers)),
        spill_stores=sum(stores),
        spill_loads=sum(loads),
        stack=max(stack),
        shared_memory=launch_shared_memory(passes) + (static if static > 1 else 0),
        threads=math.prod(int(n) for n in block.groups() if n is not None),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        bulk_copies=len(re.findall(r"\bcp(?:\.reduce)?\.async\.bulk\.(?:tensor|shared|global)", ptx)),
        mma=len(re.findall(r"(?<!\.)\bmma\.sync\b", ptx)),
        plain_loads=len(re.findall(r"\bcp\.async\.bulk\.shared(?:::\w+)?\.global", ptx)),
        notes=_notes(ptxas),
    )


def launch_shared_memory(passes: Iterable[str]) -> int:
    """Dynamic shared memory of the first launch in an MLIR pass log, in bytes.

    ptxas can't know it: it is a parameter of the launch, there an SSA value that a constant defines.

    Raises:
      ValueError: no launch, or its shared memory is not a constant.
    """
    constants: dict[str, int] = {}
    for line in passes:
        if "func.func " in line or "gpu.func " in line:
            constants.clear()  # values have names of their own in every function
        elif found := re.match(r"\s*(%[\w#$.-]+) = (?:arith|llvm\.mlir)\.constant[ (](\d+) :", line):
            constants[found[1]] = int(found[2])
        elif "gpu.launch_func" in line:
            size = re.search(r"dynamic_shared_memory_size (%[\w#$.-]+)", line)
            if size is None:
                return 0
            if size[1] not in constants:
                raise ValueError(f"the launch's shared memory is no constant: {line.strip()[:200]}")
            return constants[size[1]]
    raise ValueError("the MLIR pass log has no gpu.launch_func")


def _notes(ptxas: str) -> tuple[str, ...]:
    lines = (line.strip() for line in ptxas.splitlines())
    notes = [line for line in lines if re.search(r"\(C\d+\)|\bwarning\b|Potential Performance Loss", line)]
    return tuple(dict.fromkeys(notes))


def count_collectives(hlo: str) -> dict[str, int]:
    """Collective operations of a compiled module; those in a loop's body count once."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)
    return dict(sorted(Counter(found).items()))


def kernel_calls(hlo: str) -> list[tuple[str, str]]:
    """Digest and name of the Mosaic kernel of every call in a compiled module; a call in a loop's body counts once.

    Calls with the same digest are calls of one kernel, that was compiled once.
    """
    calls = []
    for line in hlo.splitlines():
        if 'custom_call_target="mosaic_gpu' in line and (module := re.search(r'\bmodule = "((?:[^"\\]|\\.)*)"', line)):
            # In the string table of the MLIR bytecode; `stable_mosaic_gpu` is a dialect there.
            names = re.findall(r"\\00([A-Za-z_]\w*)_mosaic_gpu(?=\\00)", module[1])
            named = [name for name in names if name != "stable"] or names or ["?"]
            calls.append((hashlib.sha256(module[1].encode()).hexdigest(), named[-1]))
    return calls
