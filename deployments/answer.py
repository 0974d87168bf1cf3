"""One answer as it arrives from the verifier, and the times at which its parts did."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from deployments.merge import merged
from workers.request import Delta, FinishReason, SpeculationStats, altogether

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an answer came. Seconds.

    to_first_token: from the request's arrival, queueing and prefill included.
    per_token:      between later tokens; None when everything came at once.
    """

    to_first_token: float
    per_token: float | None


class Answers:
    """The choices of one request, as they arrive together.

    `start()` waits until each has begun, so that an error before that can still be an HTTP status.
    Whatever ends them early, `aclose()` cancels all.
    """

    def __init__(self, answers: Sequence["Answer"]) -> None:
        self.answers = tuple(answers)

    async def start(self) -> None:
        """Waits for the first delta of each, or raises what came instead of one."""
        try:
            async with asyncio.TaskGroup() as group:
                for answer in self.answers:
                    group.create_task(answer.start())
        except ExceptionGroup as errors:
            await self.aclose()
            raise errors.exceptions[0] from None
        except BaseException:  # the client has left
            await self.aclose()
            raise

    def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """All deltas from the first, each with the number of its choice."""
        return merged([answer.deltas() for answer in self.answers])

    async def aclose(self) -> None:
        """Cancels what is still to come."""
        for answer in self.answers:
            await answer.aclose()

    @property
    def stats(self) -> SpeculationStats:
        """What was counted for all of them; they are complete."""
        return altogether([answer.stats for answer in self.answers if answer.stats])


class Answer:
    """Passes the deltas on and remembers when they came.

    `start()` waits for the first one, so that an error before it can still be an HTTP status.
    Whatever ends the answer early, `aclose()` cancels the request in the verifier.
    """

    def __init__(
        self,
        deltas: AsyncGenerator[Delta, None],
        arrived: float,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._source = deltas
        self._arrived = arrived
        self._clock = clock
        self._first: Delta | None = None
        self._first_at = self._last_at = arrived
        self.finish_reason: FinishReason | None = None
        self.stats: SpeculationStats | None = None
        """What was counted; set by the last delta."""

    async def start(self) -> None:
        """Waits for the first delta, or raises what comes instead of it."""
        try:
            self._first = await anext(self._source)
        except StopAsyncIteration:
            raise RuntimeError("the verifier ended an answer without a word") from None
        self._first_at = self._clock()
        self._note(self._first)

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """All deltas from the first."""
        assert self._first is not None, "start() comes first"
        async with aclosing(self._source):
            yield self._first
            async for delta in self._source:
                self._note(delta)
                yield delta
        if self.stats is None:
            raise RuntimeError("the verifier ended an answer in the middle")

    async def aclose(self) -> None:
        """Cancels what is still to come; nothing happens when the answer is complete."""
        await self._source.aclose()

    @property
    def pace(self) -> Pace:
        """Of a complete answer."""
        assert self._first is not None
        assert self.stats is not None
        later = self.stats.emitted - len(self._first.tokens)
        seconds = self._last_at - self._first_at
        return Pace(self._first_at - self._arrived, seconds / later if later > 0 else None)

    def _note(self, delta: Delta) -> None:
        self._last_at = self._clock()
        if delta.finish_reason:
            self.finish_reason, self.stats = delta.finish_reason, delta.stats
