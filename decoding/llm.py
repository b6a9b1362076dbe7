"""LLM: a model, its tokenizer and an engine, for a few lines of Python."""

import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specax.decoding.config import EngineConfig
from specax.decoding.engine import Engine
from specax.decoding.errors import InvalidRequestError
from specax.decoding.outputs import RequestOutput, completed
from specax.decoding.sampling_params import SamplingParams
from specax.model.checkpoint import open_checkpoint
from specax.model.decoder import Decoder
from specax.model.errors import CheckpointError, SpecaxError
from specax.model.loading import load_model, resolve
from specax.model.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Message = Mapping[str, Any]


class LLM:
    """A loaded model that answers. `engine` is there for those who want the loop themselves.

    One thread uses it. Streams and generate may run side by side, and beside requests submitted to `engine`,
    whose outputs stay there for whoever calls `engine.step`.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None = None, engine: EngineConfig | None = None):
        if not isinstance(engine, EngineConfig | None):
            raise InvalidRequestError(f"engine must be an EngineConfig, got {type(engine).__name__}")
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model, engine, tokenizer)
        self._mine: set[str] = set()

    @classmethod
    def from_pretrained(
        cls,
        path: str | pathlib.Path,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        engine: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "LLM":
        """Loads a demo model ("smollm2"), a Hugging Face style directory or a .gguf file.

        Args:
          dtype: "bfloat16" by default on an accelerator, "float32" on a CPU.
          mesh: devices to split heads, MLP and vocabulary over (`specax.sharding.make_mesh`); None: one.
          progress: called with (parameters loaded, parameters in all).

        Raises:
          CheckpointError: the checkpoint can't be used; the message says which part and why. A checkpoint
            without a tokenizer loads, and takes token ids only.
        """
        checkpoint = open_checkpoint(resolve(path))
        tokenizer = checkpoint.tokenizer()  # before the weights: what is wrong shows at once
        return cls(load_model(checkpoint, dtype, mesh, progress=progress), tokenizer, engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts (texts, or lists of token ids) and returns them in order, all samples whole.

        Args:
          params: one for all prompts, or one per prompt.
          progress: called with (prompts finished, prompts in all).

        Raises:
          InvalidRequestError, CapacityError: a prompt or parameter is wrong; then none of them runs.
        """
        many = _as_list(prompts)
        params = SamplingParams() if params is None else params
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} SamplingParams for {len(many)} prompts: give one or one per prompt")
        ids: list[str] = []
        try:
            for prompt, p in zip(many, each, strict=True):
                ids.append(self._submit(prompt, p))
            return self._drain(ids, progress)
        except BaseException:  # also Ctrl-C: the engine is left without work of ours
            for request_id in ids:
                self.engine.abort(request_id)
            raise

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several: messages are {"role": …, "content": …}.

        Further keywords go to the chat template.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequestError(f"messages must be a list of dicts, got {type(messages).__name__}")
        one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages
        return self.generate([self.chat_tokens(c, **template) for c in conversations], params)  # type: ignore[arg-type]

    def chat_tokens(self, messages: Sequence[Message], **template: Any) -> list[int]:
        """A conversation as the model's chat template writes it, ready for the assistant's answer."""
        if self.tokenizer is None:
            raise CheckpointError("this model has no tokenizer: pass token ids to generate")
        try:
            return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, **template)
        except CheckpointError:
            raise
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the answer's text piece by piece as it becomes final. Closing the iterator aborts.

        Raises:
          InvalidRequestError: at the call, before the first piece.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.beam_width > 1:
            raise InvalidRequestError("beams are known only at the end, not piece by piece: use generate")
        if params.n != 1:
            raise InvalidRequestError(f"stream gives one sample, n is {params.n}: use generate")
        if self.tokenizer is None:
            raise InvalidRequestError("stream yields text, and this model has no tokenizer: use engine.step")
        pieces = self._pieces(self._submit(prompt, params))
        next(pieces)  # enters its `try`: an iterator that is closed or dropped unread aborts too
        return pieces

    def stats(self) -> dict[str, Any]:
        """The engine's counters; see Engine.stats."""
        return self.engine.stats()

    def close(self) -> None:
        """Keeps what is cached for a later process, if there is a disk tier; see Engine.close."""
        self.engine.close()

    def _submit(self, prompt: Prompt, params: SamplingParams) -> str:
        request_id = self.engine.submit(self._tokens(prompt), params)
        self._mine.add(request_id)
        return request_id

    def _step(self) -> list[RequestOutput]:
        """A step's outputs of our own requests; those of others stay with the engine."""
        mine: list[RequestOutput] = []
        others: list[RequestOutput] = []
        for out in self.engine.step():
            (mine if out.request_id in self._mine else others).append(out)
            if out.finished:
                self._mine.discard(out.request_id)
        self.engine.hand_back(others)
        return mine

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise InvalidRequestError("the prompt is text, and this model has no tokenizer: pass token ids")
        return self.tokenizer.encode(prompt)

    def _drain(self, ids: list[str], progress: Callable[[int, int], None] | None) -> list[RequestOutput]:
        requests = {request_id: self.engine.request(request_id) for request_id in ids}
        done = 0
        while done < len(ids):
            for out in self._step():
                if out.finished and out.request_id in requests:
                    done += 1
                    if progress:
                        progress(done, len(ids))
        return [completed(request) for request in requests.values() if request is not None]

    def _pieces(self, request_id: str) -> Iterator[str]:
        request = self.engine.request(request_id)
        assert request is not None
        parts, given = request.sequences[0].text.parts, 0
        try:
            yield ""
            while True:
                if given < len(parts):  # whoever made the step: streams may run side by side
                    text, given = "".join(parts[given:]), len(parts)
                    yield text
                elif request.finished:
                    if request.sequences[0].finish_reason == "error":
                        raise SpecaxError(f"the stream broke off: {request.sequences[0].stop_reason}")
                    return
                else:
                    self._step()
        finally:
            self.engine.abort(request_id)


def _as_list(prompts: Any) -> list[Any]:
    """The prompts one by one: from a text, a sequence of token ids, or an iterable of these.

    Raises:
      InvalidRequestError: it is none of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, Mapping | bytes | set | frozenset):
        raise InvalidRequestError(
            f"prompts must be a text, a list of token ids, or a list of these, got {type(prompts).__name__}"
        )
    many = np.asarray(prompts).tolist() if hasattr(prompts, "__array__") else list(prompts)
    one = bool(many) and not hasattr(many[0], "__len__")
    return [many] if one else many
