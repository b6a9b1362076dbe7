"""The host side of sampling: the settings of running sequences, laid out as the sampler's inputs."""

import dataclasses

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from specax.decoding.request import Sequence
from specax.decoding.sampling_params import MAX_BANNED
from specax.model.batch import Either

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplerInputs:
    """What the rows of this step ask for. Padding rows are greedy and use nothing."""

    slots: Int[Either, "rows"]  # row of SamplerState; padding rows name the last, unused one
    seeds: UInt[Either, "rows"]
    output_index: Int[Either, "rows"]  # how many output tokens the sequence has
    temperature: Float[Either, "rows"]  # 0: greedy
    top_k: Int[Either, "rows"]  # vocabulary size: off
    top_p: Float[Either, "rows"]
    min_p: Float[Either, "rows"]
    presence: Float[Either, "rows"]
    frequency: Float[Either, "rows"]
    repetition: Float[Either, "rows"]
    penalised: Bool[Either, "rows"]
    biased: Bool[Either, "rows"]
    banned: Int[Either, "rows max_banned"]  # token ids that may not come next; vocabulary size: none
    any_banned: Bool[Either, ""]
    any_logprobs: Bool[Either, ""]


class SamplingTable:
    """The sampling settings of every sampler slot, as columns; a step's inputs are rows of it.

    The last row is inert (greedy, no option used) and serves as padding.
    """

    def __init__(self, slots: int, vocab_size: int):
        size = slots + 1
        self.inert, self._vocab = slots, vocab_size
        self._float = {name: np.zeros(size, np.float32) for name in _FLOATS}
        self._float["top_p"][:] = 1.0
        self._float["repetition"][:] = 1.0
        self._top_k = np.full(size, vocab_size, np.int32)
        self._seed = np.zeros(size, np.uint32)
        self._penalised = np.zeros(size, np.bool_)
        self._biased = np.zeros(size, np.bool_)
        self._logprobs = np.zeros(size, np.bool_)
        # Rows that ban tokens, or may: min_tokens and bad words of several tokens.
        self._bans = np.zeros(size, np.bool_)
        self._no_bans = np.full((size, MAX_BANNED), vocab_size, np.int32)

    def load(self, sequence: Sequence, biased: bool) -> None:
        """Fills the slot of a sequence that starts to run."""
        p, i = sequence.request.params, sequence.slot
        values = (p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty)
        for name, value in zip(_FLOATS, values, strict=True):
            self._float[name][i] = value
        self._top_k[i] = min(p.top_k, self._vocab) if p.top_k > 0 else self._vocab
        self._seed[i] = sequence.seed
        self._penalised[i], self._biased[i] = p.penalised, biased
        self._logprobs[i] = p.logprobs is not None
        self._bans[i] = p.min_tokens > 0 or bool(sequence.request.banned_words)

    def inputs(self, sequences: list[Sequence | None], rows: int) -> SamplerInputs:
        """The sampler's inputs for `rows` rows; None and what is missing are padding."""
        slots = np.full(rows, self.inert, np.int32)
        index = np.zeros(rows, np.int32)
        count = len(sequences)
        slots[:count] = [self.inert if s is None or s.slot is None else s.slot for s in sequences]
        index[:count] = [0 if s is None else s.output_len for s in sequences]
        banned, any_banned = self._no_bans[:rows], False
        if self._bans[slots].any():
            banned = banned.copy()
            for i, sequence in enumerate(sequences):
                if sequence is not None and (ids := banned_tokens(sequence)):
                    banned[i, : len(ids)] = ids
                    any_banned = True
        return SamplerInputs(
            slots, self._seed[slots], index, self._float["temperature"][slots], self._top_k[slots],
            self._float["top_p"][slots], self._float["min_p"][slots], self._float["presence"][slots],
            self._float["frequency"][slots], self._float["repetition"][slots], self._penalised[slots],
            self._biased[slots], banned, np.asarray(any_banned), np.asarray(self._logprobs[slots].any()),
        )  # fmt: skip


def banned_tokens(sequence: Sequence) -> list[int]:
    """Token ids that may not come next: stops before min_tokens, and last tokens of bad words."""
    request, tokens, output_len = sequence.request, sequence.tokens, sequence.output_len
    ids = list(request.stop_ids) if output_len < request.params.min_tokens else []
    for word in request.banned_words:
        head = len(word) - 1
        if head <= output_len and tuple(tokens[len(tokens) - head :]) == word[:-1]:
            ids.append(word[-1])
    return ids
