"""The compiled sampler: one function per number of rows, whatever the rows ask for.

Each option sits behind a `lax.cond` on "does any live row use it", so an unused one costs nothing, and no
operation mixes rows, so neither a batch-mate nor a padding row can change a row's token. Draws are by
inverse transform from one uniform number per row, keyed by (seed, index of the output token): the same
seed gives the same tokens in any batch.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specax.decoding.sampling_params import MAX_BEAM
from specax.decoding.sampling_table import SamplerInputs

TOP_LOGPROBS = 20  # alternatives that the sampler returns; more go through the whole vocabulary on the host
BEAM_CANDIDATES = 2 * MAX_BEAM  # next tokens of a beam that are looked at
NO_TOKEN = -1  # sampled where every token is forbidden, or where the logits are NaN
BLOCK = 256  # vocabulary entries per block of the two-level inverse transform
ONE_BITS = 0x3F800000  # float32 1.0 as an integer; non-negative floats order as their bits do


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerState:
    """Device-resident per-slot state of running sequences that use penalties or biases. Donated."""

    output_counts: Int[Array, "slots vocab"]  # occurrences in the output so far
    in_prompt: Bool[Array, "slots vocab"]
    bias: Float[Array, "slots vocab"]  # logit_bias, −inf where a token is not allowed

    @classmethod
    def create(cls, slots: int, vocab: int) -> "SamplerState":
        shape = (slots, vocab)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.bool), jnp.zeros(shape, jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens and, where asked for, log-probabilities under the model's own (raw) distribution."""

    tokens: Int[Array, "rows"]  # NO_TOKEN: none is possible
    logprobs: Float[Array, "rows"]
    ranks: Int[Array, "rows"]  # 1: the likeliest
    top_tokens: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


def sample(
    logits: Float[Array, "rows vocab"], state: SamplerState, inputs: SamplerInputs
) -> tuple[SamplerOutput, SamplerState]:
    """Draws the next token of every row and counts it."""
    edited = jnp.any(inputs.biased) | jnp.any(inputs.penalised) | inputs.any_banned
    # The branches give tokens and not logits: a conditional copies what it gives, even if it is its operand.
    tokens = lax.cond(
        edited, lambda: _pick(_edit(logits, state, inputs), inputs), lambda: _pick(logits, inputs)
    )
    counts = state.output_counts.at[inputs.slots, tokens].add(inputs.penalised.astype(jnp.int32))
    top = min(TOP_LOGPROBS, logits.shape[-1])
    scores = lax.cond(inputs.any_logprobs, lambda: score(logits, tokens), lambda: empty_scores(len(tokens), top))
    return SamplerOutput(tokens, *scores), dataclasses.replace(state, output_counts=counts)


def candidates(
    logits: Float[Array, "rows vocab"], state: SamplerState, inputs: SamplerInputs
) -> tuple[Int[Array, "rows top"], Float[Array, "rows top"]]:
    """The likeliest next tokens of beams and their log-probabilities, best first; among equals the lowest id.

    Biases and bans are applied to the log-probabilities and not normalised again, as transformers' processors do.
    """
    logprobs = _edit(jax.nn.log_softmax(logits, axis=-1), state, inputs)
    top, tokens = lax.top_k(logprobs, min(BEAM_CANDIDATES, logits.shape[-1]))
    return tokens.astype(jnp.int32), top


def load_slot(
    state: SamplerState,
    slot: Int[Array, ""],
    tokens: Int[Array, "max_len"],
    prompt_len: Int[Array, ""],
    length: Int[Array, ""],
    bias: Float[Array, "vocab"],
) -> SamplerState:
    """Sets a slot to a sequence's history (tokens[:length], of which the first prompt_len are prompt)."""
    vocab, order = state.bias.shape[1], jnp.arange(tokens.shape[0])
    prompt = jnp.where(order < prompt_len, tokens, vocab)
    output = jnp.where((order >= prompt_len) & (order < length), tokens, vocab)
    in_prompt = jnp.zeros(vocab, jnp.bool).at[prompt].set(True, mode="drop")
    counts = jnp.zeros(vocab, jnp.int32).at[output].add(1, mode="drop")
    return SamplerState(
        state.output_counts.at[slot].set(counts),
        state.in_prompt.at[slot].set(in_prompt),
        state.bias.at[slot].set(bias),
    )


def score(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"]
) -> tuple[Float[Array, "rows"], Int[Array, "rows"], Int[Array, "rows top"], Float[Array, "rows top"]]:
    """Log-probability and rank of given tokens, and the likeliest alternatives."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    ranks = 1 + jnp.sum(logprobs > own, axis=-1)
    top_logprobs, top_tokens = lax.top_k(logprobs, min(TOP_LOGPROBS, logits.shape[-1]))
    return own[:, 0], ranks.astype(jnp.int32), top_tokens.astype(jnp.int32), top_logprobs


def empty_scores(rows: int, top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `score` would return, in shape only."""
    one, many = jnp.zeros(rows), jnp.zeros((rows, top))
    return one, one.astype(jnp.int32), many.astype(jnp.int32), many


def argmax(x: Float[Array, "rows vocab"]) -> Int[Array, "rows"]:
    """The lowest index of the largest entry. Two plain reductions, which XLA vectorises on CPUs too."""
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, -1, keepdims=True), index, x.shape[-1] - 1), axis=-1)


