"""The kernel table of specax-gpu-check: attention ops alone, in every size and option that dispatch serves.

    kernel               keys or queries as the tensor core's rows    packed queries
    decode               keys                                         8: one token, 8 query heads per KV head
    widest, keys as rows keys                                         32; 16 for heads of 256 in 8 bits
    trees of 32          queries, one mask word                       128: 2 warpgroups of 64 (8-bit pages: 1)
    trees of 64          queries, two mask words                      256
    prefill              queries                                      512 tokens of up to 8 ragged rows
    latent               keys                                         16 heads of a latent cache at a time
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specax.pallas_kernels import Window, paged_attention, paged_latent_attention, paged_prefill_attention
from specax.pallas_kernels.block_sizes import Plan
from specax.pallas_kernels.deviceless import Report, compile_for_h200, on_h200
from specax.pallas_kernels.dispatch import plan_call
from specax.pallas_kernels.quantized_kv import is_quantized

ROWS, CONTEXT = 64, 4096  # sequences, and keys of each that its page table has room for
PREFILL_ROWS, PREFILL_TOKENS = 8, 512
LATENT_DIM, LATENT_VALUE_DIM = 576, 512  # DeepSeek-V2 and -V3

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
PAGE_DTYPES = ("bfloat16", "float16", "int8", "float8_e4m3fn")

type Kernel = Literal["decode", "widest, keys as rows", "trees of 32", "trees of 64", "prefill", "latent"]

# Tokens per row, and query heads per KV head.
DECODES: dict[Kernel, tuple[int, int]] = {
    "decode": (1, 8), "widest, keys as rows": (4, 8), "trees of 32": (32, 4), "trees of 64": (64, 4),
}  # fmt: skip
KERNELS: tuple[Kernel, ...] = (*DECODES, "prefill")


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One row of the table. Static and picklable."""

    kernel: Kernel
    head_dim: int = 128
    page_size: int = 16
    page_dtype: str = "bfloat16"
    dtype: str | None = None  # of queries; None: the pages', or bfloat16 beside 8-bit pages
    kv_heads: int = 8
    group: int | None = None  # query heads per KV head; None: as usual for the kernel
    query_len: int | None = None  # tokens per row, likewise
    splits: int | None = 1  # of the context; None: what the plan's rule says
    window: Window | None = None
    soft_cap: float | None = None
    sink_logits: bool = False
    value_dim: int = LATENT_VALUE_DIM  # of a latent cache
    note: str = ""  # what is special

    @property
    def query_dtype(self) -> str:
        return self.dtype or ("bfloat16" if is_quantized(self.page_dtype) else self.page_dtype)

    @property
    def tokens(self) -> int:
        """Per row; of all rows in a prefill."""
        if self.kernel == "prefill":
            return PREFILL_TOKENS
        if self.query_len is not None:
            return self.query_len
        if self.kernel == "widest, keys as rows" and self.head_dim == 256 and is_quantized(self.page_dtype):
            return 2
        return DECODES[self.kernel][0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * (self.group or DECODES.get(self.kernel, (0, 4))[1])

    @property
    def title(self) -> str:
        sizes = (self.kernel, f"head dim {self.head_dim}", f"page {self.page_size}", self.page_dtype)
        return ", ".join(sizes + self.special)

    @property
    def special(self) -> tuple[str, ...]:
        """What sets the case apart from the main part of the table."""
        queries = "float16 queries" if self.dtype == "float16" else ""
        return tuple(text for text in (queries, self.note, "" if self.splits in (1, None) else "splits") if text)

    @property
    def kernel_calls(self) -> int:
        """Of one kernel: a window's sinks are a second part of the softmax."""
        return 2 if self.window is not None and self.window.sinks else 1

    @property
    def scale_copies(self) -> int:
        """Copies of scales in the kernel's loop over blocks of keys: keys' and values' of each page."""
        quantized = is_quantized(self.page_dtype)
        return 2 * max(1, self.plan().blocks.keys // self.page_size) if quantized else 0

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arguments of the op. Pages are those of two layers."""
        rows = PREFILL_ROWS if self.kernel == "prefill" else ROWS
        pages = (2, ROWS * CONTEXT // self.page_size + 1, self.kv_heads, self.page_size, self.head_dim)
        spec = jax.ShapeDtypeStruct
        out = {
            "page_table": spec((rows, CONTEXT // self.page_size), jnp.int32),
            "context_lens": spec((rows,), jnp.int32),
        }
        if self.kernel == "latent":
            out["latent_pages"] = spec(pages, jnp.dtype(self.page_dtype))
        else:
            out |= {name: spec(pages, jnp.dtype(self.page_dtype)) for name in ("k_pages", "v_pages")}
        if self.kernel == "prefill":
            out["query"] = spec((self.tokens, self.heads, self.head_dim), jnp.dtype(self.query_dtype))
            out["query_starts"] = spec((rows + 1,), jnp.int32)
        else:
            out["query"] = spec((rows, self.tokens, self.heads, self.head_dim), jnp.dtype(self.query_dtype))
            if self.tokens > 1:
                out["tree_mask"] = spec((rows, self.tokens, -(-self.tokens // 32)), jnp.uint32)
        if is_quantized(self.page_dtype):
            out |= {name: spec(pages[:-1], jnp.float32) for name in ("k_scales", "v_scales")}
        if self.window is not None and self.window.sinks:
            out["sink_query"] = out["query"]
        if self.sink_logits:
            out["sink_logits"] = spec((self.heads,), jnp.float32)
        return out

    def plan(self) -> Plan:
        """How the op divides its work on an H200."""
        arrays = self.arrays()
        latent, prefill = self.kernel == "latent", self.kernel == "prefill"
        pages = arrays["latent_pages" if latent else "k_pages"]
        value_dim = self.value_dim if latent else self.head_dim
        make = partial(
            plan_call, arrays["query"], pages, arrays["page_table"], value_dim,
            tokens=self.tokens, sequences=1 if prefill else ROWS, latent=latent, merged=self.kernel_calls > 1,
        )  # fmt: skip
        with on_h200():
            plan, _ = make(None)
            if self.splits is not None:
                plan, _ = make(dataclasses.replace(plan.blocks, splits=self.splits))
        return plan

    def call(self, implementation: Literal["xla", "mosaic_gpu"]) -> Callable[[dict[str, jax.Array]], jax.Array]:
        """A function of `arrays`."""
        static: dict[str, Any] = {"layer": 1, "scale": self.head_dim**-0.5, "implementation": implementation}
        if self.window is not None:
            static["window"] = self.window
        if implementation == "mosaic_gpu":
            static["block_sizes"] = self.plan().blocks
        if self.soft_cap is not None:
            static["soft_cap"] = self.soft_cap
        op: Callable[..., jax.Array] = paged_prefill_attention if self.kernel == "prefill" else paged_attention
        if self.kernel == "latent":
            op = partial(paged_latent_attention, value_dim=self.value_dim)
        return lambda arrays: op(**arrays, **static)

    def compile(self) -> Report:
        return compile_for_h200(self.call("mosaic_gpu"), self.arrays())


def kernel_cases(quick: bool = False) -> list[KernelCase]:
    """The table.

    Args:
      quick: of the main part, each kernel × head dim × dtype with one page size only, such that every page size meets
        every kernel, head dim and dtype; of the options, every seventh.
    """
    if quick:
        return [*_covering(), *itertools.islice(_options(), 0, None, 7)]  # (another option of each kernel)
    return [
        *(KernelCase(*sizes) for sizes in itertools.product(KERNELS, HEAD_DIMS, PAGE_SIZES, PAGE_DTYPES)),
        *_options(),
    ]


def _covering() -> Iterator[KernelCase]:
    for kernel, (d, dim), (t, dtype) in itertools.product(KERNELS, enumerate(HEAD_DIMS), enumerate(PAGE_DTYPES)):
        page_size = PAGE_SIZES[(KERNELS.index(kernel) + d + t) % 3]
        yield KernelCase(kernel, dim, page_size, dtype)


def _options() -> Iterator[KernelCase]:
    """What the main part keeps fixed."""
    case = KernelCase  # with heads of 128, pages of 16
    for kernel in KERNELS:
        for head_dim, dtype in itertools.product(HEAD_DIMS, ("bfloat16", "int8")):
            yield case(kernel, head_dim, page_dtype=dtype, splits=4)
        for head_dim in HEAD_DIMS:
            yield case(kernel, head_dim, page_dtype="int8", dtype="float16")
        yield case(kernel, page_dtype="float8_e4m3fn", dtype="float16", page_size=64)
        for page_size in (8, 128):
            yield case(kernel, 128, page_size, note="page size")
            yield case(kernel, 256, page_size, "int8", note="page size")
        yield case(kernel, window=Window(4096), note="window (Mistral 7B)")
        yield case(kernel, window=Window(1024, sinks=16, granularity=16), note="window, sinks (StreamingLLM)")
        yield case(kernel, 256, window=Window(1024, sinks=16, granularity=16), note="window, sinks")
        yield case(kernel, 256, group=2, soft_cap=50.0, window=Window(4096), note="soft cap, window (Gemma 2 9B)")
        yield case(kernel, 64, sink_logits=True, window=Window(128), note="sink logits, window (gpt-oss)")
        yield case(kernel, 64, kv_heads=3, group=3, note="group 3 (SmolLM2 135M)")
        yield case(kernel, kv_heads=32, group=1, note="group 1 (Llama 2 7B)")
        yield case(kernel, kv_heads=4, group=7, note="group 7 (Qwen2.5 7B)")
        for group, name in ((4, "8B"), (8, "70B")):
            yield case(kernel, kv_heads=1, group=group, splits=None, note=f"one of 8 GPUs (Llama 3 {name})")
    for heads, page_size in itertools.product((16, 128), PAGE_SIZES):
        yield _latent(heads, page_size)
    yield _latent(16, splits=4)
    yield _latent(16, query_len=4)
    yield _latent(128, query_len=32)
    for page_size in (8, 128):
        yield _latent(16, page_size)
    yield _latent(16, page_dtype="float16")
    yield _latent(16, window=Window(4096))
    for width, value_dim in ((128, 64), (256, 128), (256, 256)):
        for query_len in (1, 8):
            yield _latent(16, head_dim=width, value_dim=value_dim, query_len=query_len)


def _latent(heads: int, page_size: int = 16, query_len: int = 1, **change: Any) -> KernelCase:
    notes = [f"{heads} heads"]
    if query_len > 1:
        notes.append(f"trees of {query_len}")
    if "value_dim" in change:
        notes.append(f"values of {change['value_dim']}")
    if "window" in change:
        notes.append("window")
    sizes: dict[str, Any] = {"head_dim": LATENT_DIM, "page_size": page_size, "query_len": query_len} | change
    return KernelCase("latent", kv_heads=1, group=heads, note=", ".join(notes), **sizes)
