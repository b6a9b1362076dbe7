"""Layers of the Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Weights keep their contraction axis last (`[out…, in]`), as Hugging Face stores them. A KV head and its
group of query heads stay together in one `qkv` array, so that one matrix product serves all three and
sharding over KV heads splits it cleanly.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from specax.model.config import ModelConfig
from specax.sharding import Layout

type Attend = Callable[..., jax.Array]  # see Attention
type Phases = tuple[jax.Array, jax.Array]  # cosines and sines, as `rotary` gives them


@dataclasses.dataclass(frozen=True)
class Build:
    """What every layer needs to declare its parameters. Static."""

    config: ModelConfig
    dtype: jnp.dtype
    layout: Layout


def parameter(
    rngs: nnx.Rngs, build: Build, shape: tuple[int, ...], axes: tuple[str | None, ...], scale: float | None = None
) -> nnx.Param:
    """A parameter with logical axes: normal with standard deviation `scale`, ones where it is None."""
    if scale is None:
        value = jnp.ones(shape, build.dtype)
    elif scale == 0.0:
        value = jnp.zeros(shape, build.dtype)
    else:
        value = (scale * jax.random.normal(rngs.params(), shape)).astype(build.dtype)
    return nnx.Param(value, axes=axes)


def linear(
    x: Float[Array, "*batch inputs"], weight: Float[Array, "*outputs inputs"], bias: nnx.Param | None = None
) -> Float[Array, "..."]:
    """x · weightᵀ + bias, [*batch, *outputs].

    Several output axes go through one flat product; as a product of more axes, XLA would transpose the weight.
    """
    outputs = weight.shape[:-1]
    flat = jax.lax.dot_general(x, weight.reshape(-1, weight.shape[-1]), (((x.ndim - 1,), (1,)), ((), ())))
    out = flat.reshape(*x.shape[:-1], *outputs)
    return out if bias is None else out + bias[...]


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation (Zhang & Sennrich 2019), in float32."""

    def __init__(self, build: Build, rngs: nnx.Rngs):
        self.eps = build.config.rms_norm_eps
        self.weight = parameter(rngs, build, (build.config.hidden_size,), ("hidden",))

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return x32.astype(x.dtype) * self.weight[...]


def rotary_frequencies(config: ModelConfig) -> list[float]:
    """Radians per position of each of the head_dim / 2 pairs, with Llama 3 scaling where configured."""
    pairs = config.head_dim // 2
    plain = [config.rope_theta ** (-i / pairs) for i in range(pairs)]
    if config.rope_factors is not None:
        return [f / factor for f, factor in zip(plain, config.rope_factors, strict=True)]
    if (scaling := config.rope_scaling) is None:
        return plain

    def scaled(f: float) -> float:
        turns = scaling.original_max_position * f / (2 * math.pi)  # over the original context
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        return smooth * f + (1 - smooth) * f / scaling.factor

    return [scaled(f) for f in plain]


def rotary(
    config: ModelConfig, positions: Int[Array, "*batch"]
) -> tuple[Float[Array, "*batch pairs"], Float[Array, "*batch pairs"]]:
    """Cosines and sines of the rotary phases (Su et al. 2021), in float32."""
    frequencies = jnp.asarray(rotary_frequencies(config), jnp.float32)
    phase = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(phase), jnp.sin(phase)


def rotate(
    x: Float[Array, "*batch heads group head_dim"],
    cos: Float[Array, "*batch pairs"],
    sin: Float[Array, "*batch pairs"],
) -> Float[Array, "*batch heads group head_dim"]:
    """Rotates the pairs (i, i + head_dim / 2), the order of Hugging Face checkpoints."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, None, :], sin[..., None, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Projections and rotary embedding around an attention function that the caller brings."""

    def __init__(self, build: Build, rngs: nnx.Rngs):
        c = build.config
        self.build = build
        qkv = (c.num_kv_heads, c.group_size + 2, c.head_dim)  # per KV head: its queries, key, value
        axes = ("kv_heads", None, None)
        scale = c.hidden_size**-0.5
        self.qkv = parameter(rngs, build, (*qkv, c.hidden_size), (*axes, "hidden"), scale)
        out = (c.hidden_size, c.num_kv_heads, c.group_size, c.head_dim)
        self.out = parameter(rngs, build, out, ("hidden", *axes), (c.num_heads * c.head_dim) ** -0.5)
        has_bias = c.attention_bias
        self.qkv_bias = parameter(rngs, build, qkv, axes, 0.0) if has_bias else None
        self.out_bias = parameter(rngs, build, (c.hidden_size,), ("hidden",), 0.0) if has_bias else None

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        cos: Float[Array, "*batch pairs"],
        sin: Float[Array, "*batch pairs"],
        attend: Attend,
        sink_phases: Phases | None = None,
    ) -> Float[Array, "*batch hidden"]:
        """`attend` takes q [*batch, heads, head_dim], k and v [*batch, kv_heads, head_dim] and gives heads.

        With `sink_phases` it takes a fourth array, the queries rotated by these (see `Window.rebased`).
        """
        c = self.build.config
        qkv = linear(x, self.qkv[...], self.qkv_bias)
        qk = rotate(qkv[..., : c.group_size + 1, :], cos, sin)
        queries = [qk[..., : c.group_size, :]]
        if sink_phases is not None:
            queries.append(rotate(qkv[..., : c.group_size, :], *sink_phases))
        q, *sink_q = (q.reshape(*x.shape[:-1], c.num_heads, c.head_dim) for q in queries)
        heads = attend(q, qk[..., c.group_size, :], qkv[..., c.group_size + 1, :], *sink_q)
        return linear(heads.reshape(*x.shape[:-1], -1), self.out[...].reshape(c.hidden_size, -1), self.out_bias)


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate · x) ⊙ up · x)."""

    def __init__(self, build: Build, rngs: nnx.Rngs):
        c = build.config
        wide, axes = (c.intermediate_size, c.hidden_size), ("mlp", "hidden")
        self.gate = parameter(rngs, build, wide, axes, c.hidden_size**-0.5)
        self.up = parameter(rngs, build, wide, axes, c.hidden_size**-0.5)
        self.down = parameter(rngs, build, wide[::-1], axes[::-1], c.intermediate_size**-0.5)
        has_bias = c.mlp_bias
        self.gate_bias = parameter(rngs, build, wide[:1], axes[:1], 0.0) if has_bias else None
        self.up_bias = parameter(rngs, build, wide[:1], axes[:1], 0.0) if has_bias else None
        self.down_bias = parameter(rngs, build, wide[1:], axes[1:], 0.0) if has_bias else None

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        gate = linear(x, self.gate[...], self.gate_bias)
        up = linear(x, self.up[...], self.up_bias)
        return linear(jax.nn.silu(gate) * up, self.down[...], self.down_bias)


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, build: Build, rngs: nnx.Rngs):
        self.input_norm = RMSNorm(build, rngs)
        self.attention = Attention(build, rngs)
        self.post_attention_norm = RMSNorm(build, rngs)
        self.mlp = MLP(build, rngs)

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        cos: Float[Array, "*batch pairs"],
        sin: Float[Array, "*batch pairs"],
        attend: Attend,
        sink_phases: Phases | None = None,
    ) -> Float[Array, "*batch hidden"]:
        x = x + self.attention(self.input_norm(x), cos, sin, attend, sink_phases)
        return x + self.mlp(self.post_attention_norm(x))
