"""Everything that can be wrong with a request, found at submission; and what follows from its parameters."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specax.decoding.errors import CapacityError, InvalidRequestError
from specax.decoding.request import Request
from specax.decoding.sampling_params import MAX_BANNED, MAX_BEAM, SamplingParams
from specax.paged.namespaces import make_namespace

if TYPE_CHECKING:  # (token ids need no tokenizer)
    from specax.model.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can take."""

    vocab_size: int
    max_len: int  # prompt + output
    max_rows: int
    pages: tuple[int, ...]  # in all, per KV group
    pages_needed: Callable[[int, int], int]  # (group, tokens) → what a sequence may hold at a time
    pages_shared: Callable[[int, int], int]  # (group, prompt) → what all of its forks share to the end
    eos: frozenset[int]


def make_request(
    request_id: str, prompt: Sequence[int], params: SamplingParams, limits: Limits, tokenizer: "Tokenizer | None"
) -> Request:
    """A checked request, with its effective limits.

    Raises:
      InvalidRequestError, CapacityError: see Engine.submit.
    """
    tokens = _check_prompt(prompt, limits)
    _check_params(params, limits, tokenizer)
    room = limits.max_len - len(tokens)
    if params.min_tokens > room:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but after {len(tokens)} prompt tokens the model's length "
            f"({limits.max_len}) leaves room for {room}"
        )
    max_tokens = min(room, params.max_tokens or room)
    # The last token's KV is never needed, so prompt + max_tokens − 1 positions must fit.
    fit = _Fit(limits, len(tokens), params.beam_width)
    if not fit(len(tokens) + max_tokens - 1):
        if params.max_tokens is not None or not fit(len(tokens)):
            raise CapacityError(
                f"the request may need KV for {len(tokens) + max_tokens - 1} tokens ({len(tokens)} prompt + "
                f"{max_tokens} − 1){fit.times}, but the page pool holds {fit.longest()} in all{fit.times}: shorten it "
                "or raise EngineConfig.num_pages"
            )
        max_tokens = fit.longest() - len(tokens) + 1
        if params.min_tokens > max_tokens:
            raise CapacityError(
                f"min_tokens is {params.min_tokens}, but after {len(tokens)} prompt tokens the page pool holds "
                f"{max_tokens}: lower it or raise EngineConfig.num_pages"
            )
    stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else limits.eos)
    words = _bad_words(params, tokenizer)
    longer = tuple(word for word in words if len(word) > 1)
    bans = len(longer) + (len(stop_ids) if params.min_tokens else 0)
    if bans > MAX_BANNED:
        raise InvalidRequestError(
            f"bad_words and stop tokens make {bans} bans, at most {MAX_BANNED} are possible"
        )
    if params.beam_width > 1 and len(stop_ids) > MAX_BEAM:
        raise InvalidRequestError(
            f"{len(stop_ids)} stop tokens (EOS included) with beam_width {params.beam_width}: beam search takes at "
            f"most {MAX_BEAM}, as they could be all of a beam's candidates"
        )
    single = tuple(word[0] for word in words if len(word) == 1)
    request = Request(request_id, tokens, params, max_tokens, stop_ids, single, longer)
    if params.prompt_logprobs is not None:
        request.prompt_logprobs = [None]
    gone = set(single) | (stop_ids if params.min_tokens else set())
    if gone.issuperset(range(limits.vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids):
        raise InvalidRequestError(
            "nothing is left to sample: bad_words, and stop tokens before min_tokens, forbid all of "
            f"allowed_token_ids, {sorted(set(params.allowed_token_ids or range(limits.vocab_size)))[:8]}"
        )
    return request


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Whether a request's KV fits the page pools: one sequence, or beams that share their prompt's full pages."""

    limits: Limits
    prompt_len: int
    beams: int

    def __call__(self, tokens: int) -> bool:
        """Whether `tokens` of each sequence fit."""
        for group, pages in enumerate(self.limits.pages):
            shared = self.limits.pages_shared(group, min(tokens, self.prompt_len)) if self.beams > 1 else 0
            if shared + self.beams * (self.limits.pages_needed(group, tokens) - shared) > pages:
                return False
        return True

    def longest(self) -> int:
        return bisect.bisect_left(range(self.limits.max_len + 1), True, key=lambda tokens: not self(tokens)) - 1

    @property
    def times(self) -> str:
        return f" in each of {self.beams} beams" if self.beams > 1 else ""


def set_origin(
    request: Request, number: int, priority: int, tenant: str | None, salt: str | None, ttft_target: float | None
) -> None:
    """Notes where a request comes from.

    Raises:
      InvalidRequestError: one of these has the wrong type or value.
    """
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequestError(f"priority must be an integer, got {priority!r}")
    for name, value in (("tenant", tenant), ("cache_salt", salt)):
        if not isinstance(value, str | None) or value == "":
            raise InvalidRequestError(f"{name} must be a non-empty string or None, got {value!r}")
    ok = ttft_target is None or (isinstance(ttft_target, int | float) and 0 <= ttft_target < math.inf)
    if not ok or isinstance(ttft_target, bool):
        raise InvalidRequestError(f"ttft_target must be seconds ≥ 0 or None, got {ttft_target!r}")
    request.number, request.priority, request.tenant, request.ttft_target = number, priority, tenant, ttft_target
    request.namespace = make_namespace(salt)


def bias_row(request: Request, limits: Limits) -> np.ndarray | None:
    """What is added to a sequence's logits at every step, float32 [vocab]; None if nothing is."""
    params = request.params
    if not params.logit_bias and params.allowed_token_ids is None and not request.banned_tokens:
        return None
    row = np.zeros(limits.vocab_size, np.float32)
    for token, bias in (params.logit_bias or {}).items():
        row[token] = bias
    if params.allowed_token_ids is not None:
        forbidden = np.ones(limits.vocab_size, np.bool_)
        forbidden[list(params.allowed_token_ids)] = False
        row[forbidden] = -np.inf
    row[list(request.banned_tokens)] = -np.inf
    return row


def _check_prompt(prompt: Sequence[int], limits: Limits) -> list[int]:
    if isinstance(prompt, str):
        raise InvalidRequestError("the prompt is a string; Engine.submit takes token ids (LLM.generate takes text)")
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | set | frozenset | Mapping):
        raise InvalidRequestError(f"the prompt must be a sequence of token ids, got {prompt!r}")
    if hasattr(prompt, "__array__"):  # NumPy's and JAX's arrays
        prompt = np.asarray(prompt).tolist()
    tokens = [int(t) if isinstance(t, int | np.integer) and not isinstance(t, bool) else t for t in prompt]
    if not tokens:
        raise InvalidRequestError("the prompt is empty: at least one token is needed")
    for at, token in enumerate(tokens):
        if not _is_token(token, limits):
            raise InvalidRequestError(
                f"prompt token {at} is {token!r}; token ids are integers in [0, {limits.vocab_size})"
            )
    if len(tokens) >= limits.max_len:
        raise InvalidRequestError(
            f"the prompt has {len(tokens)} tokens; with at least one to generate, the limit is "
            f"{limits.max_len - 1} (the model's length, {limits.max_len}, less one)"
        )
    return tokens


def _is_token(token: object, limits: Limits) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < limits.vocab_size


def _check_params(params: SamplingParams, limits: Limits, tokenizer: "Tokenizer | None") -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}")
    if params.n > limits.max_rows:
        raise InvalidRequestError(f"n is {params.n}, more than the engine's max_rows ({limits.max_rows})")
    if params.beam_width > limits.max_rows:
        raise InvalidRequestError(
            f"beam_width is {params.beam_width}, more than the engine's max_rows ({limits.max_rows})"
        )
    groups = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
    }
    for name, ids in groups.items():
        for token in ids:
            if not _is_token(token, limits):
                raise InvalidRequestError(
                    f"{name} holds {token!r}; token ids are integers in [0, {limits.vocab_size})"
                )
    if tokenizer is None and (params.stop_strings or params.bad_words):
        raise InvalidRequestError("stop and bad_words need a tokenizer; this engine has none (use stop_token_ids)")


def _bad_words(params: SamplingParams, tokenizer: "Tokenizer | None") -> list[tuple[int, ...]]:
    """Each bad word's tokens, at the start of a text and after a space."""
    if not params.bad_words or tokenizer is None:
        return []
    texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
    return list(dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts))
