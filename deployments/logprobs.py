"""Logprobs with their words, and how OpenAI's two endpoints put them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from workers.request import TokenLogprob
from workers.text import REPLACEMENT

_REMEMBERED = 4096  # tokens; the likeliest come again and again


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """A token as the vocabulary has it."""


@dataclass(frozen=True, slots=True)
class Word:
    """A token as text. bytes: what it stands for, None where that is not known: the text of a part
    of a character is U+FFFD.
    """

    text: str
    bytes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class WordLogprob:
    """A token of an answer with its logprob, and the likeliest ones at its place. offset: where it
    begins in the answer's text, in characters.
    """

    word: Word
    logprob: float
    top: tuple[tuple[Word, float], ...]
    offset: int


class Words:
    """The words of a target's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._word = lru_cache(_REMEMBERED)(self._look_up)

    def spell(self, logprobs: Sequence[TokenLogprob], offset: int) -> tuple[WordLogprob, ...]:
        """Logprobs of tokens that follow each other, the first of which begins at `offset`."""
        spelt = []
        for each in logprobs:
            word = self._word(each.token)
            top = tuple((self._word(token), logprob) for token, logprob in each.top)
            spelt.append(WordLogprob(word, each.logprob, top, offset))
            offset += len(word.text)
        return tuple(spelt)

    def _look_up(self, token: int) -> Word:
        text = self._tokenizer.decode([token])
        if REPLACEMENT not in text:
            return Word(text, tuple(text.encode()))
        return Word(text, _raw_bytes(self._tokenizer.convert_ids_to_tokens(token)))


def chat_logprobs(words: Sequence[WordLogprob]) -> dict[str, Any]:
    """As in `choices[].logprobs` of a chat."""
    return {
        "content": [
            {
                **_chat_entry(each.word, each.logprob),
                "top_logprobs": [_chat_entry(word, logprob) for word, logprob in each.top],
            }
            for each in words
        ],
        "refusal": None,
    }


def _chat_entry(word: Word, logprob: float) -> dict[str, Any]:
    return {
        "token": word.text,
        "logprob": logprob,
        "bytes": None if word.bytes is None else list(word.bytes),
    }


def completion_logprobs(words: Sequence[WordLogprob]) -> dict[str, Any]:
    """As in `choices[].logprobs` of a completion. The token that came is among the likeliest ones
    told of, also when it is not one of them.
    """
    return {
        "tokens": [each.word.text for each in words],
        "token_logprobs": [each.logprob for each in words],
        "top_logprobs": [
            {word.text: logprob for word, logprob in (*each.top, (each.word, each.logprob))}
            for each in words
        ],
        "text_offset": [each.offset for each in words],
    }


def _raw_bytes(token: str) -> tuple[int, ...] | None:
    """What a token of a byte-level vocabulary stands for."""
    try:
        return tuple(_BYTE_OF[character] for character in token)
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes (Radford et al., GPT-2): those
    that can be seen stand for themselves, the others are numbered from 256 on.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1)]
    seen += range(ord("\xae"), ord("\xff") + 1)
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {
        chr(256 + number): byte for number, byte in enumerate(unseen)
    }


_BYTE_OF = _byte_alphabet()
