"""Tokenizer: text to token ids and back, read from a Hugging Face directory or from GGUF metadata."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from specax.model import gguf_tokenizer
from specax.model.chat_template import ChatTemplate
from specax.model.detokenizer import TokenSpelling
from specax.model.errors import CheckpointError

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A `tokenizers` pipeline with what generation needs around it: end ids, chat template, exact decoding.

    Attributes:
      bos_token_id: the id that begins a sequence, None where the model has none.
      eos_token_ids: the ids that end a reply, the main one first.
      special_ids: the ids that `decode` leaves out by default.
      spelling: how token strings spell bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        roles: Mapping[str, int],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """Wraps `backend`; `roles` gives ids for bos_token, eos_token, unk_token and pad_token where there.

        Raises:
          CheckpointError: the decoder of `backend` is none of the supported ones.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._roles = dict(roles)
        self.spelling = TokenSpelling.from_decoder(backend.decoder)
        self.bos_token_id = roles.get("bos_token")
        main = [roles["eos_token"]] if "eos_token" in roles else []
        self.eos_token_ids = tuple(dict.fromkeys([*main, *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes: dict[int, bytes] = {}
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template)

    @classmethod
    def from_directory(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Reads `tokenizer.json` and, where they are there, the files beside it that transformers reads.

        These are `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`, and the chat
        template in `chat_template.jinja`, `chat_template.json` or `tokenizer_config.json`, in that order.

        Raises:
          CheckpointError: no `tokenizer.json`, a malformed file, a bos or eos token outside the vocabulary.
        """
        folder = pathlib.Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"tokenizer: {file} is missing; a checkpoint directory must hold it")
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{file}: not a file that the tokenizers library reads: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        tokens = {**_read_json(folder / "special_tokens_map.json"), **_present(config)}
        generation = _read_json(folder / "generation_config.json")

        roles: dict[str, int] = {}
        for role in _ROLES:
            if (text := _token_text(tokens.get(role))) is None:
                continue
            index = backend.token_to_id(text)
            if index is not None:
                roles[role] = index
            elif role in ("bos_token", "eos_token"):
                raise CheckpointError(f"{folder}: {role} is {text!r}, which is not in the vocabulary")
        if "bos_token" not in roles and isinstance(generation.get("bos_token_id"), int):
            roles["bos_token"] = generation["bos_token_id"]
        _mark_special(backend, [tokens.get(role) for role in _ROLES] + _more_special(tokens))
        # transformers: these keys, where there, override what tokenizer.json adds around the text.
        adds = [config.get("add_bos_token"), config.get("add_eos_token")]
        if any(isinstance(add, bool) for add in adds):
            bos, eos = (roles.get(role) if add else None for role, add in zip(_ROLES, adds))
            gguf_tokenizer.set_bos_eos(backend, bos, eos)
        return cls(
            backend,
            roles=roles,
            eos_token_ids=_id_list(generation.get("eos_token_id"), folder / "generation_config.json"),
            chat_template=_find_chat_template(folder, config),
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that GGUF key/value `metadata` (plain Python values) describes.

        Raises:
          CheckpointError: an unsupported tokenizer model or pre-tokenizer, a missing or malformed key.
        """
        backend = gguf_tokenizer.build_backend(metadata)
        ids = {
            role: gguf_tokenizer.token_id(metadata, name)
            for role, name in zip(_ROLES, ("bos", "eos", "unknown", "padding"))
        }
        # End of turn and end of message also end a reply; older files have them beside a plain end of text.
        ends = [gguf_tokenizer.token_id(metadata, name) for name in ("eot", "eom")]
        return cls(
            backend,
            roles={role: index for role, index in ids.items() if index is not None},
            eos_token_ids=[index for index in ends if index is not None],
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens counted; the model's table may be larger (padding)."""
        return self._size

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, None for a model without one."""
        return None if self._chat_template is None else self._chat_template.source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. Special tokens written in it are parsed as such, the default of transformers.

        `add_special_tokens` puts BOS (and EOS) around it where the checkpoint says so.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        As transformers with `clean_up_tokenization_spaces=False`; `TokenSpelling` states the one difference.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(index) for index in ids if index not in skip)
        if self.spelling.strip_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id adds to the text, empty for an id outside the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if token is None else self.spelling.token_bytes(token)
        return data

    def id_to_token(self, token_id: int) -> str | None:
        """The token string as the vocabulary spells it, None for an id outside the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self._size else None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a chat. `variables` (`tools`, `bos_token`, ...) are passed to the template.

        Raises:
          CheckpointError: the checkpoint has no chat template, or a broken one.
          ValueError: bad messages (see `ChatTemplate.render`).
        """
        if self._chat_template is None:
            raise CheckpointError(
                "this checkpoint has no chat template; pass the whole prompt as text to encode() instead"
            )
        tokens = {role: self.id_to_token(index) for role, index in self._roles.items()}
        return self._chat_template.render(messages, add_generation_prompt, **{**tokens, **variables})

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a chat. A template writes its own BOS, so `encode` adds none.

        Raises: as `render_chat`.
        """
        text = self.render_chat(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    # A null in tokenizer_config.json must not hide what special_tokens_map.json says.
    return {key: value for key, value in config.items() if value is not None}


def _token_text(value: Any) -> str | None:
    """A token as the JSON files write it: a string, or a serialised AddedToken."""
    return value.get("content") if isinstance(value, dict) else value


def _more_special(tokens: Mapping[str, Any]) -> list[Any]:
    named = (tokens.get(key) for key in ("additional_special_tokens", "extra_special_tokens"))
    return [token for value in named if isinstance(value, list) for token in value]


def _mark_special(backend: tokenizers.Tokenizer, values: Iterable[Any]) -> None:
    """Makes named tokens special; one outside the vocabulary has no row in the model and is left out."""
    texts = [text for value in values if isinstance(text := _token_text(value), str)]
    added = [tokenizers.AddedToken(text, normalized=False, special=True) for text in texts]
    backend.add_special_tokens([token for token in added if backend.token_to_id(token.content) is not None])


def _id_list(value: Any, path: pathlib.Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(index, int) for index in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return ids


def _find_chat_template(folder: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder}: chat_template is a {type(template).__name__}; it must be a string, or a list of "
            "{name, template} objects with one named 'default'"
        )
    return template
