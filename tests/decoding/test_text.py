"""StopChecker and TextStream: what is emitted, in any chunks, against a search in the whole text."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specax.decoding.text import StopChecker, TextStream
from specax.model.detokenizer import byte_alphabet
from specax.model.tokenizer import Tokenizer

FEW = settings(max_examples=50, deadline=None, derandomize=True)
MANY = settings(max_examples=300, deadline=None, derandomize=True)

TEXTS = st.text("ab", max_size=24)  # two letters: stops overlap themselves and each other
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple)


def byte_tokenizer() -> Tokenizer:
    """One token per byte: id = byte."""
    letters = sorted(byte_alphabet().items(), key=lambda item: item[1])
    backend = Backend(models.BPE(vocab={letter: byte for letter, byte in letters}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, roles={})


BYTES = byte_tokenizer()


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Brute force: the stop that is complete first (the longest of those), and where it starts."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return end - len(longest), longest
    return None


def expected(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    found = first_stop(text, stops)
    if found is None:
        return text, None
    at, stop = found
    return text[: at + len(stop) if include else at], stop


@st.composite
def chunked(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    return text, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@MANY
@given(chunked(), STOPS, st.booleans())
def test_any_chunking_emits_the_text_up_to_the_first_stop(
    case: tuple[str, list[str]], stops: tuple[str, ...], include: bool
) -> None:
    text, chunks = case
    want, want_stop = expected(text, stops, include)
    checker = StopChecker(stops, include)
    emitted, stop, seen = "", None, ""
    for chunk in chunks:
        seen += chunk
        new, stop = checker.push(chunk)
        emitted += new
        assert want.startswith(emitted)  # nothing that would have to be taken back
        if stop is not None:
            break
        # Held back: no more than a stop string's beginning.
        assert seen.startswith(emitted)
        held = seen[len(emitted) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)
    if stop is None:
        emitted += checker.flush()
        assert checker.flush() == ""
    assert (emitted, stop) == (want, want_stop)


@MANY
@given(TEXTS, TEXTS, STOPS, st.booleans())
def test_inactive_text_is_emitted_at_once_and_stops_nothing(
    before: str, after: str, stops: tuple[str, ...], include: bool
) -> None:
    checker = StopChecker(stops, include)
    for letter in before:
        assert checker.push(letter, active=False) == (letter, None)
    new, stop = checker.push(after)
    want, want_stop = expected(after, stops, include)  # what came before the minimum is not searched
    assert (new + ("" if stop else checker.flush()), stop) == (want, want_stop)


def test_examples() -> None:
    checker = StopChecker(("</s>", "###"), include=False)
    assert checker.push("one <") == ("one ", None)
    assert checker.push("/b") == ("</b", None)
    assert checker.push(" ##") == (" ", None)
    assert checker.push("# rest") == ("", "###")
    assert StopChecker(("###",), include=True).push("a###b") == ("a###", "###")
    # The stop that is complete first wins; of two that end together, the longer.
    assert StopChecker(("bcde", "c"), include=False).push("abcde") == ("ab", "c")
    assert StopChecker(("c", "bc"), include=False).push("abc") == ("a", "bc")
    assert StopChecker((), include=False).push("abc") == ("abc", None)


@FEW
@given(
    st.text("aé😀", max_size=10),
    st.lists(st.sampled_from(["é", "é😀", "aa", "😀a"]), max_size=2),
    st.booleans(),
)
def test_stream_of_bytes_never_splits_a_character(text: str, stops: list[str], include: bool) -> None:
    stream = TextStream(BYTES, [], tuple(stops), include, True)
    want, want_stop = expected(text, tuple(stops), include)
    pieces: list[str] = []
    stop = None
    for byte in text.encode():
        piece, stop = stream.push(byte, stoppable=True)
        pieces.append(piece)
        if stop is not None:
            break
    if stop is None:
        rest, stop = stream.flush(stoppable=True)
        pieces.append(rest)
    assert ("".join(pieces), stop) == (want, want_stop)
    assert stream.text == "".join(pieces)
    assert "\ufffd" not in stream.text


def test_stream_flush() -> None:
    stream = TextStream(BYTES, list(b"prompt"), ("é", "xyz"), False, True)
    assert [stream.push(byte, True) for byte in b"ax"] == [("a", None), ("", None)]
    assert stream.push(0xC3, True) == ("", None)  # an unfinished character
    assert stream.flush(True) == ("x\ufffd", None)
    assert stream.text == "ax\ufffd"
    # The replacement character of the last, unfinished one may itself complete a stop string.
    stream = TextStream(BYTES, [], ("x\ufffd",), False, True)
    assert [stream.push(byte, True)[0] for byte in b"ax\xc3"] == ["a", "", ""]
    assert stream.flush(True) == ("", "x\ufffd")
    # At a stop token, what is left is emitted but stops nothing more.
    stream = TextStream(BYTES, [], ("x\ufffd",), False, True)
    assert [stream.push(byte, True)[0] for byte in b"ax\xc3"] == ["a", "", ""]
    assert stream.flush(False) == ("x\ufffd", None)


def test_stream_before_min_tokens() -> None:
    stream = TextStream(BYTES, [], ("ab",), False, True)
    assert [stream.push(byte, False) for byte in b"abab"] == [(letter, None) for letter in "abab"]
    # The stop straddles the minimum: its first letter was final already.
    assert [stream.push(byte, True) for byte in b"bab"] == [("b", None), ("", None), ("", "ab")]
    assert stream.text == "ababb"
