"""Whole answers in this process, without a server: the loop is driven by the caller."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from workers.request import Delta, FinishReason, GenerationRequest, SpeculationStats
from workers.verifier import Verifier


@dataclass(slots=True)
class Completion:
    """An answer, complete once `finish_reason` is set."""

    request: GenerationRequest
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: SpeculationStats | None = None

    def take(self, delta: Delta | BaseException) -> None:
        if isinstance(delta, BaseException):
            raise delta
        self.text += delta.text
        self.tokens.extend(delta.tokens)
        self.finish_reason, self.stats = delta.finish_reason, delta.stats


@dataclass(frozen=True, slots=True)
class Run:
    """Answers in the order of their requests, and the wall time all of them took together."""

    completions: list[Completion]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def total(self, field_name: str) -> int:
        """Sum of one counter of `SpeculationStats` over all answers."""
        return sum(getattr(completion.stats, field_name) for completion in self.completions)


def run_requests(
    verifier: Verifier,
    requests: Iterable[GenerationRequest],
    *,
    together: int = 1,
    on_done: Callable[[Completion], None] = lambda completion: None,
    on_delta: Callable[[Delta], None] = lambda delta: None,
) -> Run:
    """Complete all requests, `together` at a time, with a verifier whose loop is not started.

    `on_done` hears of every answer as it ends, `on_delta` of everything in between. Raises
    ValueError for a request that cannot be served.
    """
    completions: list[Completion] = []
    waiting = iter(requests)
    open_ones: set[str] = set()

    def sink(completion: Completion) -> Callable[[Delta | BaseException], None]:
        def take(delta: Delta | BaseException) -> None:
            completion.take(delta)
            assert isinstance(delta, Delta)
            on_delta(delta)
            if delta.finish_reason:
                open_ones.discard(completion.request.id)
                on_done(completion)

        return take

    started = time.perf_counter()
    while True:
        while len(open_ones) < together and (request := next(waiting, None)) is not None:
            completion = Completion(request)
            completions.append(completion)
            open_ones.add(request.id)
            verifier.submit(request, sink(completion))
        if not verifier.step():
            return Run(completions, time.perf_counter() - started)
