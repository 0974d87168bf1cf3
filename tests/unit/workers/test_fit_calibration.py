"""Fitted confidences are the rates at which guesses are right, where these are known."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from workers.calibration import UNCALIBRATED, Calibration, Pool
from workers.draft import DraftUpdate
from workers.engine.vocabulary import Vocabulary
from workers.fit_calibration import _ENOUGH, LEVELS, Case, _fit_pool, fit_calibration
from workers.ngram_member import NgramMember
from workers.training.batch import Batch
from workers.training.corpus import TargetAnswer
from workers.training.ngram_table import ORDER, NgramTable
from workers.training.teacher import TeacherText, bare_text
from workers.tree_growth import NEGLIGIBLE

TOKENS = 200  # of the target, and of the student
CYCLE = 40  # of them go round in circles
CLOSE = 0.05
Said = Callable[[list[int], random.Random], int]


def texts(count: int, length: int, say: Said, *, temperature: float = 0.0) -> list[TeacherText]:
    """Answers of a target that says after a text what `say` says."""
    chance = random.Random(f"{count} {temperature}")
    found = []
    for number in range(count):
        tokens = [chance.randrange(CYCLE) for _ in range(8)]
        for _ in range(length):
            tokens.append(say(tokens, chance))
        found.append(
            bare_text(TargetAnswer(number, True, temperature, tuple(tokens[:8]), tuple(tokens[8:])))
        )
    return found


class Student(nn.Module):
    """A neural member that gives `stated` to the token that `guess` names; it may look at the text
    it guesses, so that it can be right at any rate. It says the same however far ahead.
    """

    def __init__(
        self, guess: Callable[[Sequence[int], int, int], int], stated: Sequence[float]
    ) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.vocabulary = torch.arange(TOKENS)
        self._guess = guess
        self._stated = stated

    @property
    def model(self) -> nn.Module:
        return self

    def unroll(self, batch: Batch, ahead: int) -> list[Tensor]:
        size = batch.top_ids.shape[1]
        laws = torch.zeros(ahead, len(batch.tokens), size, TOKENS)
        for level in range(ahead):
            for row, tokens in enumerate(batch.tokens.tolist()):
                for place in range(size):
                    at = batch.prompt + place
                    stated = self._stated[at % len(self._stated)]
                    law = torch.full((TOKENS,), (1 - stated) / (TOKENS - 1))
                    law[self._guess(tokens, at, level)] = stated
                    laws[level, row, place] = law.log()
        return list(laws)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def right_at(rate: Callable[[int, int], float]) -> Callable[[Sequence[int], int, int], int]:
    """Guesses that are right at a rate by place and level."""
    chance = random.Random(0)
    return lambda tokens, at, level: (
        (tokens[at] + (chance.random() >= rate(at, level)) * chance.randrange(1, TOKENS)) % TOKENS
    )


def anything(_: list[int], chance: random.Random) -> int:
    return chance.randrange(TOKENS)


def odds(p: float) -> float:
    return math.log(p / (1 - p))


def squash(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# -- one member ------------------------------------------------------------------------------------


def test_a_neural_member_that_is_too_sure_of_itself_is_believed_as_far_as_it_is_right() -> None:
    """It states .2 to .9, and is right less often, the less so the farther down."""
    stated = (0.2, 0.4, 0.6, 0.8, 0.9)

    def rate(at: int, level: int) -> float:
        return squash(0.9 * odds(stated[at % len(stated)]) - 0.5 - 0.5 * level)

    found = fit_calibration(texts(40, 60, anything), None, Student(right_at(rate), stated))
    pool = found.at(0.0).neural
    for at, said in enumerate(stated):
        for level in range(LEVELS):
            assert pool.confidence(0.0, said, level) == pytest.approx(rate(at, level), abs=CLOSE)
    assert pool.ngram == pool.surer == 0.0, "there is one member, and it has its weight already"
    assert pool.farther < 0


class Chain:
    """Says what follows the last token in an endless cycle, but for some of the time."""

    def __init__(self, right: float) -> None:
        self._right = right

    def __call__(self, tokens: list[int], chance: random.Random) -> int:
        goes_on = chance.random() < self._right
        return (tokens[-1] + 1) % CYCLE if goes_on else chance.randrange(CYCLE)


@pytest.fixture(scope="module")
def member() -> NgramMember:
    """It learned from texts that went on in their circle nine times in ten."""
    known = [text.tokens.tolist() for text in texts(40, 80, Chain(0.9))]
    return NgramMember(NgramTable.build(known, Vocabulary(TOKENS, "abc"), {}))


def likeliest(
    calibration: Calibration, member: NgramMember, fresh: Sequence[TeacherText]
) -> tuple[float, float]:
    """Of a member's likeliest guesses: mean confidence, and the share that was right."""
    confidences, right = [], []
    for text in fresh:
        tokens = tuple(text.tokens.tolist())
        pools = calibration.at(text.temperature).ngram
        member.commit(DraftUpdate(0, 0, tokens[: text.prompt]))
        for at in range(text.prompt, len(tokens)):
            assert member.catch_up(0)
            law = member.law(0, member.tail(0))
            if guesses := law.likely(NEGLIGIBLE):
                token = max(guesses, key=guesses.__getitem__)
                confidences.append(pools[law.order].confidence(guesses[token], 0.0, 0))
                right.append(token == tokens[at])
            member.commit(DraftUpdate(0, at, tokens[at : at + 1]))
    return sum(confidences) / len(confidences), sum(right) / len(right)


