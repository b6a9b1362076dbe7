"""Tokenizer, chat template and detokenizer, against the tokenizers library and hand-made files."""

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specax.model.chat_template import ChatTemplate
from specax.model.detokenizer import IncrementalDetokenizer, TokenSpelling, byte_alphabet
from specax.model.errors import CheckpointError
from specax.model.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times.",
    "def main():\n    return {'a': 1}\n\n\tprint(x)  # twice",
    "日本語のテキスト、中文文本。 한국어",
    "emoji 😀😀 👩‍👩‍👧 and é à ü ß",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces 42  7",
    "<|im_start|>user\nhi<|im_end|>",
    "it's we'll 'S",
    "\r\n\n x",
    "🏳️‍🌈",
]


def _byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _sentencepiece_vocab() -> tuple[list[str], list[int], list[float]]:
    """Tokens, GGUF token types and scores: control tokens, 256 bytes, pieces, letters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁t", "he", "▁the", "▁▁", "in", "▁é", "ing", "▁d", "og", "▁dog"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzé.,"))
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return tokens + pieces + letters, types, scores


def _gguf_sentencepiece() -> dict[str, Any]:
    tokens, types, scores = _sentencepiece_vocab()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _gguf_byte_level(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def _write(folder: pathlib.Path, backend: tokenizers.Tokenizer, **files: Any) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


BACKEND = _byte_level()
BYTE_LEVEL = Tokenizer.from_gguf_metadata(_gguf_byte_level(BACKEND))
SENTENCEPIECE = Tokenizer.from_gguf_metadata(_gguf_sentencepiece())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])


def _stream(tokenizer: Tokenizer, ids: list[int], **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


def test_gguf_equals_directory(tmp_path: pathlib.Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    directory = Tokenizer.from_directory(_write(tmp_path / "m", BACKEND, tokenizer_config=config))
    messages = [{"role": "user", "content": "quick 12 😀 <|im_end|>"}]
    for text in TEXTS:
        assert directory.encode(text) == BYTE_LEVEL.encode(text) == BACKEND.encode(text).ids
        assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text), skip_special_tokens=False) == text
    assert directory.apply_chat_template(messages) == BYTE_LEVEL.apply_chat_template(messages)
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "special_ids", "chat_template"):
        assert getattr(directory, name) == getattr(BYTE_LEVEL, name)
    assert (BYTE_LEVEL.bos_token_id, BYTE_LEVEL.eos_token_ids) == (1, (2,))
    assert BYTE_LEVEL.special_ids == {0, 1, 2}
    assert BYTE_LEVEL.vocab_size == BACKEND.get_vocab_size()
    assert BYTE_LEVEL.id_to_token(1) == "<|im_start|>"
    assert BYTE_LEVEL.id_to_token(BYTE_LEVEL.vocab_size) is None


def test_sentencepiece_equals_llama_2_pipeline() -> None:
    """The tokenizer.json of Llama 2, written out with its merges in order."""
    tokens, _, _ = _sentencepiece_vocab()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("▁", "▁"),
        ("i", "n"),
        ("▁", "é"),
        ("in", "g"),
        ("▁", "d"),
    ]
    merges += [("o", "g"), ("▁d", "og")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    for text in ["the dog", " the", "  in  ing", "é 😀x", "日本</s>the", "a\nb", "thé.,"]:
        assert SENTENCEPIECE.encode(text) == backend.encode(text).ids
        assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text), skip_special_tokens=False) == "<s> " + (
            text.replace("</s>", "</s> ")
        )
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(" the dog 😀")) == " the dog 😀"
    assert SENTENCEPIECE.encode("the", add_special_tokens=False) == [vocab["▁the"]]


@BOTH
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_ids_stream_to_the_full_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    cut = data.draw(st.integers(0, len(ids)))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(_stream(tokenizer, ids, skip_special_tokens=skip)) == whole
    # After a prompt: what is final in the prompt, then the deltas, again make the whole.
    prompt = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    final = "".join(prompt.push(index) for index in ids[:cut])
    rest = _stream(tokenizer, ids[cut:], prompt_ids=ids[:cut], skip_special_tokens=skip)
    assert final + "".join(rest) == whole


@BOTH
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_random_text_streams_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = _stream(tokenizer, ids, skip_special_tokens=False)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=False)
    assert sum(delta.count("�") for delta in deltas) == text.count("�")
    if tokenizer is BYTE_LEVEL:
        assert "".join(deltas) == text


@settings(max_examples=300, deadline=None)
@given(data=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=24), skip=st.booleans())
def test_byte_level_decode_equals_the_library(data: list[int], skip: bool) -> None:
    assert BYTE_LEVEL.decode(data, skip) == BACKEND.decode(data, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=12), pieces=st.lists(st.sampled_from(["▁the", "▁", "ing", "▁▁"]), max_size=4))
def test_sentencepiece_decode_equals_the_library(text: str, pieces: list[str]) -> None:
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    spelling = TokenSpelling.from_decoder(decoder)
    tokens = [*pieces, *(f"<0x{byte:02X}>" for byte in text.encode()), *pieces]
    data = b"".join(map(spelling.token_bytes, tokens)).removeprefix(b" ")
    assert data.decode() == decoder.decode(tokens)


def test_invalid_bytes_hold_nothing_back() -> None:
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    assert [detokenizer.push(3 + byte) for byte in (0xF0, 0x9F, 0x98, 0x80)] == ["", "", "", "😀"]
    assert [detokenizer.push(3 + 0x80) for _ in range(5)] == ["�"] * 5
    assert [detokenizer.push(3 + byte) for byte in (0xE2, 0x82, 0x41)] == ["", "", "�A"]
    assert detokenizer.push(3 + 0xC3) == ""
    assert (detokenizer.flush(), detokenizer.flush()) == ("�", "")


def test_prompt_and_leading_space() -> None:
    the, dog = (SENTENCEPIECE.encode(word, add_special_tokens=False)[0] for word in ("the", "dog"))
    assert _stream(SENTENCEPIECE, [the, dog]) == ["the", " dog", ""]
    assert _stream(SENTENCEPIECE, [dog], prompt_ids=[1, the]) == [" dog", ""]
    assert _stream(SENTENCEPIECE, [dog], prompt_ids=[1]) == ["dog", ""]
    assert _stream(SENTENCEPIECE, [3 + 0xA9], prompt_ids=[the, 3 + 0xC3]) == ["é", ""]


def test_byte_alphabet_is_the_library_s() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    text = bytes(range(0x20, 0x7F)).decode() + "\x00\n\t é 日本 😀 ÿ"
    (spelled,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert bytes(byte_alphabet()[char] for char in spelled[0]) == text.encode()


def test_unsupported_decoders_are_refused() -> None:
    wordpiece = decoders.WordPiece()
    strip_each = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", left=1)])
    for decoder, name in ((wordpiece, "WordPiece"), (strip_each, "Strip"), (None, "None")):
        with pytest.raises(CheckpointError, match=name):
            TokenSpelling.from_decoder(decoder)


def test_directory_files(tmp_path: pathlib.Path) -> None:
    folder = _write(
        tmp_path / "m",
        BACKEND,
        tokenizer_config={"bos_token": None, "add_bos_token": True, "chat_template": [
            {"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"},
        ]},
        special_tokens_map={"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}},
        generation_config={"eos_token_id": [2, 0]},
    )  # fmt: skip
    tokenizer = Tokenizer.from_directory(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (2, 0))
    assert tokenizer.encode("hi") == [0, *tokenizer.encode("hi", add_special_tokens=False)]
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "<|endoftext|>yes"
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode("yes")  # one BOS, the template's
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert Tokenizer.from_directory(folder).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_directory(folder).render_chat(messages) == "from jinja"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: pathlib.Path) -> None:
    backend = tokenizers.Tokenizer.from_str(BACKEND.to_str())
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_directory(_write(tmp_path / "m", backend))
    assert tokenizer.encode(CORPUS[0]) == BACKEND.encode(CORPUS[0]).ids


def test_bad_directories(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a file that the tokenizers library reads"):
        Tokenizer.from_directory(tmp_path)
    cases: list[tuple[str, Any, str]] = [
        ("tokenizer_config", {"eos_token": "<nope>"}, "eos_token is '<nope>'"),
        ("tokenizer_config", {"chat_template": 3}, "chat_template is a int"),
        ("tokenizer_config", [], "must hold a JSON object"),
        ("generation_config", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ]
    for index, (name, value, match) in enumerate(cases):
        with pytest.raises(CheckpointError, match=match):
            Tokenizer.from_directory(_write(tmp_path / str(index), BACKEND, **{name: value}))
    (folder := _write(tmp_path / "bad", BACKEND)).joinpath("tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Tokenizer.from_directory(folder)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("model", "bert", "model is 'bert'"),
        ("pre", "viking", "pre is 'viking'"),
        ("tokens", None, "tokens must be a list"),
        ("tokens", ["a", "b", "a"], "'a' twice"),
        ("merges", None, "merges must be a list"),
        ("merges", ["ab"], "merges holds 'ab'"),
        ("merges", ["q nope"], "doesn't fit the vocabulary"),
        ("token_type", [1], "token_type must be a list of"),
        ("bos_token_id", 10**6, "bos_token_id is 1000000"),
    ],
)
def test_bad_gguf_metadata(key: str, value: Any, match: str) -> None:
    metadata = _gguf_byte_level(BACKEND) | {f"tokenizer.ggml.{key}": value}
    if key == "tokens" and value:
        metadata |= {"tokenizer.ggml.token_type": [1] * 3, "tokenizer.ggml.merges": ["a b"]}
    with pytest.raises(CheckpointError, match=match):
        Tokenizer.from_gguf_metadata(metadata)


def test_gguf_pre_tokenizers_and_token_kinds() -> None:
    metadata = _gguf_byte_level(BACKEND)
    del metadata["tokenizer.ggml.add_bos_token"]
    tokens = [*metadata["tokenizer.ggml.tokens"], "<think>", "<|eot_id|>"]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 4, 3],
        "tokenizer.ggml.eot_token_id": len(tokens) - 1,
    }
    for pre, text in (
        ("llama-bpe", "x"),
        ("llama3", "x"),
        ("gpt-2", "x"),
        ("default", "x"),
        ("qwen2", "e\u0301"),
    ):
        tokenizer = Tokenizer.from_gguf_metadata(metadata | {"tokenizer.ggml.pre": pre})
        ids = tokenizer.encode(text + "<think>")
        assert ids[-1] == len(tokens) - 2  # user-defined: matched whole, and shown
        assert tokenizer.decode(ids) == ("é" if pre == "qwen2" else text) + "<think>"
        assert (ids[0] == 1) == pre.startswith("llama")  # BOS by default
        assert tokenizer.eos_token_ids == (2, len(tokens) - 1)
        assert tokenizer.decode(tokenizer.encode(CORPUS[2])) == CORPUS[2]


def test_chat_sandbox_and_helpers() -> None:
    messages = [{"role": "user", "content": "a<b>'é"}]
    for source in (
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
    ):
        with pytest.raises(CheckpointError, match="sandbox"):
            ChatTemplate(source).render(messages)
    assert ChatTemplate("{{ messages | tojson }}").render(messages) == json.dumps(
        messages, ensure_ascii=False
    )
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(messages)) == 4
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ChatTemplate(loop).render(messages) == "01"
    block = "a\n  {% generation %}\nb{% endgeneration %}{{ tools[0] }}"
    assert ChatTemplate(block).render(messages, tools=["t"]) == "a\nbt"


def test_chat_errors() -> None:
    good: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    bad: list[Any] = [[], "hi", {"role": "user"}, ["hi"], [{"role": "user"}], [{"content": "x"}]]
    bad += [
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": None}],
    ]
    bad += [[{"role": "user", "content": "x", "image": object()}]]
    for messages in bad:
        with pytest.raises(ValueError, match="chat message"):
            BYTE_LEVEL.render_chat(messages)
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(good)
    assert not isinstance(caught.value, CheckpointError)
    with pytest.raises(ValueError, match="can't render these messages: UndefinedError"):
        ChatTemplate("{{ messages[0].tool.name }}").render(good)
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("a\n{% if %}").render(good)
    with pytest.raises(CheckpointError, match=r"no chat template; pass the whole prompt as text"):
        SENTENCEPIECE.render_chat(good)
    call = [*good, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert ChatTemplate("{{ messages[1].tool_calls[0].name }}").render(call) == "f"


def test_chat_ids_parse_special_tokens() -> None:
    ids = BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "fox"}], add_generation_prompt=False)
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert BYTE_LEVEL.decode(ids) == "user\nfox\n"
