"""No broken character and no part of a stop string is ever sent, and nothing else is lost."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tiny import EOS, tiny_tokenizer
from workers.text import LONGEST_WAIT, REPLACEMENT, Detokenizer, StopMatcher

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def pieces_of(tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


# -- characters ----------------------------------------------------------------------------------


@given(st.text(max_size=40))
@example("你好，世界 🦜 naïve e\u0301")
def test_whole_texts_come_out_whole_and_without_broken_characters(text: str) -> None:
    pieces = pieces_of(encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_any_tokens_give_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces_of(tokens)) == whole


def test_a_character_is_sent_by_the_token_that_completes_it() -> None:
    tokens = encode("好🦜.")
    assert len(tokens) == 3 + 4 + 1, "every byte of these is a token"
    assert pieces_of(tokens) == ["", "", "好", "", "", "", "🦜", ".", ""]


@pytest.mark.parametrize("size", range(1, 13))
def test_only_a_tail_that_was_cut_is_broken(size: int) -> None:
    pieces = pieces_of(encode("好人🦜世界")[:size])
    assert not any(REPLACEMENT in piece for piece in pieces[:-1])
    whole = "好人🦜世界".encode()[:size].decode(errors="replace")
    assert "".join(pieces) == whole


def test_bytes_that_never_become_a_character_wait_for_one_that_does() -> None:
    stray = encode("好")[0]
    assert pieces_of([stray, stray, *encode("ok")]) == ["", "", f"{REPLACEMENT * 2}o", "k", ""]


def test_an_endless_row_of_broken_bytes_is_sent_in_pieces() -> None:
    stray = encode("好")[0]
    pieces = pieces_of([stray] * (3 * LONGEST_WAIT))
    assert "".join(pieces) == REPLACEMENT * (3 * LONGEST_WAIT)
    assert [len(piece) for piece in pieces if piece] == [LONGEST_WAIT] * 3


def test_special_tokens_are_no_text() -> None:
    assert pieces_of([*encode("a"), END, *encode("b")]) == ["a", "", "b", ""]


class Whitespace:
    """Drops the space at a text's beginning, as SentencePiece decoders do."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" w{token}" for token in token_ids).removeprefix(" ")


def test_spaces_between_tokens_survive_decoders_that_strip_the_first() -> None:
    detokenizer = Detokenizer(Whitespace())
    assert [detokenizer.push(n) for n in range(3)] == ["w0", " w1", " w2"]


# -- stop strings --------------------------------------------------------------------------------


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, written in the most obvious way."""
    for end in range(len(text) + 1):
        beginnings = [end - len(s) for s in stop if text[:end].endswith(s)]
        if beginnings:
            return text[: min(beginnings)], True
    return text, False


def streamed(pieces: Sequence[str], stop: Sequence[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stop)
    out = [matcher.push(piece) for piece in pieces]
    return [*out, matcher.flush()], matcher.matched


FEW = st.text("ab\n", max_size=4)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


@given(st.lists(FEW, max_size=12), STOPS)
@example(["ab", "ca", "bd"], ["abd"])
@example(["abcd"], ["abcd", "bc"])
@example(["a", "a", "b"], ["aab", "ab"])
def test_the_joined_stream_is_the_whole_text_cut_at_the_stop(
    pieces: list[str], stop: list[str]
) -> None:
    out, matched = streamed(pieces, stop)
    assert ("".join(out), matched) == cut("".join(pieces), stop)


@given(st.lists(FEW, max_size=12), STOPS)
def test_nothing_sent_so_far_could_have_been_the_beginning_of_a_stop(
    pieces: list[str], stop: list[str]
) -> None:
    matcher = StopMatcher(stop)
    sent = seen = ""
    for piece in pieces:
        sent, seen = sent + matcher.push(piece), seen + piece
        if matcher.matched:
            break
        for size in range(1, len(seen) + 1):
            if any(s.startswith(seen[-size:]) for s in stop):
                assert len(sent) <= len(seen) - size


def test_text_that_cannot_become_a_stop_is_sent_at_once() -> None:
    assert streamed(["x", "\n", "\n", "y"], ["\n\nEND"])[0] == ["x", "", "", "\n\ny", ""]


def test_what_was_held_back_in_vain_is_flushed() -> None:
    assert streamed(["a\n", "E"], ["\nEND"]) == (["a", "", "\nE"], False)


def test_after_a_stop_nothing_comes_any_more() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert (matcher.push("c"), matcher.flush(), matcher.matched) == ("", "", True)


def test_a_stop_may_span_characters_that_span_tokens() -> None:
    detokenizer, matcher = Detokenizer(TOKENIZER), StopMatcher(["好🦜"])
    out = [matcher.push(detokenizer.push(token)) for token in encode("你好🦜!")]
    assert "".join(out) == "你"
    assert matcher.matched
