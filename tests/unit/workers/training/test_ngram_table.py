"""Counts against a count by hand, and tables that come back from the disk as they were."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.vocabulary import Vocabulary
from workers.training import ngram_table
from workers.training.ngram_table import LIKELIEST, ORDER, Followers, NgramTable

VOCABULARY = Vocabulary(50, "abc")
CARD = {"domain": "test", "prompts": "prömpts"}


def likeliest(followers: Followers) -> Counter[int]:
    return Counter(dict(followers.likeliest))


def counted(sequences: Sequence[Sequence[int]], context: Sequence[int]) -> list[Counter[int]]:
    """Next-token counts after the last 1, 2, ... tokens of the context, the slow way."""
    found = []
    for order in range(1, min(ORDER, len(context)) + 1):
        tail = list(context[-order:])
        counts = Counter(
            sequence[place]
            for sequence in sequences
            for place in range(order, len(sequence))
            if list(sequence[place - order : place]) == tail
        )
        if not counts:
            break
        found.append(counts)
    return found


TOKENS = st.lists(st.integers(0, 3), max_size=25)  # few tokens: contexts repeat
SEQUENCES = st.lists(TOKENS, min_size=1, max_size=5).filter(
    lambda sequences: any(len(sequence) > 1 for sequence in sequences)
)


@given(SEQUENCES, st.lists(TOKENS, min_size=1, max_size=10))
def test_counts_are_those_of_a_count_by_hand(
    sequences: list[list[int]], contexts: list[list[int]]
) -> None:
    table = NgramTable.build(sequences, VOCABULARY, CARD)
    inside = [sequence[:cut] for sequence in sequences for cut in (1, 4, 9)]
    for context in contexts + inside:
        found, expected = table.followers(context), counted(sequences, context)
        assert [likeliest(followers) for followers in found] == expected
        assert [(f.total, f.distinct) for f in found] == [(c.total(), len(c)) for c in expected]
        for followers in found:
            times = [n for _, n in followers.likeliest]
            assert times == sorted(times, reverse=True)
    assert len(table) == sum(map(len, sequences))


def test_it_gives_back_the_sequences_that_it_was_built_from() -> None:
    table = NgramTable.build([[1, 2, 3], [], [4], [5, 6]], VOCABULARY, CARD)
    assert table.sequences() == [[1, 2, 3], [4], [5, 6]]


def test_no_context_reaches_across_two_sequences() -> None:
    table = NgramTable.build([[1, 2], [3, 4]], VOCABULARY, CARD)
    assert table.followers([2]) == []
    assert table.followers([1]) == [Followers(1, 1, ((2, 1),))]
    assert table.followers([9, 3]) == [Followers(1, 1, ((4, 1),))]
    assert table.followers([]) == []


def test_of_many_followers_it_tells_the_likeliest_and_counts_them_all() -> None:
    sequence = [token for follower in range(1, 20) for token in [0, follower] * follower]
    (followers, *_) = NgramTable.build([sequence], VOCABULARY, CARD).followers([0])
    assert (followers.total, followers.distinct) == (190, 19)
    assert followers.likeliest == tuple((n, n) for n in range(19, 19 - LIKELIEST, -1))


def test_contexts_that_occur_very_often_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_table, "COUNTED", 10)
    table = NgramTable.build([[1, 2, 1, 3] * 100], VOCABULARY, CARD)
    (first, *_) = table.followers([1])
    assert (first.total, likeliest(first)) == (10, {2: 5, 3: 5})


@pytest.mark.parametrize("size", [50, 2**16 - 2, 2**16 - 1, 200_000])
def test_a_saved_table_comes_back_as_it_was(tmp_path: Path, size: int) -> None:
    vocabulary = Vocabulary(size, "f00")
    sequences = [[0, size - 1, 3, 0, size - 1, 4], [size - 1, 3]]
    table = NgramTable.build(sequences, vocabulary, CARD)
    table.save(tmp_path / "deep" / "folder")
    back = NgramTable.load(tmp_path / "deep" / "folder")
    assert (back.vocabulary, back.card, len(back)) == (vocabulary, CARD, 8)
    for context in ([0, size - 1], [size - 1], [3]):
        assert back.followers(context) == table.followers(context)
        assert list(map(likeliest, back.followers(context))) == counted(sequences, context)


def test_a_saved_table_says_what_it_is(tmp_path: Path) -> None:
    NgramTable.build([[1, 2]], VOCABULARY, CARD).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {
        "kind": "ngram",
        "order": ORDER,
        "vocabulary": {"size": 50, "fingerprint": "abc"},
        "card": CARD,
    }
    with np.load(tmp_path / "tokens.npz") as saved:
        assert saved["tokens"].dtype == np.uint16


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="^prompts: .*give more prompts"):
        NgramTable.build([[], [1]], VOCABULARY, CARD)


def test_a_folder_without_a_table_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(config\.json is missing\).*prepare-draft"):
        NgramTable.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"\(tokens\.npz is missing\)"):
        NgramTable.load(tmp_path)


def spoil_tokens(**arrays: object) -> Callable[[Path], None]:
    return lambda folder: np.savez(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]


def spoil_config(text: str) -> Callable[[Path], None]:
    return lambda folder: _write(folder / "config.json", text.encode())


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def cut_off(folder: Path) -> None:
    _write(folder / "tokens.npz", (folder / "tokens.npz").read_bytes()[:-30])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoil_tokens(words=np.array([0, 2])), "KeyError"),
        (spoil_tokens(tokens=np.zeros((2, 2), np.uint16)), "no sequences"),
        (spoil_tokens(tokens=np.zeros(0, np.uint16)), "no sequences"),
        (spoil_tokens(tokens=np.array([2, 3], np.uint16)), "no sequences"),
        (spoil_tokens(tokens=np.array([0, 51], np.uint16)), "not all of the 50"),
        (spoil_tokens(tokens=np.array([0, -1], np.int32)), "not all of the 50"),
        (cut_off, "BadZipFile"),
        (lambda folder: _write(folder / "tokens.npz", b""), "EOFError"),
        *((spoil_config(text), "Error") for text in ("[]", "{}", "3", "null", "{")),
        (spoil_config('{"vocabulary": {"size": 50}, "card": {}}'), "TypeError"),
    ],
)
def test_what_is_no_table_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    NgramTable.build([[1, 2, 3]], VOCABULARY, CARD).save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: holds no n-gram table .*{why}.*outrider"):
        NgramTable.load(tmp_path)


def test_a_token_that_no_tokenizer_knows_ends_a_sequence() -> None:
    table = NgramTable.build([[1, 2, 50, 3, 4]], VOCABULARY, CARD)
    assert len(table) == 4
    assert table.followers([2]) == []
    assert table.followers([3]) == [Followers(1, 1, ((4, 1),))]
