"""SamplingParams: what a caller asks of the sampler, with the field's usual names and defaults (vLLM's)."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specax.decoding.errors import InvalidRequestError

MAX_BEAM = 16  # beams of a request
MAX_BANNED = 128  # tokens that can be banned on one step by bad words and min_tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop, what to return. Immutable; wrong values raise InvalidRequestError.

    Filters apply in this order: penalties and biases on the logits, temperature, min_p, top_k, top_p.
    Tokens that tie with the last one kept by top_k or top_p are kept too.
    """

    n: int = 1  # parallel samples; they share the prompt's pages; sample i uses seed + i
    beam_width: int = 1  # above 1: beam search; the n best beams are returned, at the end
    length_penalty: float = 1.0  # beams score by sum of log-probabilities / length ** this; above 0 favours long ones
    early_stopping: bool | str = False  # with beam_width finished beams, stop: True, "never", or False: by heuristic
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # smallest set of tokens with at least this probability; 1: off
    top_k: int = 0  # the k likeliest tokens; 0 or −1: off
    min_p: float = 0.0  # tokens at least this likely relative to the likeliest; 0: off
    seed: int | None = None  # None: drawn from the engine's seed and the request's number
    presence_penalty: float = 0.0  # subtracted once from the logit of each token of the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of prompt and output tokens
    logit_bias: Mapping[int, float] | None = None  # token id → added to its logit
    allowed_token_ids: Sequence[int] | None = None  # nothing else can be sampled
    bad_words: Sequence[str] | None = None  # texts whose tokens are never completed
    stop: str | Sequence[str] | None = None  # texts that end the output
    stop_token_ids: Sequence[int] | None = None  # tokens that end the output (kept in token_ids)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0  # before that many, neither EOS nor a stop ends the output
    max_tokens: int | None = 16  # None: as many as the model's length allows
    logprobs: int | None = None  # top-k log-probabilities of each output token; −1: the whole vocabulary
    prompt_logprobs: int | None = None  # the same of each prompt token
    skip_special_tokens: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> "SamplingParams":
        names = [field.name for field in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
                raise InvalidRequestError(f"unknown sampling field {key!r}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # NumPy scalars are numbers too
            if isinstance(value := getattr(self, field.name), np.generic):
                object.__setattr__(self, field.name, value.item())
        # Own copies: a caller who changes a list later must not change a running request.
        for name in ("allowed_token_ids", "bad_words", "stop_token_ids"):
            if (value := getattr(self, name)) is not None:
                if isinstance(value, str) or not isinstance(value, Iterable):
                    raise InvalidRequestError(f"{name} must be a sequence, got {value!r}")
                object.__setattr__(self, name, tuple(np.asarray(value).tolist() if _is_array(value) else value))
        if not isinstance(self.stop, Iterable | None):
            raise InvalidRequestError(f"stop must be a string or a sequence of strings, got {self.stop!r}")
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidRequestError(f"logit_bias maps token ids to numbers, got {self.logit_bias!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias) if self.logit_bias else None)
        self._check_numbers()
        self._check_stops()

    def _check_numbers(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name} must be {what}, got {getattr(self, name)!r}")

        def number(name: str, low: float, high: float, what: str, above: bool = False) -> None:
            value = getattr(self, name)
            ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            need(ok and (low < value if above else low <= value) and value <= high, name, what)

        def integer(name: str, low: int, what: str, optional: bool = False) -> None:
            value = getattr(self, name)
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
            need(ok or (optional and value is None), name, what)

        number("temperature", 0.0, math.inf, "a finite number ≥ 0 (0 is greedy)")
        number("top_p", 0.0, 1.0, "in (0, 1]", above=True)
        number("min_p", 0.0, 1.0, "in [0, 1]")
        number("presence_penalty", -2.0, 2.0, "in [−2, 2]")
        number("frequency_penalty", -2.0, 2.0, "in [−2, 2]")
        number("repetition_penalty", 0.01, 100.0, "in [0.01, 100] (1 is off)")
        integer("n", 1, "an integer ≥ 1")
        integer("beam_width", 1, f"an integer in [1, {MAX_BEAM}]")
        need(self.beam_width <= MAX_BEAM, "beam_width", f"an integer in [1, {MAX_BEAM}]")
        number("length_penalty", -10.0, 10.0, "in [−10, 10]")
        stopping = self.early_stopping
        need(isinstance(stopping, bool) or stopping == "never", "early_stopping", 'True, False or "never"')
        integer("top_k", -1, "an integer ≥ −1 (0 and −1 are off)")
        integer("min_tokens", 0, "an integer ≥ 0")
        integer("max_tokens", 1, "an integer ≥ 1, or None", optional=True)
        integer("logprobs", -1, "an integer ≥ 0, −1 (whole vocabulary), or None", optional=True)
        integer("prompt_logprobs", -1, "an integer ≥ 0, −1 (whole vocabulary), or None", optional=True)
        integer("seed", 0, "an integer ≥ 0, or None", optional=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            need(isinstance(getattr(self, name), bool), name, "True or False")
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias maps token ids to numbers in [−100, 100], got {token!r}: {bias!r}"
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids is empty: nothing could be sampled; leave it None")
        if self.beam_width > 1:
            self._check_beams()
        elif self.length_penalty != 1 or self.early_stopping is not False:
            raise InvalidRequestError("length_penalty and early_stopping are beam search's: set beam_width above 1")
        elif self.n > 1 and self.temperature == 0:
            raise InvalidRequestError(f"n is {self.n} with temperature 0: greedy samples are all the same; use n=1")

    def _check_beams(self) -> None:
        if self.n > self.beam_width:
            raise InvalidRequestError(f"n is {self.n}, but beam_width {self.beam_width} gives at most as many outputs")
        off: dict[str, tuple[float, ...]] = {
            "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,),
            "frequency_penalty": (0,), "repetition_penalty": (1,),
        }  # fmt: skip
        for name, values in off.items():
            if (value := getattr(self, name)) not in values:
                raise InvalidRequestError(
                    f"{name} is {value} with beam_width {self.beam_width}: beam search scores by the model's own "
                    f"distribution; leave {name} at {' or '.join(map(str, values))}"
                )

    def _check_stops(self) -> None:
        stop = self.stop_strings
        if not all(isinstance(s, str) and s for s in stop):
            raise InvalidRequestError(f"stop must hold non-empty strings, got {list(stop)!r}")
        if not all(isinstance(w, str) and w for w in self.bad_words or ()):
            raise InvalidRequestError(f"bad_words must hold non-empty strings, got {self.bad_words!r}")
        if self.include_stop_str_in_output and not stop:
            raise InvalidRequestError("include_stop_str_in_output is set but stop is empty: nothing to include")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): the output can't be both"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also where one string was given."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__

    @property
    def penalised(self) -> bool:
        """Whether token counts matter to this request."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _is_array(value: Any) -> bool:
    """NumPy's and JAX's arrays, whose elements are not Python numbers."""
    return hasattr(value, "__array__")
