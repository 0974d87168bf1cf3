"""When the parts of an answer came."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from deployments.answer import Answer, Pace
from workers.request import Delta


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def answer_of(deltas: list[Delta], clock: Clock, seconds: float) -> Answer:
    async def source() -> AsyncGenerator[Delta, None]:
        for delta in deltas:
            clock.now += seconds
            yield delta

    return Answer(source(), arrived=9.0, clock=clock)


async def drain(answer: Answer) -> list[Delta]:
    await answer.start()
    return [delta async for delta in answer.deltas()]


async def test_the_pace_is_of_the_tokens_after_the_first_delta(said: Callable[..., Any]) -> None:
    deltas = said("ab", "c", "def")
    answer = answer_of(deltas, Clock(), 2.0)
    assert await drain(answer) == deltas
    assert answer.stats == deltas[-1].stats
    assert answer.pace == Pace(to_first_token=3.0, per_token=1.0)


async def test_one_delta_has_no_pace_between_tokens(said: Callable[..., Any]) -> None:
    answer = answer_of(said("abc"), Clock(), 1.0)
    await drain(answer)
    assert answer.pace == Pace(to_first_token=2.0, per_token=None)


async def test_an_answer_without_an_end_is_an_error(said: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="in the middle"):
        await drain(answer_of(said("a", "b")[:1], Clock(), 1.0))
    with pytest.raises(RuntimeError, match="without a word"):
        await drain(answer_of([], Clock(), 1.0))
