"""From tokens to text as it becomes final: detokenisation and stop strings."""

import copy
from typing import TYPE_CHECKING

from specax.decoding.request import Request
from specax.model.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:  # (token ids need no tokenizer)
    from specax.model.tokenizer import Tokenizer


class StopChecker:
    """Finds the first stop string in a stream, holding back only text that may still become one."""

    def __init__(self, stops: tuple[str, ...], include: bool):
        self._stops, self._include = stops, include
        self._held = ""

    def push(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns the text that is final now, and the stop string if one was completed.

        While not `active` (fewer than min_tokens tokens) nothing stops and nothing is held back.
        """
        text = self._held + text
        self._held = ""
        if not active or not self._stops:
            return text, None
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))  # the one that was complete first
            return text[: at + len(stop) if self._include else at], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The held-back text, when the output ended without a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextStream:
    """The growing text of one sequence."""

    def __init__(
        self, tokenizer: "Tokenizer", prompt: list[int], stops: tuple[str, ...], include: bool, skip_special: bool
    ):
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special)
        self._stop = StopChecker(stops, include) if stops else None
        self.parts: list[str] = []

    def push(self, token: int, stoppable: bool) -> tuple[str, str | None]:
        """Takes one token; returns the newly final text and the stop string that it completed, if any."""
        text = self._detokenizer.push(token)
        if self._stop is None:
            if text:
                self.parts.append(text)
            return text, None
        return self._keep(*self._stop.push(text, stoppable))

    def flush(self, stoppable: bool) -> tuple[str, str | None]:
        """The rest, at the end of the output (the last character may complete a stop string)."""
        text = self._detokenizer.flush()
        if self._stop is None:
            return self._keep(text, None)
        text, stop = self._stop.push(text, stoppable)
        if stop is None:
            text += self._stop.flush()
        return self._keep(text, stop)

    def _keep(self, text: str, stop: str | None) -> tuple[str, str | None]:
        if text:
            self.parts.append(text)
        return text, stop

    def copy(self) -> "TextStream":
        """A second stream with the same past."""
        twin = copy.copy(self)
        twin._detokenizer, twin._stop = self._detokenizer.copy(), copy.copy(self._stop)
        twin.parts = self.parts[:]
        return twin

    @property
    def text(self) -> str:
        return "".join(self.parts)


def push_token(
    text: TextStream | None, token: int, length: int, request: Request, eos: frozenset[int]
) -> tuple[str, str | None, str | int | None]:
    """An output gets its `length`-th token: the newly final text, finish_reason and stop_reason, if it ends here.

    Raises what a tokenizer raises.
    """
    stoppable = length >= request.params.min_tokens
    ends = stoppable and token in request.stop_ids
    full = length >= request.max_tokens
    # The token that ends the output is not part of its text.
    new, stop = text.push(token, stoppable) if text is not None and not ends else ("", None)
    if (ends or full) and stop is None and text is not None:
        rest, stop = text.flush(stoppable and not ends)
        new += rest
    if stop is not None:
        return new, "stop", stop
    if ends:
        return new, "stop", token if token not in eos else None
    return new, "length" if full else None, None