@pytest.mark.parametrize("right", [0.9, 0.5])
def test_the_confidence_of_n_grams_is_how_often_they_are_right(
    member: NgramMember, right: float
) -> None:
    """Where texts are like the table and where they follow it far less than it promises."""
    fresh = texts(40, 50, Chain(right))
    calibration = fit_calibration(texts(41, 50, Chain(right)), member, None)
    confidence, share = likeliest(calibration, member, fresh)
    assert confidence == pytest.approx(share, abs=CLOSE)
    assert share == pytest.approx(right, abs=2 * CLOSE)
    promised, _ = likeliest(UNCALIBRATED, member, fresh)
    assert 0.75 < promised < 0.95


# -- both ------------------------------------------------------------------------------------------


def test_of_two_members_the_one_that_is_right_decides(member: NgramMember) -> None:
    """The n-grams know the chain, the neural member is sure of what is never said."""
    wrong = Student(lambda tokens, at, level: (tokens[at] + 7) % TOKENS, (0.9, 0.7))
    regime = fit_calibration(texts(40, 50, Chain(0.9)), member, wrong).at(0.0)
    for pool in regime.both[1:3]:
        assert pool.confidence(0.9, 0.0, 0) > 0.5
        assert pool.confidence(0.0, 0.9, 0) < 0.1
    silent = fit_calibration(texts(40, 50, Chain(0.9)), member, None).at(0.0)
    for ours, alone in zip(regime.ngram, silent.ngram, strict=True):
        assert ours == alone, "where the neural member was not asked it makes no difference"


def test_the_member_that_is_surer_may_decide(member: NgramMember) -> None:
    """The neural one knows every other token and says so, at all others it is wrong and unsure.
    So one that is sure is worth more than two that half agree.
    """

    def knows(tokens: Sequence[int], at: int, level: int) -> int:
        return tokens[at] if at % 2 else (tokens[at] + 7) % TOKENS

    regime = fit_calibration(texts(60, 50, Chain(0.6)), member, Student(knows, (0.2, 0.9))).at(0.0)
    pool = regime.both[ORDER]
    assert pool.surer > 0.3
    assert pool.confidence(0.0, 0.9, 0) > pool.confidence(0.4, 0.4, 0)


def test_without_a_match_the_neural_member_stands_alone() -> None:
    """Tokens are said once in a text and never in the table: the pool of order 0 knows that."""
    stated = (0.3, 0.8)
    student = Student(right_at(lambda at, level: stated[at % 2]), stated)

    def new(tokens: list[int], chance: random.Random) -> int:
        return chance.choice([token for token in range(TOKENS) if token not in tokens] or [0])

    regime = fit_calibration(texts(90, 24, new), NgramMember(None), student).at(0.0)
    for said in stated:
        assert regime.both[0].confidence(0.0, said, 0) == pytest.approx(said, abs=CLOSE)


# -- regimes ---------------------------------------------------------------------------------------


def test_each_temperature_has_a_regime_of_its_own(member: NgramMember) -> None:
    held_out = texts(40, 50, Chain(0.9)) + texts(40, 50, Chain(0.4), temperature=0.8)
    found = fit_calibration(held_out, member, None)
    assert found.regimes.keys() == {0.0, 0.8}
    cold, hot = (found.at(temperature).ngram[2].confidence(0.9, 0.0, 0) for temperature in (0, 1))
    assert cold > hot + 0.2


def test_match_lengths_with_too_few_cases_share_a_pool(member: NgramMember) -> None:
    """Nearly all that is guessed right here is guessed after the longest match."""
    found = fit_calibration(texts(30, 50, Chain(0.9)), member, None).at(0.0).ngram
    shared = found[0]  # nothing is guessed without a match
    assert found[ORDER] != shared
    assert found[ORDER - 1] == found[ORDER - 2] == shared


def test_with_hardly_any_cases_members_are_taken_at_their_word(member: NgramMember) -> None:
    """A fit of a few dozen guesses would be noise."""
    student = Student(right_at(lambda at, level: 0.5), (0.5,))
    few = fit_calibration(texts(2, 5, Chain(0.9)), member, student)
    assert few.at(0.0) == UNCALIBRATED.at(0.0)


def test_members_that_say_the_same_of_everything_are_taken_at_their_word() -> None:
    cases = [Case(1, 0, said, {5: 0.5}, None) for said in (5, 6)] * 2 * _ENOUGH
    assert _fit_pool(cases, Pool(ngram=0.7)) == Pool(ngram=0.7)
