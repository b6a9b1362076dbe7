"""A `tokenizers` pipeline built from GGUF metadata (`tokenizer.ggml.*`).

GGUF holds the vocabulary and names the rest. What a name means follows llama.cpp (`llama-vocab.cpp`) and the
`tokenizer.json` of the models that use it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specax.model.errors import CheckpointError

# Values of `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _SYMBOLS, _SPACES))


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before BPE, and what else comes with that name."""

    split: str | None = None  # a regular expression; None is GPT-2's own
    single_digits: bool = False  # every digit alone, before the split
    nfc: bool = False  # Unicode normal form C first
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # when `tokenizer.ggml.add_bos_token` is missing


_GPT2 = _PreTokenizer()
_PRE_TOKENIZERS = {
    "default": _GPT2,  # a file that doesn't say; transformers reads it as GPT-2 too
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(single_digits=True),
    "llama-bpe": _PreTokenizer(split=_LLAMA3, whole_words=True, add_bos=True),
    "llama3": _PreTokenizer(split=_LLAMA3, whole_words=True, add_bos=True),
    "llama-v3": _PreTokenizer(split=_LLAMA3, whole_words=True, add_bos=True),
    "qwen2": _PreTokenizer(split=_QWEN2, nfc=True),
}


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The pipeline of `tokenizer.ggml.model` "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE).

    Raises:
      CheckpointError: another model or pre-tokenizer, a missing or malformed list, merges that don't fit.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, add_bos = _byte_level(metadata)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(metadata), True
    else:
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE)"
        )
    _add_tokens(backend, metadata)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    set_bos_eos(
        backend,
        token_id(metadata, "bos") if add_bos else None,
        token_id(metadata, "eos") if add_eos else None,
    )
    return backend


def set_bos_eos(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Makes `encode` put these ids before and after the text; None adds nothing."""
    ids = {"BOS": bos, "EOS": eos}
    present = [(name, index) for name, index in ids.items() if index is not None]
    names = [name for name, _ in present]
    # The names are local to the template: token strings could hold characters that its syntax reserves.
    single = [*(["BOS"] if "BOS" in names else []), "$A", *(["EOS"] if "EOS" in names else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=present)


def token_id(metadata: Mapping[str, Any], role: str) -> int | None:
    """The id in `tokenizer.ggml.<role>_token_id` (bos, eos, eot, eom, unknown, padding), None where absent.

    Raises:
      CheckpointError: it is not an id of the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    value = metadata.get(key)
    size = len(_strings(metadata, "tokens"))
    if value is not None and (not isinstance(value, int) or not 0 <= value < size):
        raise CheckpointError(f"GGUF: {key} is {value!r}; it must be an id below the vocabulary size, {size}")
    return value


def _byte_level(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]
    backend = _bpe(metadata, _file_merges(metadata), ignore_merges=pre.whole_words)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece BPE as in the `tokenizer.json` of Llama 2: text is a list of "▁words", no pre-tokenizer.

    As there and in llama.cpp, the space before the first word is also put after each special token.
    """
    merges = _file_merges(metadata) if "tokenizer.ggml.merges" in metadata else _score_merges(metadata)
    unknown = token_id(metadata, "unknown")
    backend = _bpe(
        metadata,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if prefix else []),
        ]
    )
    return backend


def _bpe(metadata: Mapping[str, Any], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    tokens = _strings(metadata, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise CheckpointError(f"GGUF: tokenizer.ggml.tokens holds {twice!r} twice; each must be there once")
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"GGUF: tokenizer.ggml.merges doesn't fit the vocabulary: {error}") from error


def _file_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(metadata, "merges"):
        # The first character is never the separator: a part may itself begin with a space.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(
                f"GGUF: tokenizer.ggml.merges holds {merge!r}; it must be two tokens and a space"
            )
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _score_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece files have no merges, but scores: any two pieces may join, the best result first.

    Order within a score as in transformers' `generate_merges`.
    """
    tokens = _strings(metadata, "tokens")
    scores = _numbers(metadata, "scores", len(tokens))
    known = set(tokens)
    ranked = []
    for piece, score in zip(tokens, scores):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Marks the tokens that text holds whole: control tokens (special) and user-defined ones (plain).

    A padding id alone makes no token special: files exist where it is an ordinary one, such as "!".
    """
    tokens = _strings(metadata, "tokens")
    kinds = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _numbers(metadata, "token_type", len(tokens))
    ends = {token_id(metadata, role) for role in ("bos", "eos", "eot", "eom")}
    special, plain = [], []
    for index, (token, kind) in enumerate(zip(tokens, kinds)):
        if kind in (_UNKNOWN, _CONTROL) or index in ends:
            special.append(token)
        elif kind == _USER_DEFINED:
            plain.append(token)
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in plain])


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"GGUF: tokenizer.ggml.{name} must be a list of strings, got {str(value)[:50]}")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or len(value) != length:
        got = len(value) if isinstance(value, list) else value
        raise CheckpointError(f"GGUF: tokenizer.ggml.{name} must be a list of {length} numbers, got {got!r}")
    return value
