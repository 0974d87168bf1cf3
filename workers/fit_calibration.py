"""Fitting a draft's calibration: what its members said about held-out answers, and what was right.

Every position of an answer is a case: the members guess what the target said next, from exactly
what they would know there in use, the neural one also from its own output one and two levels down.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

from workers.calibration import UNCALIBRATED, Calibration, Pool, Regime, log_odds
from workers.draft import DraftUpdate
from workers.engine.eagle_batch import LIKELIEST
from workers.ngram_member import NgramMember
from workers.speculation.tree import SparseLaw
from workers.training.batch import BATCH_TEXTS, collate
from workers.training.distil import Student
from workers.training.ngram_table import ORDER
from workers.training.teacher import TeacherText
from workers.tree_growth import NEGLIGIBLE, likely

LEVELS = 3
"""How far below what the target said the neural member is looked at."""

# With fewer guesses, right ones and wrong ones, a pool is fitted on those of all match lengths, and
# with fewer than that in all the members are taken at their word.
_ENOUGH = 200
# Weak: it only keeps a weight finite where the guesses of one side are all right or all wrong.
_INVERSE_PENALTY = 10.0

_NGRAM, _NEURAL, _SURER = range(3)
"""Columns of what is fitted; behind them the level."""


@dataclass(frozen=True, slots=True)
class Case:
    """What members gave some tokens, and which one the target said. order: length of the n-gram
    match; neural: None where there is no such member.
    """

    order: int
    level: int
    said: int
    ngram: dict[int, float]
    neural: dict[int, float] | None


def fit_calibration(
    texts: Sequence[TeacherText], ngram: NgramMember | None, student: Student | None
) -> Calibration:
    """A calibration for a draft with these members, with a regime per temperature of the texts."""
    regimes = {}
    for temperature in sorted({text.temperature for text in texts}):
        own = [text for text in texts if text.temperature == temperature]
        regimes[temperature] = _fit_regime(list(_cases(own, ngram, student)))
    return Calibration(regimes)


def _cases(
    texts: Sequence[TeacherText], ngram: NgramMember | None, student: Student | None
) -> Iterator[Case]:
    for at in range(0, len(texts), BATCH_TEXTS):
        part = texts[at : at + BATCH_TEXTS]
        told = [None] * len(part) if student is None else _neural_laws(part, student)
        for text, laws in zip(part, told, strict=True):
            yield from _cases_of(text, ngram, laws)


def _cases_of(
    text: TeacherText, ngram: NgramMember | None, laws: list[list[dict[int, float]]] | None
) -> Iterator[Case]:
    tokens = text.tokens.tolist()
    if ngram is not None:
        ngram.commit(DraftUpdate(0, 0, tuple(tokens[: text.prompt])))
    for place, said in enumerate(tokens[text.prompt :]):
        order, near = 0, {}
        if ngram is not None:
            while not ngram.catch_up(0):
                pass
            law = ngram.law(0, ngram.tail(0))
            order, near = law.order, law.likely(NEGLIGIBLE)
            ngram.commit(DraftUpdate(0, text.prompt + place, (said,)))
        if laws is None:
            yield Case(order, 0, said, near, None)
            continue
        for level, own in enumerate(laws):
            yield Case(order, level, said, near, own[place])
    if ngram is not None:
        ngram.forget(0)


@torch.inference_mode()
def _neural_laws(
    texts: Sequence[TeacherText], student: Student
) -> list[list[list[dict[int, float]]]]:
    """By text, level and position of its answer, the likeliest tokens' probabilities."""
    student.model.eval()
    batch = collate(texts, next(student.model.parameters()).device)
    vocabulary = student.vocabulary.tolist()
    found: list[list[list[dict[int, float]]]] = [[] for _ in texts]
    for hidden in student.unroll(batch, LEVELS):
        for row, (text, own) in enumerate(zip(texts, hidden, strict=True)):
            logits = student.logits(own[: len(text.top_ids)]).float()
            top = logits.softmax(-1).topk(min(LIKELIEST, logits.shape[-1]), -1)
            found[row].append(
                [
                    likely(SparseLaw(tuple(vocabulary[i] for i in ids), tuple(probs)))
                    for ids, probs in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
            )
    return found


def _fit_regime(cases: Sequence[Case]) -> Regime:
    alone = [replace(case, neural=None) for case in cases if case.level == 0]
    together = [case for case in cases if case.neural is not None]
    unfitted = UNCALIBRATED.at(0.0)
    return Regime(
        ngram=_fit_by_order(alone, unfitted.ngram[0]),
        both=_fit_by_order(together, unfitted.both[0]),
        neural=_fit_pool([replace(case, ngram={}) for case in together], unfitted.neural),
    )


def _fit_by_order(cases: Sequence[Case], otherwise: Pool) -> tuple[Pool, ...]:
    overall = _fit_pool(cases, otherwise)
    return tuple(
        _fit_pool([case for case in cases if case.order == order], overall)
        for order in range(ORDER + 1)
    )


def _fit_pool(cases: Iterable[Case], otherwise: Pool) -> Pool:
    """The pool under which what was right is likeliest."""
    rows, right = _table(cases)
    if min(right.sum(), (~right).sum()) < _ENOUGH:
        return otherwise
    # A member that is not there says the same of everything, and has no weight; then the other is
    # always the surer one, and has its own already.
    used = rows.max(axis=0) > rows.min(axis=0)
    used[_SURER] &= used[_NGRAM] and used[_NEURAL]
    if not used.any():
        return otherwise
    model = LogisticRegression(C=_INVERSE_PENALTY, max_iter=1000).fit(rows[:, used], right)
    weights = np.zeros(rows.shape[1])
    weights[used] = model.coef_[0]
    return Pool(float(model.intercept_[0]), *(float(weight) for weight in weights))


def _table(cases: Iterable[Case]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """A row per guess, with what a `Pool` weighs in its order, and if it was right."""
    rows, right = [], []
    for case in cases:
        neural = case.neural or {}
        for token in case.ngram.keys() | neural.keys():
            odds = (log_odds(case.ngram.get(token, 0.0)), log_odds(neural.get(token, 0.0)))
            rows.append((*odds, max(odds), float(case.level)))
            right.append(token == case.said)
    return np.array(rows, dtype=np.float64).reshape(-1, 4), np.array(right, dtype=bool)
