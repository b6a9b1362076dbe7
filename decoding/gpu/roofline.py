"""The least time that a step or an attention op can take: bytes it must move and operations it must do, by formula.

Williams, Waterman and Patterson, "Roofline", CACM 2009. Bytes: weights and each row's keys and values once, queries
and outputs of attention; activations between layers, small beside these, are left out. Operations: two per parameter
and token, four per query head, head dimension and pair of a query and a key that it sees.
"""

import dataclasses

from specax.model import ModelConfig

# An H200 as measured: a large copy, and a bfloat16 product of 8192³ (reads and writes counted).
H200_BYTES_PER_SECOND, H200_FLOPS_PER_SECOND = 4.3e12, 790e12


@dataclasses.dataclass(frozen=True)
class Work:
    """What must be moved and computed, by one device."""

    bytes: float
    flops: float

    @property
    def memory_seconds(self) -> float:
        """Of moving the bytes on an H200."""
        return self.bytes / H200_BYTES_PER_SECOND

    @property
    def arithmetic_seconds(self) -> float:
        return self.flops / H200_FLOPS_PER_SECOND

    @property
    def seconds(self) -> float:
        """At best, on an H200."""
        return max(self.memory_seconds, self.arithmetic_seconds)

    @property
    def bound(self) -> str:
        """What limits it."""
        return "memory" if self.memory_seconds >= self.arithmetic_seconds else "arithmetic"


def attention(
    config: ModelConfig, rows: int, query_len: int, context: int, *, kv_bytes: int = 2, scale_bytes: int = 0
) -> Work:
    """One layer's attention of rows with `context` earlier keys and query_len own ones, causal among themselves.

    Args:
      kv_bytes: per element of the pages.
      scale_bytes: per token and head, for keys and for values, of quantised pages.
    """
    keys = rows * (context + query_len)
    vectors = 2 * keys * config.num_kv_heads * (config.head_dim * kv_bytes + scale_bytes)
    queries_and_outputs = 2 * rows * query_len * config.num_heads * config.head_dim * 2
    pairs = rows * (query_len * context + query_len * (query_len + 1) // 2)
    return Work(vectors + queries_and_outputs, 4.0 * pairs * config.num_heads * config.head_dim)


def latent_attention(heads: int, rows: int, context: int, latent_dim: int = 576, value_dim: int = 512) -> Work:
    """One layer's absorbed MLA decoding, one query token per row, bfloat16."""
    keys = rows * (context + 1)
    queries_and_outputs = rows * heads * (latent_dim + value_dim) * 2
    return Work(keys * latent_dim * 2 + queries_and_outputs, 2.0 * keys * heads * (latent_dim + value_dim))


def step(config: ModelConfig, rows: int, query_len: int, context: int, devices: int = 1) -> Work:
    """A forward step in bfloat16 with logits of every token; `devices` share it evenly, exchange not counted."""
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * (heads * config.head_dim + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size
    parameters = config.num_layers * layer + config.vocab_size * config.hidden_size
    one = attention(config, rows, query_len, context)
    moved = 2 * parameters + config.num_layers * one.bytes
    flops = 2.0 * parameters * rows * query_len + config.num_layers * one.flops
    return Work(moved / devices, flops / devices)


def examples(config: ModelConfig) -> dict[str, Work]:
    """The table of docs/kernels.md, for Llama 3 8B there."""
    return {
        "decode attention, 64 rows × 4,096 keys": attention(config, 64, 1, 4096),
        "the same, int8 pages": attention(config, 64, 1, 4096, kv_bytes=1, scale_bytes=4),
        "decode attention, 1 row × 4,096 keys": attention(config, 1, 1, 4096),
        "tree attention, 64 trees of 32 × 4,096 keys": attention(config, 64, 32, 4096),
        "prefill attention, 4,096 tokens": attention(config, 1, 4096, 0),
        "prefill attention, 512 tokens after 32,768": attention(config, 1, 512, 32768),
        "MLA decode attention, 16 heads, 64 rows × 4,096 keys": latent_attention(16, 64, 4096),
        "MLA decode attention, 128 heads, 64 rows × 4,096 keys": latent_attention(128, 64, 4096),
        "decode step, 64 rows × 4,096 keys": step(config, 64, 1, 4096),
        "verify step, 64 trees of 32 × 4,096 keys": step(config, 64, 32, 4096),
        "verify step, 1 tree of 32 × 4,096 keys": step(config, 1, 32, 4096),
        "decode step on 8 GPUs": step(config, 64, 1, 4096, devices=8),
        "verify step on 8 GPUs": step(config, 64, 32, 4096, devices=8),
    }
