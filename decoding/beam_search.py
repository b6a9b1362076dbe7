"""Beam search: which continuations of a request's beams go on, which are finished, and when the search is over.

The rules are those of Hugging Face transformers (`GenerationMixin._beam_search`, version 5.24). Every round ranks
all continuations of all beams by the sum of their log-probabilities. A finished one (EOS, a stop, max_tokens) among
the best `beam_width` becomes a hypothesis; the best unfinished ones are the next beams. Hypotheses compete by
sum / length ** length_penalty, over generated tokens only.

A beam is a `Sequence`. Beams share KV pages as forks do, so that a round copies no KV: a beam that two children
continue is forked, one that nobody continues gives its pages back (`Scheduler.regroup`). Beams of one request are all
of one length. They run, wait and are preempted together: what is left of a preempted group is the prefix that all
of them share, computed by one leader from which they fork once more.
"""

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from specax.decoding.logprobs import vocab_logprobs
from specax.decoding.outputs import Logprobs
from specax.decoding.request import Request, Sequence
from specax.decoding.text import push_token
from specax.paged.radix_tree import common_prefix

NOTHING_LEFT = "no token can be sampled: all of them are forbidden, or the logits are not numbers"


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, likeliest first."""

    tokens: np.ndarray  # int32 [top]
    logprobs: np.ndarray  # float32 [top], biases and bans included; −inf: forbidden
    whole: np.ndarray | None = None  # the model's own log-probabilities, float32 [vocab], if they are asked for


class Continuation(NamedTuple):
    parent: int  # which beam
    place: int  # in its candidates
    token: int
    cumulative_logprob: float


@dataclasses.dataclass(frozen=True)
class Beam:
    """An output, finished (a hypothesis) or not."""

    tokens: array[int]  # prompt included
    text: Any  # decoding.text.TextStream, or None
    logprobs: Logprobs
    cumulative_logprob: float
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def put(self, sequence: Sequence) -> None:
        """Makes it the contents of a sequence; not of its KV."""
        sequence.tokens, sequence.text, sequence.logprobs = self.tokens, self.text, self.logprobs
        sequence.cumulative_logprob = self.cumulative_logprob
        sequence.finish_reason, sequence.stop_reason = self.finish_reason, self.stop_reason


def rank(scores: list[float], candidates: list[Candidates]) -> Iterator[Continuation]:
    """All possible continuations of beams with these cumulative log-probabilities, best first.

    Among equals the better beam is first (beams are sorted), then its earlier candidate.
    """
    totals = np.stack([score + c.logprobs.astype(np.float64) for score, c in zip(scores, candidates, strict=True)])
    for flat in np.argsort(-totals, axis=None, kind="stable").tolist():
        parent, place = divmod(flat, totals.shape[1])
        total = float(totals[parent, place])
        if total == -np.inf:
            return
        yield Continuation(parent, place, int(candidates[parent].tokens[place]), total)


def penalised(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """The score of `length` generated tokens. The penalty is an exponent: above 0 it favours long outputs."""
    return float(cumulative_logprob / length**length_penalty)


def can_improve(
    best: float,
    worst: float,
    length: int,
    max_length: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> bool:
    """Whether a beam may still beat a hypothesis, given as many hypotheses as there may be.

    Args:
      best: the cumulative log-probability of the best beam, of `length` generated tokens.
      worst: the score of the worst hypothesis.
    """
    if early_stopping is True:
        return False
    longest = max_length if early_stopping == "never" and length_penalty > 0 else length
    return penalised(best, longest, length_penalty) > worst


class BeamGroup:
    """The search of one request. Its first sequences are the beams, best first; the others wait for a fork."""

    def __init__(self, request: Request, eos: frozenset[int]):
        self.request, self._eos = request, eos
        self.hypotheses: list[Beam] = []  # at most beam_width, best first
        self._candidates: dict[Sequence, Candidates] = {}
        self.live = 1  # number of beams
        self._whole: array[int] | None = None  # of a suspended group: all the leader's tokens

    @property
    def length(self) -> int:
        """Known tokens of each beam, prompt included."""
        return len(self.beams[0].tokens if self._whole is None else self._whole)

    @property
    def beams(self) -> list[Sequence]:
        return self.request.sequences[: self.live]

    # --- preemption

    def suspend(self) -> None:
        """The beams lose their KV: the first one becomes the leader, which computes what all of them share."""
        self._candidates.clear()
        if self._whole is not None or self.live == 1:
            return
        first, *others = (np.frombuffer(beam.tokens, np.int32) for beam in self.beams)
        shared = min(common_prefix(first, other) for other in others)
        self._whole = self.beams[0].tokens
        self.beams[0].tokens = self._whole[:shared]

    @property
    def suspended(self) -> bool:
        return self._whole is not None

    def resume(self) -> list[Sequence]:
        """The leader has computed the shared prefix: every beam forks from it. Returns their parents."""
        assert self._whole is not None
        leader = self.beams[0]
        leader.tokens, self._whole = self._whole, None
        return [leader] * self.live

    # --- a round

    def offer(self, beam: Sequence, candidates: Candidates) -> bool:
        """Takes the candidates of one beam; True once all beams have theirs."""
        self._candidates[beam] = candidates
        return len(self._candidates) == self.live

    def advance(self) -> list[tuple[Sequence, Beam]]:
        """Plays a round: the next beams, best first, each with its parent; none of them: the search is over.

        Raises what a tokenizer raises.
        """
        request, params = self.request, self.request.params
        beams, candidates = self.beams, [self._candidates[beam] for beam in self.beams]
        self._candidates.clear()
        if any(np.isnan(c.logprobs).any() for c in candidates):
            self.hypotheses = []
            return []
        length = beams[0].output_len + 1
        children: list[tuple[Sequence, Beam]] = []
        for place, continuation in enumerate(rank([b.cumulative_logprob for b in beams], candidates)):
            if place >= params.beam_width and (len(children) == params.beam_width or length == request.max_tokens):
                break
            parent = beams[continuation.parent]
            child = self._grow(parent, candidates[continuation.parent], continuation)
            if child.finish_reason is None:
                children.append((parent, child))
            elif place < params.beam_width:
                self.hypotheses.append(child)
        self.hypotheses.sort(key=lambda beam: -self.score(beam))
        del self.hypotheses[params.beam_width :]
        if children and len(self.hypotheses) == params.beam_width:
            best, worst = children[0][1].cumulative_logprob, self.score(self.hypotheses[-1])
            limits = length, request.max_tokens, params.length_penalty, params.early_stopping
            children = children if can_improve(best, worst, *limits) else []
        self.live = len(children)
        return children

    def score(self, beam: Beam) -> float:
        length = len(beam.tokens) - len(self.request.prompt)
        return penalised(beam.cumulative_logprob, length, self.request.params.length_penalty)

    def _grow(self, parent: Sequence, candidates: Candidates, continuation: Continuation) -> Beam:
        """A copy of the parent with one more token."""
        token, logprobs = continuation.token, parent.logprobs
        if (whole := candidates.whole) is not None:
            logprobs = [*logprobs, vocab_logprobs(token, self.request.params.logprobs or 0, whole)]
        text = None if parent.text is None else parent.text.copy()
        _, reason, detail = push_token(text, token, parent.output_len + 1, self.request, self._eos)
        tokens = parent.tokens[:]
        tokens.append(token)
        return Beam(tokens, text, logprobs, continuation.cumulative_logprob, reason, detail)

    # --- the end

    def best(self) -> list[Beam]:
        """The n best hypotheses: fewer, where there are no more possible outputs."""
        return self.hypotheses[: self.request.params.n] or self.nothing("error", NOTHING_LEFT)

    def nothing(self, reason: str, detail: str | None = None) -> list[Beam]:
        """n empty outputs, of a search that was broken off."""
        prompt = array("i", self.request.prompt_array.tobytes())
        return [Beam(prompt[:], None, [], 0.0, reason, detail) for _ in range(self.request.params.n)]
