"""Answers go on with the next verifier: token by token, and only as long as somebody waits."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from deployments import resuming
from deployments.links import VerifierAway
from deployments.resuming import ResumingVerifier
from workers.engine.sampling import SamplingParams
from workers.request import Beginning, Delta, GenerationRequest
from workers.verifier import EngineError, QueueFull

REQUEST = GenerationRequest("r", (1, 2), 9, SamplingParams(seed=0), draft="code", budget=4)
AWAY = VerifierAway("it stopped while it was answering")

Said = Callable[..., list[Delta]]


class Lives:
    """A verifier that dies: each attempt meets the next of these scripts, the last one for ever."""

    def __init__(self, *lives: list[Delta | Exception]) -> None:
        self.lives = lives
        self.asked: list[GenerationRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        life = self.lives[min(len(self.asked), len(self.lives) - 1)]
        self.asked.append(request)
        try:
            for item in life:
                if isinstance(item, Exception):
                    raise item
                yield item
        except GeneratorExit:
            self.cancelled += 1
            raise


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "AGAIN_AFTER_S", 0.001)


async def heard(lives: Lives, patience_s: float = 60, clock: Any = None) -> list[Delta]:
    link: Any = lives
    verifier = ResumingVerifier(link, patience_s, **({"clock": clock} if clock else {}))
    return [delta async for delta in verifier.generate(REQUEST)]


async def test_no_token_is_lost_and_none_comes_twice(said: Said) -> None:
    deltas = said("Hel", "lo ", "you", "!", draft="code")
    lives = Lives([*deltas[:2], AWAY], [AWAY], [deltas[2], AWAY], [deltas[3]])
    assert await heard(lives) == deltas
    beginnings = [request.beginning for request in lives.asked]
    hello, hello_you = tuple(map(ord, "Hello ")), tuple(map(ord, "Hello you"))
    assert beginnings == [
        None,
        Beginning(hello, deltas[1].stats),
        Beginning(hello, deltas[1].stats),
        Beginning(hello_you, deltas[2].stats),
    ]
    assert all(replace(request, beginning=None) == REQUEST for request in lives.asked)


async def test_what_is_over_is_not_asked_for_again(said: Said) -> None:
    deltas = said("Hel", "lo")
    lives = Lives([*deltas, AWAY])
    assert await heard(lives) == deltas
    assert lives.asked == [REQUEST]


async def test_who_has_heard_nothing_yet_waits_as_well(said: Said) -> None:
    deltas = said("Hello")
    lives = Lives([AWAY], deltas)
    assert await heard(lives) == deltas
    assert lives.asked == [REQUEST, REQUEST]


async def test_a_full_queue_refuses_newcomers_and_nobody_else(said: Said) -> None:
    deltas, full = said("Hel", "lo"), QueueFull("64 requests wait already")
    with pytest.raises(QueueFull):
        await heard(Lives([full]))
    with pytest.raises(QueueFull):
        await heard(Lives([AWAY], [full]))
    assert await heard(Lives([deltas[0], AWAY], [full], deltas[1:])) == deltas


async def test_patience_is_for_one_loss_and_not_for_all_of_them(said: Said) -> None:
    deltas, now = said("a", "b", "c"), 0.0

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    often = Lives([deltas[0], AWAY], [AWAY], [deltas[1], AWAY], [AWAY], [deltas[2]])
    assert await heard(often, patience_s=4, clock=clock) == deltas
    never = Lives([deltas[0], AWAY], [AWAY])
    with pytest.raises(VerifierAway):
        await heard(never, patience_s=4, clock=clock)
    assert 2 < len(never.asked) < 6


async def test_other_errors_are_the_requests_own(said: Said) -> None:
    for error in (EngineError("the forward pass failed"), ValueError("max_tokens: too many")):
        lives = Lives([said("Hel", "lo")[0], error])
        with pytest.raises(type(error)):
            await heard(lives)
        assert len(lives.asked) == 1


async def test_a_client_that_leaves_is_forgotten_while_it_hears_and_while_it_waits(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: Any = Lives(said("Hel", "lo"))
    async with aclosing(ResumingVerifier(lives, 60).generate(REQUEST)) as deltas:
        await anext(deltas)
    assert lives.cancelled == 1

    monkeypatch.setattr(resuming, "AGAIN_AFTER_S", 3600)
    away: Any = Lives([AWAY])
    waiting = asyncio.ensure_future(anext(ResumingVerifier(away, 60).generate(REQUEST)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(away.asked) == 1
