"""The decoder of the Llama family, with two entry points over the same weights.

- `Decoder.__call__(tokens, positions, segment_ids)`: no cache; for training and research. Works under
  jit, grad and vmap.
- `Decoder.forward(kv, batch)`: one step of the engine over the paged cache.

Both take a `window` for StreamingLLM (Xiao et al. 2023), which a model without windows of its own then attends
through in every layer. Attention sinks are seen at the positions that they have in what is left of the context.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from specax.model.batch import ForwardBatch, KVCacheLike
from specax.model.config import ModelConfig
from specax.model.layers import Build, DecoderLayer, RMSNorm, parameter, rotary
from specax.pallas_kernels import Implementation, Window, paged_attention, paged_prefill_attention, write_kv
from specax.sharding import CACHE_AXES, Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderOutput:
    """What the cache-less model returns."""

    logits: Float[Array, "*batch length vocab"]
    hidden: Float[Array, "*batch length hidden"]  # after the final norm: the head's input
    captured: dict[int, Float[Array, "*batch length hidden"]]  # residual stream after layer i, before any norm


class Decoder(nnx.Module):
    """Llama-family decoder. `config` is the network as published; `padded` what the mesh made of it.

    Built directly, its parameters are random and on one device; `load_model` puts them into their shards.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: Any = jnp.float32,
        layout: Layout | None = None,
        attention: Implementation = None,
    ):
        """`attention`: which implementation of paged attention `forward` takes; None: the best one there is."""
        layout = layout or Layout()
        self.config, self.layout, self.attention = config, layout, attention
        build = Build(config.padded(layout.parts("kv_heads"), layout.parts("mlp")), jnp.dtype(dtype), layout)
        self.padded, self.dtype = build.config, build.dtype
        vocab = config.padded_vocab(layout.parts("vocab"))
        table, axes = (vocab, config.hidden_size), ("vocab", "hidden")
        self.embed = parameter(rngs, build, table, axes, 1.0 if not config.tie_embeddings else 0.02)
        self.layers = nnx.List([DecoderLayer(build, rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(build, rngs)
        tied = config.tie_embeddings
        self.head = None if tied else parameter(rngs, build, table, axes, config.hidden_size**-0.5)

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Next-token logits in float32 of hidden states that `norm` has normalised."""
        table = self.embed if self.head is None else self.head
        logits = jnp.einsum("...h,vh->...v", hidden, table[...], preferred_element_type=jnp.float32)
        if hidden.ndim > 1:
            # Every device computes its part of the vocabulary. Else, where all logits are wanted everywhere, XLA
            # gathers the table instead: for Llama 3 8B 1 GB in each step.
            axes = ("rows",) if hidden.ndim == 2 else ("batch", *[None] * (hidden.ndim - 2))
            logits = self.layout.constrain(logits, *axes, "vocab")
        return logits[..., : self.config.vocab_size]

    def __call__(
        self,
        tokens: Int[Array, "*batch length"],
        positions: Int[Array, "*batch length"] | None = None,
        segment_ids: Int[Array, "*batch length"] | None = None,
        capture_layers: Sequence[int] = (),
        window: Window | None = None,
    ) -> DecoderOutput:
        """Causal forward pass without a cache, of [batch, length] tokens or of one sequence [length].

        Args:
          positions: rotary positions; by default counted from the start of each segment.
          segment_ids: tokens attend only within runs of the same id (packed sequences, padding); by default
            each row is one segment. Windows and sinks are counted in each segment.
          capture_layers: layers whose output is returned in `captured`.
          window: what every layer's queries see, in a model without windows of its own.

        Raises:
          ValueError: tokens of another rank, a layer that is not there, two kinds of windows.
        """
        self._check_layers(capture_layers)
        if tokens.ndim == 1:
            p, s = (None if x is None else x[None] for x in (positions, segment_ids))
            return jax.tree.map(lambda x: x[0], self(tokens[None], p, s, capture_layers, window))
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [batch, length] or [length], got shape {tokens.shape}")
        length = tokens.shape[-1]
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        order = jnp.arange(length)
        starts = _segment_starts(segment_ids)
        index = order - starts  # in the segment
        if positions is None:
            positions = index
        causal = (order[:, None] >= order[None, :]) & (starts[..., :, None] == starts[..., None, :])
        windows = self._windows(window)
        masks = {w: causal if w is None else causal & _sees(w, index) for w in set(windows)}
        cos, sin = rotary(self.config, positions)
        sink_phases, is_sink = None, None
        if window is not None and window.sinks:
            sink_phases = rotary(self.config, positions - (index - window.rebased(index)))
            is_sink = index < window.sinks
        x = self._embed(tokens, "batch", None)
        captured = {}
        for i, layer in enumerate(self.layers):
            attend = partial(_dense_attention, mask=masks[windows[i]], is_sink=is_sink)
            x = self.layout.constrain(layer(x, cos, sin, attend, sink_phases), "batch", None, "hidden")
            if i in capture_layers:
                captured[i] = x
        hidden = self.norm(x)
        return DecoderOutput(self.logits(hidden), hidden, captured)

    def forward[KV: KVCacheLike](
        self, kv: KV, batch: ForwardBatch, capture_layers: Sequence[int] = (), window: Window | None = None
    ) -> tuple[Float[Array, "tokens hidden"], dict[int, Float[Array, "tokens hidden"]], KV]:
        """One engine step: writes the batch's keys and values at its slots and attends through the pages.

        Args:
          kv: pages of each of `config.kv_groups`; the batch's slots and page tables come in the same order.
          capture_layers: layers whose output is returned.
          window: what every layer's queries see, in a model without windows of its own. Static.

        Returns:
          The normalised hidden state of every token, the captured features, and the updated cache.

        Raises:
          ValueError: a layer that is not there, two kinds of windows.
        """
        self._check_layers(capture_layers)
        windows = self._windows(window)
        groups = self.config.kv_groups
        places = {layer: (g, at) for g, group in enumerate(groups) for at, layer in enumerate(group.layers)}
        k_pages, v_pages = list(kv.k), list(kv.v)
        cos, sin = rotary(self.config, batch.positions)
        sink_phases = None
        if window is not None and window.sinks:
            sink_phases = rotary(self.config, window.rebased(batch.positions))
        x = self._embed(batch.tokens, "tokens")
        captured = {}
        for i, layer in enumerate(self.layers):

            def attend(
                q: jax.Array, k: jax.Array, v: jax.Array, sink_q: jax.Array | None = None, i: int = i
            ) -> jax.Array:
                group, at = places[i]
                with jax.named_scope("paged_attention"):
                    out, k_pages[group], v_pages[group] = _paged(
                        self, at, group, windows[i], q, k, v, sink_q, k_pages[group], v_pages[group], batch
                    )
                return out

            with jax.named_scope(f"layer_{i}"):
                x = self.layout.constrain(layer(x, cos, sin, attend, sink_phases), "tokens", "hidden")
            if i in capture_layers:
                captured[i] = x
        return self.norm(x), captured, dataclasses.replace(kv, k=tuple(k_pages), v=tuple(v_pages))

    def _windows(self, window: Window | None) -> list[Window | None]:
        """Each layer's window: the model's own, or `window` in all of them."""
        own = self.config.windows or (None,) * self.config.num_layers
        if window is None:
            return [None if size is None else Window(size) for size in own]
        if any(size is not None for size in own):
            raise ValueError(f"{window} can't be put over a model whose layers have windows of their own: {own}")
        return [window] * self.config.num_layers

    def _embed(self, tokens: jax.Array, *axes: str | None) -> jax.Array:
        return self.layout.constrain(self.embed[...][tokens], *axes, "hidden")

    def _check_layers(self, layers: Sequence[int]) -> None:
        if bad := [i for i in layers if not 0 <= i < self.config.num_layers]:
            last = self.config.num_layers - 1
            raise ValueError(f"capture_layers: {bad} out of range; the model has layers 0..{last}")


def _paged(
    model: Decoder,
    layer: int,
    group: int,
    window: Window | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink_q: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    batch: ForwardBatch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes one layer's keys and values, then attends: decode rows first, prefill rows after them.

    `layer` counts within the KV group, whose pages these are; `sink_q` holds the queries rotated for sinks, if the
    window has some. On a mesh each device works on its own KV heads, without communication.
    """
    scale = model.config.head_dim**-0.5
    static: Any = {"layer": layer, "scale": scale, "window": window, "implementation": model.attention}
    decode = batch.decode
    # Where the segments part in the flat stream.
    split = 0 if decode is None else decode.context_lens.shape[0] * decode.query_len

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        sink_q: jax.Array | None,
        k_pages: jax.Array,
        v_pages: jax.Array,
        batch: ForwardBatch,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        k_pages = write_kv(k_pages, layer, k, batch.slots[group])
        v_pages = write_kv(v_pages, layer, v, batch.slots[group])
        outs = []
        if (decode := batch.decode) is not None:
            rows = q[:split].reshape(-1, decode.query_len, *q.shape[1:])
            out = paged_attention(
                rows, k_pages, v_pages, decode.page_table[group], decode.context_lens, tree_mask=decode.tree_mask,
                sink_query=None if sink_q is None else sink_q[:split].reshape(rows.shape), **static,
            )  # fmt: skip
            outs.append(out.reshape(-1, *q.shape[1:]))
        if (prefill := batch.prefill) is not None:
            outs.append(paged_prefill_attention(
                q[split:], k_pages, v_pages, prefill.query_starts, prefill.page_table[group], prefill.context_lens,
                sink_query=None if sink_q is None else sink_q[split:], **static,
            ))  # fmt: skip
        return jnp.concatenate(outs), k_pages, v_pages

    if (mesh := model.layout.mesh) is None:
        return local(q, k, v, sink_q, k_pages, v_pages, batch)
    heads = model.layout.rules.spec((None, "kv_heads", None))
    pages = model.layout.rules.spec(CACHE_AXES)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, heads, pages, pages, PartitionSpec()),
        out_specs=(heads, pages, pages),
        check_vma=False,
    )(q, k, v, sink_q, k_pages, v_pages, batch)


def _dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink_q: jax.Array | None = None,
    *,
    mask: jax.Array,
    is_sink: jax.Array | None,
) -> jax.Array:
    """Attention of [batch, length] tokens under a mask [batch, queries, keys]; sinks are scored with `sink_q`."""
    # XLA's CPU backend has no product of two float16 matrices that sums up in float32.
    wide = jnp.float32 if q.dtype == jnp.float16 else q.dtype
    if sink_q is None or is_sink is None:
        out = jax.nn.dot_product_attention(q.astype(wide), k.astype(wide), v.astype(wide), mask=mask[:, None])
        return out.astype(q.dtype)
    k, v = (jnp.repeat(x.astype(wide), q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores, sink_scores = (
        jnp.einsum("bqhd,bkhd->bhqk", x.astype(wide), k, preferred_element_type=jnp.float32) for x in (q, sink_q)
    )
    scores = jnp.where(is_sink[:, None, None], sink_scores, scores) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(wide), v).astype(q.dtype)


def _sees(window: Window, index: Int[Array, "*batch length"]) -> Bool[Array, "*batch length length"]:
    """Which keys are in each query's window or sinks, given their places in the segment; not yet causal."""
    keys = index[..., None, :]
    return (keys >= window.start(index)[..., :, None]) | (keys < window.sinks)


def _segment_starts(segment_ids: Int[Array, "*batch length"]) -> Int[Array, "*batch length"]:
    """For every token, where its run of equal segment ids starts."""
    order = jnp.arange(segment_ids.shape[-1])
    changed = segment_ids[..., 1:] != segment_ids[..., :-1]
    starts = jnp.concatenate([jnp.zeros_like(changed[..., :1]), changed], axis=-1) * order
    return jax.lax.cummax(starts, axis=starts.ndim - 1)
