"""LLM: a model, its tokenizer and an engine, for a few lines of Python."""

import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from specax.decoding.config import EngineConfig
from specax.decoding.engine import Engine, completed
from specax.decoding.errors import InvalidRequestError
from specax.decoding.outputs import RequestOutput
from specax.decoding.sampling_params import SamplingParams
from specax.model.checkpoint import open_checkpoint
from specax.model.decoder import Decoder
from specax.model.errors import CheckpointError, SpecaxError
from specax.model.loading import load_model, resolve
from specax.model.tokenizer import Tokenizer

type Prompt = str | Sequence[int]
type Message = Mapping[str, Any]


class LLM:
    """A loaded model that answers. `engine` is there for those who want the loop themselves."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None = None, engine: EngineConfig | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.engine = Engine(model, engine, tokenizer)

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
        model = load_model(checkpoint, dtype, mesh, progress=progress)
        return cls(model, checkpoint.tokenizer(), engine)

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
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise InvalidRequestError(f"{len(each)} SamplingParams for {len(many)} prompts: give one or one per prompt")
        ids: list[str] = []
        try:
            for prompt, p in zip(many, each, strict=True):
                ids.append(self.engine.submit(self._tokens(prompt), p))
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
            raise InvalidRequestError(f"chat messages: {error}") from error

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the answer's text piece by piece as it becomes final. Closing the iterator aborts.

        Raises:
          InvalidRequestError: at the call, before the first piece.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidRequestError(f"stream gives one sample, n is {params.n}: use generate")
        if self.tokenizer is None:
            raise InvalidRequestError("stream yields text, and this model has no tokenizer: use engine.step")
        pieces = self._pieces(self.engine.submit(self._tokens(prompt), params))
        next(pieces)  # enters its `try`: an iterator that is closed or dropped unread aborts too
        return pieces

    def stats(self) -> dict[str, Any]:
        """The engine's counters; see Engine.stats."""
        return self.engine.stats()

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
            for out in self.engine.step():
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
                    self.engine.step()
        finally:
            self.engine.abort(request_id)


def _is_one(prompts: Any) -> bool:
    """Whether this is a single prompt: a text, or a sequence of token ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))
