"""The router with a quick fingerprinter: order of strategies, learning, counting."""

import numpy as np
import pytest

from cache.similarity import LocalSimilarityCache
from router.decision import Candidate, Outcome, RouteDecision, RouteRequest
from router.fingerprint import DIM, Fingerprint
from router.intent import IntentModel
from router.router import Router, RouterStats
from tests.fingerprints import ByCharacters

POOL = tuple(Candidate(name, name, "ngram") for name in ("code", "math", "en", "zh"))
QUESTION = RouteRequest("这座城市有多少人口？", "")  # all Han: zh by its script alone


def build(pool: tuple[Candidate, ...] = POOL, threshold: float = 0.85) -> Router:
    cache = LocalSimilarityCache(dim=DIM, ttl_s=60, max_entries=16)
    return Router(pool, ByCharacters(), IntentModel.load(), cache, threshold=threshold)


def outcome(decision: RouteDecision, draft: str | None, speed: float, tokens: int = 64) -> Outcome:
    return Outcome(decision.fingerprint, draft, speed, 0.5, 2.0, tokens)


async def test_the_first_decision_is_by_intent() -> None:
    decision = await build().decide(QUESTION)
    assert (decision.draft, decision.reason) == ("zh", "intent")


async def test_outcomes_change_later_decisions() -> None:
    router = build()
    first = await router.decide(QUESTION)
    await router.observe(outcome(first, "zh", 40))
    second = await router.decide(RouteRequest(QUESTION.query + "。", ""))
    assert (second.draft, second.reason) == ("zh", "similar")
    await router.observe(outcome(first, "code", 90))
    third = await router.decide(QUESTION)
    assert (third.draft, third.reason) == ("code", "similar")
    await router.observe(outcome(first, None, 200))
    assert (await router.decide(QUESTION)).draft is None


async def test_a_draft_alone_in_its_neighbourhood_meets_the_native_one_once() -> None:
    router = build()
    fingerprint = (await router.decide(QUESTION)).fingerprint
    await router.observe(Outcome(fingerprint, "code", 50, 0.5, 2.0, 64))
    trial = await router.decide(QUESTION)
    assert (trial.draft, trial.reason) == ("zh", "intent")
    await router.observe(outcome(trial, "zh", 30))
    assert (await router.decide(QUESTION)).draft == "code"


async def test_without_a_draft_for_the_intent_the_default_answers() -> None:
    decision = await build(POOL[:3]).decide(QUESTION)
    assert (decision.draft, decision.reason) == ("en", "default")


async def test_an_empty_pool_decodes_plainly() -> None:
    assert (await build(()).decide(QUESTION)).draft is None


async def test_an_answer_without_tokens_teaches_nothing() -> None:
    router = build()
    decision = await router.decide(QUESTION)
    await router.observe(outcome(decision, "zh", 0, tokens=0))
    await router.observe(outcome(decision, "zh", 0, tokens=5))
    assert router.stats().cache_entries == 0


async def test_decisions_and_hits_are_counted() -> None:
    router = build()
    decision = await router.decide(QUESTION)
    await router.observe(outcome(decision, "zh", 40))
    await router.decide(QUESTION)
    await router.decide(RouteRequest("另外一件完全不同的事情", ""))
    assert router.stats() == RouterStats(
        decisions={"similar": 1, "intent": 2, "default": 0},
        cache_hits=1,
        cache_misses=2,
        cache_entries=1,
        dropped_writes=0,
        cache_connected=True,
    )
    await router.close()


async def test_what_ran_without_a_decision_is_evidence_too() -> None:
    router = build()
    wire = await router.fingerprint(QUESTION)
    for draft, speed in (("zh", 40), ("code", 70)):
        await router.observe(Outcome(wire, draft, speed, 0.5, 2.0, 64))
    decision = await router.decide(QUESTION)
    assert (decision.draft, decision.reason) == ("code", "similar")
    await router.close()


@pytest.mark.parametrize("wire", ["nonsense", Fingerprint("key", np.ones(8, np.float32)).to_wire()])
async def test_an_outcome_of_no_decision_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        await build().observe(Outcome(wire, "zh", 40, 0.5, 2.0, 64))


@pytest.mark.parametrize("threshold", [0, 1, -0.5, float("nan")])
def test_a_threshold_that_is_no_cosine_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        build(threshold=threshold)
