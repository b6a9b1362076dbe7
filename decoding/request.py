"""Request and Sequence: what the engine knows of a prompt and of each sample that grows from it."""

import dataclasses
import enum
import time
from array import array
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from specax.decoding.outputs import Logprobs, RequestMetrics
from specax.decoding.sampling_params import SamplingParams
from specax.paged import Match, Namespace, Node, PageTable

if TYPE_CHECKING:
    from specax.decoding.beam_search import BeamGroup


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue; holds no pages
    FORKING = "forking"  # sample 1…n−1, until sample 0 has computed the prompt; a beam that is not in use
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sample. `tokens` is what is known, `computed` how far the KV cache goes.

    Prefill, decode and recovery after preemption are all the same: catch `computed` up with `tokens`.
    """

    __slots__ = (
        "__weakref__", "computed", "cumulative_logprob", "finish_reason", "index", "logprobs", "match", "node",
        "request", "rows", "seed", "slot", "status", "stop_reason", "table", "text", "tokens",
    )  # fmt: skip

    def __init__(self, request: "Request", index: int, table: PageTable, seed: int):
        self.request, self.index, self.table, self.seed = request, index, table, seed
        self.tokens = array("i", request.prompt_array.tobytes())
        self.computed = 0
        self.status = Status.WAITING if index == 0 else Status.FORKING
        self.slot: int | None = None  # sampler slot, while running
        self.rows = 1  # rows of the batch that it uses, or keeps for its forks
        self.node: Node | None = None  # the part of the prefix cache that is locked for it
        self.match: Match | None = None  # what the cache had of it when it was last looked up, while waiting
        self.text: Any = None  # decoding.text.TextStream, if the engine has a tokenizer
        self.logprobs: Logprobs = []
        self.cumulative_logprob = 0.0  # of a beam's output
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def output(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.tokens[len(self.request.prompt) :].tolist()

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Known tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed

    def known(self, count: int) -> np.ndarray:
        """The first `count` tokens, int32 (a copy)."""
        return np.frombuffer(self.tokens, np.int32, count).copy() if count else np.zeros(0, np.int32)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its `n` sequences (`beam_width` of them while beam search runs)."""

    id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int  # effective: SamplingParams' and the model's length
    stop_ids: frozenset[int]  # EOS unless ignored, and stop_token_ids
    banned_tokens: tuple[int, ...]  # bad words of one token
    banned_words: tuple[tuple[int, ...], ...]  # and of more
    number: int = 0  # in order of submission
    priority: int = 0  # class of service: the higher, the sooner
    tenant: str | None = None  # on whose behalf; None: nobody in particular
    ttft_target: float | None = None  # seconds from arrival to the first token that were promised
    namespace: Namespace = ()  # whose KV it may share
    admitted: bool = False  # it ran before
    metrics: RequestMetrics = dataclasses.field(default_factory=lambda: RequestMetrics(arrival=time.monotonic()))
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    prompt_logprobs: Logprobs | None = None
    beams: "BeamGroup | None" = None  # its beam search, if it asks for one

    @cached_property
    def prompt_array(self) -> np.ndarray:
        """The prompt as int32 [prompt_len]."""
        return np.asarray(self.prompt, np.int32)

    @property
    def finished(self) -> bool:
        return not self.live

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.status is not Status.FINISHED]