def _edit(logits: jax.Array, state: SamplerState, inputs: SamplerInputs) -> jax.Array:
    """Biases, penalties and bans."""
    logits = lax.cond(
        jnp.any(inputs.biased),
        lambda x: x + jnp.where(inputs.biased[:, None], state.bias[inputs.slots], 0.0),
        lambda x: x,
        logits,
    )
    logits = lax.cond(jnp.any(inputs.penalised), lambda x: _penalise(x, state, inputs), lambda x: x, logits)
    return lax.cond(inputs.any_banned, lambda x: _ban(x, inputs.banned), lambda x: x, logits)


def _pick(logits: jax.Array, inputs: SamplerInputs) -> jax.Array:
    """The likeliest token of greedy rows, a draw for the others."""
    greedy = argmax(logits)
    sampled = inputs.temperature > 0
    tokens = lax.cond(
        jnp.any(sampled), lambda: jnp.where(sampled, _draw(logits, inputs), greedy), lambda: greedy
    )
    return jnp.where(jnp.max(logits, axis=-1) > -jnp.inf, tokens, NO_TOKEN)


def _penalise(logits: jax.Array, state: SamplerState, inputs: SamplerInputs) -> jax.Array:
    counts = state.output_counts[inputs.slots]
    seen = (counts > 0) | state.in_prompt[inputs.slots]
    repetition = jnp.where(seen & inputs.penalised[:, None], inputs.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalty = inputs.frequency[:, None] * counts + inputs.presence[:, None] * (counts > 0)
    return logits - jnp.where(inputs.penalised[:, None], penalty, 0.0)


def _ban(logits: jax.Array, banned: jax.Array) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, banned].set(-jnp.inf, mode="drop")


def _draw(logits: jax.Array, inputs: SamplerInputs) -> jax.Array:
    """Temperature, filters, and one draw per row."""
    # Differences first: the likeliest token then weighs exactly 1 whatever the temperature, which is clipped
    # because its reciprocal must be finite and not vanish (−inf · 0 is NaN).
    temperature = jnp.clip(inputs.temperature, 1e-30, 1e30)[:, None]
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    live = inputs.temperature > 0
    used = live & ((inputs.top_k < logits.shape[-1]) | (inputs.top_p < 1) | (inputs.min_p > 0))
    weights = lax.cond(jnp.any(used), lambda w: filter_weights(w, inputs), lambda w: w, weights)
    def key(seed: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)

    keys = jax.vmap(key)(inputs.seeds, inputs.output_index)
    uniform = jax.vmap(jax.random.uniform)(keys)
    return inverse_transform(weights, uniform)


def filter_weights(weights: Float[Array, "rows vocab"], inputs: SamplerInputs) -> Float[Array, "rows vocab"]:
    """Zeroes what min_p, top_k and top_p exclude, in that order. The largest weight of a row is 1.

    Thresholds come from a bisection over float bit patterns, exact and without a sort: the largest t such
    that enough tokens (top_k), or enough mass (top_p), weigh at least t.
    """
    weights = jnp.where(weights >= inputs.min_p[:, None], weights, 0.0)
    bits = lax.bitcast_convert_type(weights, jnp.int32)

    def threshold(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds  # enough(low) holds, enough(high) does not
            middle = low + (high - low) // 2
            ok = enough(bits >= middle[:, None])
            return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

        low = jnp.zeros(weights.shape[0], jnp.int32)
        return lax.fori_loop(0, 30, halve, (low, jnp.full_like(low, ONE_BITS + 1)))[0]

    k = threshold(lambda kept: jnp.sum(kept, axis=-1) >= inputs.top_k)
    weights = jnp.where(bits >= k[:, None], weights, 0.0)
    bits = lax.bitcast_convert_type(weights, jnp.int32)
    mass = inputs.top_p * jnp.sum(weights, axis=-1)
    p = threshold(lambda kept: jnp.sum(jnp.where(kept, weights, 0.0), axis=-1) >= mass)
    off = inputs.top_p >= 1
    return jnp.where((bits >= p[:, None]) | off[:, None], weights, 0.0)


def inverse_transform(weights: Float[Array, "rows vocab"], uniform: Float[Array, "rows"]) -> Int[Array, "rows"]:
    """The token at which the cumulated weight passes uniform · total: first the block, then inside it.

    Two levels keep the sums short, so that float32 does not lose small probabilities in a large vocabulary.
    """
    rows, vocab = weights.shape
    block = min(BLOCK, vocab)
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % block)))
    blocks = padded.reshape(rows, -1, block)
    sums = blocks.sum(-1)
    cumulated = jnp.cumsum(sums, axis=-1)
    target = uniform * cumulated[:, -1]
    at = _first_above(cumulated, target, sums)
    before = jnp.where(at > 0, jnp.take_along_axis(cumulated, jnp.maximum(at - 1, 0)[:, None], 1)[:, 0], 0.0)
    inside = jnp.take_along_axis(blocks, at[:, None, None], axis=1)[:, 0]
    return at * block + _first_above(jnp.cumsum(inside, axis=-1), target - before, inside)


def _first_above(cumulated: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """The first index of positive weight whose cumulated weight exceeds the target, else the last such index.

    A cumulated sum can grow at an entry of weight zero, since XLA adds in another order for each entry.
    """
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    above = (cumulated > target[:, None]) & (weights > 0)
    first = jnp.min(jnp.where(above, index, weights.shape[-1]), axis=-1)
    return jnp.minimum(first, jnp.max(jnp.where(weights > 0, index, 0), axis=-1))
