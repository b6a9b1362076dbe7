"""What comes back: completed requests, and the deltas of one engine step."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specax.decoding.request import Request


class Logprob(NamedTuple):
    """Log-probability of a token under the model's own distribution, and its rank (1 is the likeliest)."""

    logprob: float
    rank: int


# One entry per token: the token itself and the likeliest alternatives. None: the first token of a prompt.
type Logprobs = list[dict[int, Logprob] | None]


@dataclasses.dataclass
class RequestMetrics:
    """Times in seconds on the monotonic clock, and counts of tokens."""

    arrival: float
    scheduled: float | None = None  # first admitted
    first_token: float | None = None
    finish: float | None = None
    computed_tokens: int = 0  # tokens that went through the model, recomputation included
    cached_tokens: int = 0  # tokens found in the prefix cache when it was first admitted, or shared by forks
    preemptions: int = 0


@dataclasses.dataclass
class CompletionOutput:
    """One sample: all of it, or in a step's output what is new."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None  # "stop" | "length" | "abort" | "error"; None while it runs
    stop_reason: str | int | None = None  # the stop string or token id that ended it, or the error's text
    logprobs: Logprobs | None = None
    # Beam search: the sum of the log-probabilities of token_ids, with biases as they were applied.
    cumulative_logprob: float | None = None


@dataclasses.dataclass
class RequestOutput:
    """A request's samples: all of them when finished, the changed ones in a step's output."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: Logprobs | None = None


def completed(request: "Request") -> RequestOutput:
    """All of a finished request."""
    outputs = [
        CompletionOutput(
            s.index, s.output, s.text.text if s.text else "", s.finish_reason, s.stop_reason,
            s.logprobs if request.params.logprobs is not None else None,
            s.cumulative_logprob if request.beams is not None else None,
        )
        for s in request.sequences
    ]  # fmt: skip
    return report(request, outputs)


def report(request: "Request", outputs: list[CompletionOutput]) -> RequestOutput:
    """What is new of a request's samples, and how the request stands."""
    return RequestOutput(
        request.id, request.prompt, outputs, request.finished, request.metrics, request.prompt_logprobs
    )
