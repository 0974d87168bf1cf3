"""Answers as they come, and what an interrupted run leaves."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.training.corpus import Corpus, TargetAnswer, count_tokens

TOKENS = st.lists(st.integers(0, 10**6), max_size=5).map(tuple)
ANSWERS = st.lists(
    st.builds(
        TargetAnswer,
        number=st.integers(0, 10**6),
        held_out=st.booleans(),
        temperature=st.floats(0, 2),
        prompt=TOKENS,
        tokens=TOKENS,
    ),
    max_size=6,
    unique_by=lambda answer: answer.number,
)


def answer(number: int, *, held_out: bool = False) -> TargetAnswer:
    return TargetAnswer(number, held_out, 0.8, (1, 2), (3, 4, number))


def filled(path: Path, *answers: TargetAnswer) -> Corpus:
    corpus = Corpus(path)
    for one in answers:
        corpus.add(one)
    return corpus


@given(ANSWERS)
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path_factory: pytest.TempPathFactory, answers: list[TargetAnswer]
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "work" / "answers.jsonl"
    half = len(answers) // 2
    filled(path, *answers[:half])
    resumed = filled(path, *answers[half:])
    for corpus in (resumed, Corpus(path)):
        assert corpus.answers == answers
        assert corpus.numbers() == {one.number for one in answers}
        assert len(corpus) == count_tokens(answers) == sum(len(one.tokens) for one in answers)


def test_answers_end_in_any_order_and_are_read_in_that_of_their_requests(tmp_path: Path) -> None:
    corpus = filled(
        tmp_path / "a",
        answer(5),
        answer(1, held_out=True),
        answer(4),
        answer(0, held_out=True),
        answer(2),
    )
    assert [one.number for one in corpus.training] == [2, 4, 5]
    assert [one.number for one in corpus.held_out] == [0, 1]


@given(st.permutations(range(6)), st.integers(1, 6), st.integers(1, 30))
def test_what_is_learned_from_does_not_depend_on_who_was_ready_first(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], ready: int, tokens: int
) -> None:
    """Of three tokens an answer, as many of the first requests as it takes."""
    path = tmp_path_factory.mktemp("corpus") / "answers.jsonl"
    corpus = filled(path, *(answer(number) for number in order[:ready]))
    assert not corpus.finished
    corpus.finish(tokens)
    kept = sorted(order[:ready])[: -(-tokens // 3)]
    for own in (corpus, Corpus(path)):
        assert own.finished
        assert [one.number for one in own.answers] == kept
    assert {file.name for file in path.parent.iterdir()} == {"answers.jsonl", "answers.finished"}


def test_a_kill_while_the_file_is_written_anew_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answers.jsonl"
    filled(path, answer(0), answer(1))
    before = path.read_bytes()
    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Corpus(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("left", [1, 20, -2, -1])
def test_a_last_line_that_was_cut_off_is_dropped_and_said_again(tmp_path: Path, left: int) -> None:
    """Without its line break it may be a whole number too few, and nobody could tell."""
    path = tmp_path / "answers.jsonl"
    filled(path, answer(0), answer(1))
    whole = path.read_text(encoding="utf-8")
    first, last = whole.splitlines(keepends=True)
    path.write_text(first + last[:left], encoding="utf-8")
    corpus = Corpus(path)
    assert corpus.numbers() == {0}
    corpus.add(answer(1))
    assert path.read_text(encoding="utf-8") == whole
    assert Corpus(path).answers == [answer(0), answer(1)]


GOOD = {"number": 1, "held_out": False, "temperature": 0.0, "prompt": [1], "tokens": [2]}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        '"number"',
        *(json.dumps({k: v for k, v in GOOD.items() if k != name}) for name in GOOD),
        json.dumps(GOOD | {"prompt": 3}),
        json.dumps(GOOD | {"number": "one"}),
        json.dumps(GOOD | {"temperature": None}),
    ],
)
def test_a_line_that_is_no_answer_is_named_and_the_file_left_as_it_is(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "answers.jsonl"
    filled(path, answer(0))
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"^{path}: line 2 is no answer of a target; delete it$"):
        Corpus(path)
    assert path.read_bytes() == before
