"""LLM with a tiny tokenizer, end to end: every way to stop and to steer, text, chat and streams."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specax import LLM, EngineConfig, InvalidRequestError, SamplingParams
from specax.decoding.outputs import CompletionOutput, RequestOutput
from specax.model import Decoder
from specax.model.detokenizer import byte_alphabet
from specax.model.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
PROMPT = "hello there"


def tiny_tokenizer() -> Tokenizer:
    """Byte-level, 97 ids: <pad>, the end, letters, the bytes of é and 😀, and a few merges."""
    spelled = {byte: letter for letter, byte in byte_alphabet().items()}
    vocab = ["<pad>", "<end>"]
    vocab += [spelled[byte] for byte in (0x20, *range(0x25, 0x7A), *"é😀".encode())]  # the bytes: ids 88…93
    merges = [("t", "h"), ("h", "e"), ("a", "b")]
    vocab += [a + b for a, b in merges]
    assert len(vocab) == len(set(vocab)) == 97
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    backend.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, roles={"eos_token": 1, "pad_token": 0}, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(tiny_model: Decoder) -> LLM:
    config = EngineConfig(page_size=4, num_pages=60, max_rows=4, max_batched_tokens=16, max_model_len=64)
    return LLM(tiny_model, tiny_tokenizer(), config)


@pytest.fixture(autouse=True)
def nothing_left(llm: LLM) -> Iterator[None]:
    yield
    while llm.engine.has_work:  # reports of aborts
        assert all(out.finished for out in llm.engine.step())
    assert llm.engine.memory.in_use() == 0


def one(llm: LLM, **fields: Any) -> CompletionOutput:
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    (out,) = llm.generate(PROMPT, SamplingParams(**params))
    return out.outputs[0]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> CompletionOutput:
    """A free output of 24 tokens, whose text the stops below are cut from."""
    out = one(llm, seed=3, temperature=1.0)
    assert out.finish_reason == "length" and len(out.token_ids) == 24 and len(set(out.text)) > 8
    return out


FREE: dict[str, Any] = {"seed": 3, "temperature": 1.0}


def test_text_is_what_the_tokenizer_decodes(llm: LLM, plain: CompletionOutput) -> None:
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(PROMPT)
    whole = llm.tokenizer.decode([*prompt, *plain.token_ids])
    assert plain.text == whole.removeprefix(PROMPT)
    # The same from token ids, and from a batch of both.
    prompts: list[str | Sequence[int]] = [PROMPT, prompt]
    outs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, **FREE))
    assert [out.outputs[0].text for out in outs] == [plain.text] * 2
    assert [out.prompt_token_ids for out in outs] == [prompt] * 2
    done: list[tuple[int, int]] = []
    llm.generate([PROMPT] * 3, SamplingParams(max_tokens=2), progress=lambda *at: done.append(at))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert llm.generate([]) == []


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: LLM, plain: CompletionOutput, include: bool) -> None:
    for start, length in ((4, 1), (5, 3), (8, 4)):
        stop = plain.text[start : start + length]
        at = plain.text.index(stop)
        out = one(llm, stop=["never", stop], include_stop_str_in_output=include, **FREE)
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert out.text == plain.text[: at + (length if include else 0)]
        assert out.token_ids == plain.token_ids[: len(out.token_ids)] and len(out.token_ids) < 24
    out = one(llm, stop="never said", **FREE)
    assert (out.finish_reason, out.stop_reason, out.text) == ("length", None, plain.text)


def test_stop_tokens_eos_and_minimum(llm: LLM, plain: CompletionOutput) -> None:
    stop = plain.token_ids[7]
    first = plain.token_ids.index(stop)
    out = one(llm, stop_token_ids=[stop], **FREE)
    assert out.token_ids == plain.token_ids[: first + 1]  # kept in the ids, not in the text
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert plain.text.startswith(out.text)
    assert len(out.text) < len(one(llm, max_tokens=first + 1, **FREE).text) or stop in (0, 1)
    # EOS, made certain.
    biased = one(llm, logit_bias={1: 100.0}, ignore_eos=False)
    assert (biased.token_ids, biased.finish_reason, biased.stop_reason, biased.text) == (
        [1],
        "stop",
        None,
        "",
    )
    ignored = one(llm, logit_bias={1: 100.0}, max_tokens=5)
    assert (ignored.token_ids, ignored.finish_reason, ignored.text) == ([1] * 5, "length", "")
    shown = one(llm, logit_bias={1: 100.0}, max_tokens=2, skip_special_tokens=False)
    assert shown.text == "<end><end>"
    # Before min_tokens neither EOS nor a stop token is sampled, however likely.
    late = one(llm, logit_bias={1: 100.0}, ignore_eos=False, min_tokens=6)
    assert len(late.token_ids) == 7 and late.token_ids.index(1) == 6 and late.finish_reason == "stop"
    late = one(llm, logit_bias={50: 100.0}, stop_token_ids=[50], min_tokens=3)
    assert len(late.token_ids) == 4 and late.token_ids.index(50) == 3
    # A stop string that the text holds before min_tokens ends nothing.
    letter = plain.text[0]
    late = one(llm, stop=letter, min_tokens=5, **FREE)
    assert late.text.startswith(plain.text[:1]) and len(late.token_ids) >= 5


def test_max_tokens(llm: LLM, plain: CompletionOutput) -> None:
    for limit in (1, 7):
        out = one(llm, max_tokens=limit, **FREE)
        assert out.token_ids == plain.token_ids[:limit] and out.finish_reason == "length"
    out = one(llm, max_tokens=None, **FREE)
    assert llm.tokenizer is not None
    assert len(out.token_ids) == 64 - len(llm.tokenizer.encode(PROMPT))
    assert SamplingParams().max_tokens == 16


def test_bias_and_allowed_tokens(llm: LLM) -> None:
    free = one(llm)
    assert set(one(llm, logit_bias={60: 100.0}).token_ids) == {60}
    banned = one(llm, logit_bias={free.token_ids[0]: -100.0})
    assert free.token_ids[0] not in banned.token_ids
    few = one(llm, allowed_token_ids=[40, 41, 42], temperature=2.0, seed=1)
    assert set(few.token_ids) == {40, 41, 42}
    assert set(one(llm, allowed_token_ids=[40, 41], logit_bias={60: 100.0}).token_ids) <= {40, 41}


def test_bad_words(llm: LLM, plain: CompletionOutput) -> None:
    letter = next(c for c in plain.text if c.isascii() and c.strip())
    out = one(llm, bad_words=[letter], **FREE)
    assert llm.tokenizer is not None
    (token,) = llm.tokenizer.encode(letter, add_special_tokens=False)
    assert token in plain.token_ids and token not in out.token_ids
    # A word of two tokens is not completed; its parts remain possible.
    pair = next(plain.text[i : i + 2] for i in range(20) if plain.text[i : i + 2].isascii())
    first, *rest = llm.tokenizer.encode(pair, add_special_tokens=False)
    assert len(rest) == 1
    force = {first: 50.0, rest[0]: 50.0}
    assert pair in one(llm, logit_bias=force, temperature=1.0, seed=5).text
    out = one(llm, logit_bias=force, temperature=1.0, seed=5, bad_words=[pair])
    assert pair not in out.text and set(out.token_ids) <= {first, rest[0]}
    with pytest.raises(InvalidRequestError, match="nothing is left to sample"):
        one(llm, bad_words=[letter], allowed_token_ids=[token])


def test_samples_have_texts_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=10, ignore_eos=True)
    (out,) = llm.generate(PROMPT, params)
    assert [part.index for part in out.outputs] == [0, 1, 2]
    for i, part in enumerate(out.outputs):
        (alone,) = llm.generate(PROMPT, dataclasses.replace(params, n=1, seed=2 + i))
        assert (part.token_ids, part.text) == (alone.outputs[0].token_ids, alone.outputs[0].text)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    params = SamplingParams(max_tokens=5, temperature=0)
    (out,) = llm.chat(messages, params)
    (same,) = llm.generate("uhelloathere", params)
    assert out.prompt_token_ids == same.prompt_token_ids and out.outputs == same.outputs
    assert len(llm.chat([messages, messages[:1]], params)) == 2
    with pytest.raises(InvalidRequestError):
        llm.chat([{"content": "no role"}], params)


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0}, {"stop": "e"}, {"logit_bias": dict.fromkeys(range(88, 94), 9.0)}]
)
def test_stream_equals_generate(llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"seed": 4, "max_tokens": 30, "ignore_eos": True, **fields})
    (out,) = llm.generate(PROMPT, params)
    pieces = list(llm.stream(PROMPT, params))
    assert "".join(pieces) == out.outputs[0].text and all(pieces)
    assert len(pieces) > 1 or not fields
    assert not llm.engine.has_work


def test_closing_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, **FREE))
    next(stream)
    assert llm.engine.memory.in_use() > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.memory.in_use() == 0 and not llm.engine.scheduler.running
    (report,) = llm.engine.step()
    assert report.finished and report.outputs[0].finish_reason == "abort"
    for piece in llm.stream(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, **FREE)):
        assert piece
        break  # the iterator is dropped: the same
    assert llm.engine.memory.in_use() == 0


def test_stream_refuses_at_the_call(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2"):
        llm.stream(PROMPT, SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        llm.stream("")
    assert not llm.engine.has_work


def test_streams_side_by_side(llm: LLM, plain: CompletionOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and generate share one engine: each gets its own text, whoever calls step."""
    steps, step = iter(range(200)), llm.engine.step

    def bounded() -> list[RequestOutput]:
        assert next(steps, None) is not None, "a stream waits for what another one took"
        return step()

    monkeypatch.setattr(llm.engine, "step", bounded)
    params = SamplingParams(max_tokens=24, ignore_eos=True, **FREE)
    first, second = llm.stream(PROMPT, params), llm.stream(PROMPT, params)
    with contextlib.closing(first), contextlib.closing(second):  # type: ignore[type-var]
        pieces = [next(first), next(second)]
        (out,) = llm.generate(PROMPT, params)
        assert out.outputs[0].text == plain.text
        assert pieces[0] + "".join(first) == plain.text
        assert pieces[1] + "".join(second) == plain.text


def test_a_stream_closed_before_its_first_piece_aborts(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=4))
    stream.close()  # type: ignore[attr-defined]
    waiting = [sequence.request.id for sequence in llm.engine.scheduler.waiting]
    for request_id in waiting:
        llm.engine.abort(request_id)
    assert not waiting
