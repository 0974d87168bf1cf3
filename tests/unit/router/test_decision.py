"""Pools and outcomes that cannot be are refused by name."""

import pytest

from router.decision import Candidate, Outcome, check_pool


@pytest.mark.parametrize("name", ["none", "auto", ""])
def test_a_draft_cannot_take_a_word_that_requests_use(name: str) -> None:
    with pytest.raises(ValueError, match="named"):
        check_pool([Candidate(name, None, "ngram")])


def test_two_drafts_cannot_share_a_name() -> None:
    with pytest.raises(ValueError, match="two drafts are named 'code'"):
        check_pool([Candidate("code", "code", "ngram"), Candidate("code", None, "lm")])


def test_a_pool_keeps_its_order() -> None:
    pool = [Candidate(name, None, "lm") for name in ("b", "a")]
    assert check_pool(pool) == tuple(pool)


@pytest.mark.parametrize(
    "field, value",
    [
        ("tokens_per_second", float("nan")),
        ("tokens_per_second", -1.0),
        ("tau", float("inf")),
        ("tokens", -1),
        ("alpha", 1.01),
        ("alpha", float("nan")),
    ],
)
def test_outcomes_nobody_can_measure_are_refused(field: str, value: float) -> None:
    good = {"tokens_per_second": 10.0, "alpha": 0.5, "tau": 2.0, "tokens": 64}
    Outcome("f", "code", **good)
    with pytest.raises(ValueError, match=field):
        Outcome("f", "code", **(good | {field: value}))
