"""ForwardBatch: the one thing that crosses from the host plane to the device plane on a step.

Its fields are NumPy arrays on the host side and traced arrays inside jit; all shapes come from buckets.
Slots and page tables are given per KV group (`ModelConfig.kv_groups`), on the first axis. In every group the
key of position p lies in column p // page_size; columns that a group's window has left behind may name page 0.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt

if TYPE_CHECKING:
    Either = Any  # the device plane may take it for the one, the host plane for the other
else:
    Either = jax.Array | np.ndarray  # NumPy where the host builds it, traced inside jit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSegment:
    """R rows of the same static query length N: the first R · N tokens of the batch."""

    page_table: Int[Either, "groups rows pages_per_row"]
    context_lens: Int[Either, "rows"]  # keys before this step; −N marks a padding row
    tree_mask: UInt[Either, "rows query_len words"] | None = None  # packed ancestor bits; absent when N = 1
    query_len: int = dataclasses.field(default=1, metadata={"static": True})  # N


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillSegment:
    """Ragged rows, flattened: the tokens after the decode segment's. Padding rows have length 0."""

    query_starts: Int[Either, "rows_plus_one"]  # cumulative, relative to the segment's first token
    page_table: Int[Either, "groups rows pages_per_row"]
    context_lens: Int[Either, "rows"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """One step's input. Dense layers see the flat token stream; only attention splits the segments."""

    tokens: Int[Either, "tokens"]
    positions: Int[Either, "tokens"]  # rotary positions; in a draft tree they differ from the slot order
    slots: Int[Either, "groups tokens"]  # page · page_size + offset; padding writes to the trash page 0
    logit_rows: Int[Either, "logit_rows"]  # the tokens whose hidden state is wanted
    decode: DecodeSegment | None = None
    prefill: PrefillSegment | None = None


@runtime_checkable
class KVCacheLike(Protocol):
    """What the model needs of a cache: stacked pages for each of the model's KV groups.

    A registered dataclass, so that `dataclasses.replace` gives the updated cache.
    """

    @property
    def k(self) -> tuple[Float[Array, "layers pages kv_heads page_size head_dim"], ...]: ...
    @property
    def v(self) -> tuple[Float[Array, "layers pages kv_heads page_size head_dim"], ...]: ...

    __dataclass_fields__: ClassVar[dict[str, Any]]
