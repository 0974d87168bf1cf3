"""Each strategy's choice and its reason, on contexts written by hand."""

from collections.abc import Mapping

import numpy as np
import pytest

from cache.similarity import Evidence, Neighbour
from router.decision import PLAIN, Candidate
from router.fingerprint import Fingerprint
from router.intent import Intent
from router.strategy import (
    SURE,
    DefaultStrategy,
    IntentStrategy,
    RouteContext,
    SimilarityStrategy,
    draft_for_intent,
    evidence_by_draft,
)

POOL = tuple(Candidate(name, name, "ngram") for name in ("code", "math", "en")) + (
    Candidate("lm", None, "lm"),
)
MATH, UNSURE = Intent("math", 0.97), Intent("math", SURE - 0.01)


def ran(speed: float, tokens: float = 100, alpha: float | None = 0.5) -> Evidence:
    return Evidence(tokens, tokens / speed, alpha)


def context(
    *neighbours: Mapping[str, Evidence], intent: Intent = UNSURE, **typical: float
) -> RouteContext:
    vector = np.ones(4, np.float32) / 2
    near = tuple(Neighbour(str(i), 0.95 - i / 100, e) for i, e in enumerate(neighbours))
    return RouteContext(Fingerprint("key", vector), intent, near, typical.get)


async def choose_similar(seen: RouteContext, pool: tuple[Candidate, ...] = POOL) -> str | None:
    """The draft, "plain", or None for an abstention."""
    decision = await SimilarityStrategy().choose(seen, pool)
    return decision and (decision.draft or "plain")


# Similarity


async def test_without_neighbours_it_abstains() -> None:
    assert await choose_similar(context()) is None


async def test_the_fastest_on_similar_prompts_wins_and_says_why() -> None:
    seen = context({"en": ran(40)}, {"code": ran(100, alpha=0.7), "en": ran(50)})
    decision = await SimilarityStrategy().choose(seen, POOL)
    assert decision is not None
    assert (decision.draft, decision.reason) == ("code", "similar")
    assert decision.detail == (
        "On 2 similar prompts (cosine up to 0.95) these ran: "
        "code at 100.0 tokens/s (alpha 0.70), en at 44.4 tokens/s (alpha 0.50)."
    )
    assert Fingerprint.from_wire(decision.fingerprint).key == "key"


async def test_a_long_run_counts_more_than_a_short_one() -> None:
    seen = context({"code": ran(20, tokens=1000), "en": ran(30)}, {"code": ran(90, tokens=10)})
    assert await choose_similar(seen) == "en"


async def test_plain_decoding_is_chosen_where_it_was_fastest() -> None:
    seen = context({"en": ran(20), PLAIN: ran(30, alpha=None)})
    decision = await SimilarityStrategy().choose(seen, POOL)
    assert decision is not None
    assert decision.draft is None
    assert "plain decoding at 30.0 tokens/s, en" in decision.detail


async def test_evidence_of_drafts_that_left_the_pool_is_ignored() -> None:
    assert await choose_similar(context({"gone": ran(500)})) is None
    assert await choose_similar(context({"gone": ran(500), "en": ran(20)})) == "en"


async def test_an_unmeasured_native_draft_gets_its_trial() -> None:
    assert await choose_similar(context({"code": ran(100)}, intent=MATH)) is None


async def test_a_native_draft_that_is_typically_faster_gets_its_trial() -> None:
    assert await choose_similar(context({"code": ran(50)}, intent=MATH, math=60)) is None


async def test_a_stranger_faster_than_the_native_draft_promises_stays() -> None:
    assert await choose_similar(context({"code": ran(70)}, intent=MATH, math=60)) == "code"


async def test_after_the_trial_speeds_decide_whatever_was_promised() -> None:
    seen = context({"code": ran(50), "math": ran(30)}, intent=MATH, math=90)
    assert await choose_similar(seen) == "code"


async def test_plain_runs_alone_do_not_keep_a_draft_from_its_trial() -> None:
    assert await choose_similar(context({PLAIN: ran(30, alpha=None)})) is None
    assert await choose_similar(context({PLAIN: ran(30, alpha=None)}, en=20)) == "plain"


async def test_an_empty_pool_leaves_plain_decoding() -> None:
    assert await choose_similar(context({PLAIN: ran(30, alpha=None)}), ()) == "plain"


def test_evidence_is_summed_per_draft() -> None:
    seen = context({"code": ran(100), "gone": ran(1)}, {"code": ran(50)})
    assert evidence_by_draft(seen.neighbours, ["code"]) == {"code": Evidence(200, 3, 0.5)}


# Intent


async def test_the_draft_of_the_domain_is_chosen_when_sure() -> None:
    decision = await IntentStrategy().choose(context(intent=MATH, math=61.5), POOL)
    assert decision is not None
    assert (decision.draft, decision.reason) == ("math", "intent")
    assert decision.detail == (
        "The prompt looks like math (0.97): math is its draft, typically 61.5 tokens/s."
    )


@pytest.mark.parametrize("intent", [UNSURE, Intent("zh", 0.99)])
async def test_unsure_or_without_a_draft_it_abstains(intent: Intent) -> None:
    assert await IntentStrategy().choose(context(intent=intent), POOL) is None


def test_of_several_drafts_one_that_never_ran_goes_first_then_the_fastest() -> None:
    pool = (*POOL, Candidate("math lm", "math", "lm"))

    def chosen(**typical: float) -> str:
        found = draft_for_intent(context(intent=MATH, **typical), pool)
        assert found is not None
        return found.name

    assert chosen() == "math"
    assert chosen(math=60) == "math lm"
    assert chosen(**{"math": 60, "math lm": 80}) == "math lm"
    assert chosen(**{"math": 60, "math lm": 50}) == "math"


# Default


@pytest.mark.parametrize(
    "names, expected",
    [(("code", "en", "lm"), "en"), (("code", "lm"), "lm"), (("math", "code"), "math")],
)
async def test_the_default_is_for_everyday_language(names: tuple[str, ...], expected: str) -> None:
    pool = [next(c for c in POOL if c.name == name) for name in names]
    decision = await DefaultStrategy().choose(context(code=900), pool)
    assert decision is not None
    assert (decision.draft, decision.reason) == (expected, "default")
    assert f"best guess math, 0.59): {expected} is the default." in decision.detail


async def test_the_default_of_an_empty_pool_is_plain() -> None:
    decision = await DefaultStrategy().choose(context(), ())
    assert decision is not None
    assert decision.draft is None
    assert "the pool is empty" in decision.detail
