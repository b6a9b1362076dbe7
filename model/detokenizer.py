"""From token ids back to text, all at once or token by token.

Every token of the Llama family stands for fixed bytes, and text is the UTF-8 reading of all bytes in a row:

    ids      [ 2201 |  240  |  241  |  98  |  99  | 30 ]
    bytes    [ "Hi" | F0    | 9F    | 98   | 80   | "!" ]
    deltas     "Hi"   ""      ""      ""     "😀"   "!"

So streaming needs no window over ids: an incremental UTF-8 decoder holds at most three bytes, and a byte that
can't continue a character becomes U+FFFD as soon as that is certain.
"""

import codecs
import copy
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specax.model.errors import CheckpointError

if TYPE_CHECKING:
    from specax.model.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_PENDING = 3  # bytes of an unfinished UTF-8 character


def byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: the printable character that stands for each of the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = byte_alphabet()


@dataclasses.dataclass(frozen=True)
class TokenSpelling:
    """How a tokenizer's token strings spell bytes; read from the decoder of its `tokenizer.json`.

    Equal to the library's decoder, but for one case: where byte tokens (`<0x80>`) in a row are not all valid
    UTF-8, the library replaces every byte of that row, also those of whole characters before it. Here only
    the invalid bytes become U+FFFD, so text that was streamed never has to be taken back.
    """

    byte_level: bool = False  # GPT-2's alphabet; else token strings are text, and the fields below hold
    replacements: tuple[tuple[str, str], ...] = ()  # (pattern, text), in order: ("▁", " ")
    byte_fallback: bool = False  # "<0x0A>" is the byte 0A
    strip_leading_space: bool = False  # one space at the start of the whole text is not part of it

    @classmethod
    def from_decoder(cls, decoder: Any) -> "TokenSpelling":
        """Reads a `tokenizers` decoder.

        Raises:
          CheckpointError: the decoder is missing, or not one of the byte-level and SentencePiece BPE ones.
        """
        steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        replaces = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
        rest = steps[len(replaces) :]
        spelling = cls(
            replacements=tuple((step["pattern"]["String"], step["content"]) for step in replaces),
            byte_fallback="ByteFallback" in kinds,
            strip_leading_space="Strip" in kinds,
        )
        known: list[dict[str, Any]] = [{"type": "ByteFallback"}] if spelling.byte_fallback else []
        # Without Fuse, Strip would work on every token.
        known += [{"type": "Fuse"}] if "Fuse" in kinds or spelling.strip_leading_space else []
        known += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if "Strip" in kinds else []
        if not steps or rest != known:
            raise CheckpointError(
                f"tokenizer: decoder is {' + '.join(kinds) or None}; supported: ByteLevel, or Replace + "
                "ByteFallback + Fuse + Strip of one leading space (SentencePiece BPE)"
            )
        return spelling

    def token_bytes(self, token: str) -> bytes:
        """The bytes that a token string stands for."""
        if self.byte_level:
            # As in the library, a token with a character outside the alphabet (an added one) is literal text.
            spelled = [_BYTE_ALPHABET.get(char, -1) for char in token]
            return token.encode() if -1 in spelled else bytes(spelled)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for pattern, text in self.replacements:
            token = token.replace(pattern, text)
        return token.encode()


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


class IncrementalDetokenizer:
    """Turns one sequence's ids into text as they come: `push` gives final text, `flush` what is left.

    The deltas in a row equal `tokenizer.decode(prompt_ids + ids)` without the text of the prompt; a character
    that the prompt leaves unfinished comes out whole with the token that completes it. O(1) time per token,
    at most three bytes held back.
    """

    def __init__(
        self, tokenizer: "Tokenizer", prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.spelling.strip_leading_space
        # The prompt matters only by its unfinished character and by not being empty: read its last bytes.
        tail: list[int] = []
        length = 0
        for token_id in reversed(prompt_ids):
            if token_id not in self._skip and (size := len(tokenizer.token_bytes(token_id))):
                tail.append(token_id)
                length += size
                if length > _MAX_PENDING:
                    break
        for token_id in reversed(tail):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that `token_id` makes final, perhaps empty."""
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def copy(self) -> "IncrementalDetokenizer":
        """A second one with the same past."""
        twin = copy.copy(self)
        twin._utf8 = copy.copy(self._utf8)
        return twin

    def flush(self) -> str:
        """U+FFFD for an unfinished character at the end of the sequence, else an empty string."""
        return self._utf8.decode(b"", final=True)
