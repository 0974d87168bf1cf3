"""Which prompts a draft learns from, which are held out, and the clauses of both."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.draft_prompts import MOST_HELD_OUT, SplitPrompts, split_prompts

TOPICS = [f"topic {chr(97 + n)}" for n in range(24)]
SONGS = [f"Sing of {topic}, or of {topic} 1.50! Then write: {topic[::-1]}" for topic in TOPICS]


class _Characters:
    """A tokenizer of which every character is a token."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def split(*files: Iterable[str], clauses: bool = True, context: int = 400) -> Any:
    """Texts to learn from, by file, and held out."""
    made: SplitPrompts = split_prompts(
        [tuple(file) for file in files], _Characters(), context, seed=3, clauses=clauses
    )
    training = [["".join(map(chr, ids)) for ids in own] for own in made.training]
    assert made.held_out_texts == ["".join(map(chr, ids)) for ids in made.held_out]
    return SimpleNamespace(training=training, held_out=made.held_out_texts)


def test_clauses_are_what_stands_between_punctuation_marks() -> None:
    whole, clauses = split(SONGS).training
    assert set(whole) < set(SONGS)
    topic = whole[0][len("Sing of ") :][: len(TOPICS[0])]
    assert {f"Sing of {topic}", f"or of {topic} 1.50", topic[::-1]} <= set(clauses)
    chinese = [f"介绍第{n}个城市，要“详细”：\n好。1、2！写诗？" for n in "一二三四五六七八"]
    whole, clauses = split(chinese).training
    assert (
        {text[:7] for text in whole}
        <= set(clauses)
        <= {text[:7] for text in chinese}
        | {
            "要“详细”",
            "写诗",
        }
    ), "a letter alone is no request"


def test_held_out_are_clauses_of_held_out_prompts_and_no_others() -> None:
    made = split(SONGS, (f"More, {song}" for song in SONGS))
    learned = {text for own in made.training for text in own}
    assert not learned & set(made.held_out)
    for topic in TOPICS:
        own = f"Sing of {topic}"
        assert (own in made.held_out) == any(song.startswith(own) for song in made.held_out)
    longest = split([f"{song}, {song[::-1]}" for song in SONGS] + SONGS)
    assert len(longest.held_out) <= 2 * MOST_HELD_OUT


def test_whole_prompts_are_split_the_same_with_clauses_and_without() -> None:
    without, both = split(SONGS, clauses=False), split(SONGS)
    assert without.training == both.training[:1]
    assert set(without.held_out) == set(both.held_out) & set(SONGS)


def test_prompts_without_clauses_of_their_own_add_none() -> None:
    words = [f"word{n}" for n in "abcdefgh"]
    assert split(words) == split(words, clauses=False)


def test_what_does_not_fit_is_left_out() -> None:
    made = split([*SONGS, "x" * 500 + ", y" * 200], context=100)
    assert not any("xx" in text for own in made.training for text in own)
    with pytest.raises(ValueError, match="prompts: 3 different ones fit in 99 tokens; a draft"):
        split(SONGS[:3], context=100)
