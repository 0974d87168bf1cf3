"""Many requests at once: how fast each is answered, and what the server puts out, as load grows.

A closed loop keeps so many requests open; an open loop sends them when they come, whoever still
waits (Poisson arrivals). Every load is a *level*. The arms take turns level by level, so that a
machine that slows down slows them all; one arm at one level is a lap.

Times are those of a client. To the first text: from the moment at which a request is due. Per
token: from there to the end, over all tokens but one.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice, product, zip_longest
from math import ceil
from time import perf_counter
from typing import Any, Protocol

from bench.decode import PLAIN
from deployments.prompt_file import PromptFile

PERCENTILES = (50, 95, 99)
_WARM_UP_TOKENS = 8


class NotServed(Exception):
    """A request that got no answer, or no whole one; the message says why."""


class Refused(NotServed):
    """The server did not take it."""


class Failed(NotServed):
    """The server took it, or could not be reached."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every arm. seed: also its number, each has its own."""

    domain: str
    prompt: str
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. first_at, last_at: when its first text and its end came, by `perf_counter`;
    steps: passes of the target that emitted its tokens.
    """

    first_at: float
    last_at: float
    tokens: int
    steps: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a server in a lap. kv_pages: most in use, of `kv_pool`; draft_s, pass_s: seconds that its
    steps took for proposals, and for the rest.
    """

    kv_pages: int
    kv_pool: int
    draft_s: float
    pass_s: float


class Server(Protocol):
    """Whoever answers: this process, or one at the other end of a connection.

    forgets: whether `begin` has it forget the prompts that it has read.
    """

    forgets: bool

    async def ask(self, arm: str, question: Question) -> Reply:
        """The answer. Raises NotServed."""

    def begin(self) -> None:
        """A lap begins; nothing is open."""

    def end(self) -> Usage | None:
        """The lap is over; None where a server does not tell."""

    async def close(self) -> None:
        """Nothing will be asked any more."""


def questions_of(
    files: Sequence[PromptFile], number: int, *, seed: int, max_tokens: int
) -> list[Question]:
    """So many, from all files in turn, and from the beginning again when there are no more."""
    columns = [[(file.domain, prompt) for prompt in file.prompts] for file in files]
    mixed = [own for row in zip_longest(*columns) for own in row if own is not None]
    return [
        Question(domain, prompt, seed + place, max_tokens)
        for place, (domain, prompt) in enumerate(islice(cycle(mixed), number))
    ]


# -- levels ----------------------------------------------------------------------------------------

Ask = Callable[[Question, float], Awaitable[None]]
"""Asks a question that is due at that moment, by `perf_counter`; back when it is over."""


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests are open at any time, until there are no more."""

    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.concurrency} open"

    async def drive(self, questions: Sequence[Question], ask: Ask) -> None:
        waiting = iter(questions)

        async def client() -> None:
            for question in waiting:
                await ask(question, perf_counter())

        async with asyncio.TaskGroup() as clients:
            for _ in range(self.concurrency):
                clients.create_task(client())


@dataclass(frozen=True, slots=True)
class Open:
    """Requests arrive at random, so many per second on average, the same times for a seed."""

    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s"

    def arrivals(self, number: int) -> list[float]:
        """Of a Poisson process: seconds from its beginning."""
        chance = random.Random(self.seed)
        return list(accumulate(chance.expovariate(self.rate) for _ in range(number)))

    async def drive(self, questions: Sequence[Question], ask: Ask) -> None:
        began = perf_counter()
        async with asyncio.TaskGroup() as clients:
            for question, arrival in zip(questions, self.arrivals(len(questions)), strict=True):
                due = began + arrival
                await asyncio.sleep(max(0.0, due - perf_counter()))
                clients.create_task(self._ask(ask, question, due))

    async def _ask(self, ask: Ask, question: Question, due: float) -> None:
        await ask(question, due)


Level = Closed | Open

# -- measuring -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lap:
    """One arm at one level. Seconds; texts: by the question's seed; refused, failed: by reason."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    most_open: int = 0
    usage: Usage | None = None

    def add(self, question: Question, reply: Reply, due: float) -> None:
        self.tokens += reply.tokens
        self.steps += reply.steps
        self.first.append(reply.first_at - due)
        self.whole.append(reply.last_at - due)
        if reply.tokens > 1:
            self.per_token.append((reply.last_at - reply.first_at) / (reply.tokens - 1))
        self.texts[question.seed] = reply.text

    def lose(self, error: NotServed) -> None:
        (self.refused if isinstance(error, Refused) else self.failed)[str(error)] += 1

    def report(self, plain: "Lap | None") -> dict[str, Any]:
        """Seconds; None for what there is nothing to tell of. exact_match: the share of texts that
        are plain's, of those that both have; the shares: of the lap's time.
        """
        return {
            "done": len(self.whole),
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "most_open": self.most_open,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "tau": self.tokens / self.steps if self.steps else None,
            "first_text_s": percentiles(self.first),
            "per_token_s": percentiles(self.per_token),
            "whole_s": percentiles(self.whole),
            "exact_match": None if plain is None else self._same(plain),
            **self._usage(),
        }

    def _same(self, plain: "Lap") -> float | None:
        both = self.texts.keys() & plain.texts.keys()
        same = sum(self.texts[seed] == plain.texts[seed] for seed in both)
        return same / len(both) if both else None

    def _usage(self) -> dict[str, Any]:
        if self.usage is None:
            return dict.fromkeys(("kv_pages", "kv_pool", "draft_share", "pass_share"))
        return {
            "kv_pages": self.usage.kv_pages,
            "kv_pool": self.usage.kv_pool,
            "draft_share": self.usage.draft_s / self.seconds,
            "pass_share": self.usage.pass_s / self.seconds,
        }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """Each by its name: the least of the values that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[ceil(share * len(ordered) / 100) - 1] if ordered else None
        for share in PERCENTILES
    }


OnLevel = Callable[[Mapping[str, Any]], object]


async def measure(
    server: Server,
    questions: Sequence[Question],
    arms: Sequence[str],
    levels: Sequence[Level],
    *,
    on_ready: Callable[[], object] = lambda: None,
    on_question: Callable[[], object] = lambda: None,
    on_level: OnLevel = lambda level: None,
) -> list[dict[str, Any]]:
    """For each level its `load` (in words), `concurrency` or `rate`, and `arms.<arm>` as a lap
    reports it. The server is closed in the end.

    on_ready: warmed up; on_question: a question is over; on_level: a level is, with what is known
    of it. Raises ValueError where an arm does not answer a domain's first question at all.
    """
    try:
        await _warm_up(server, questions, arms)
        on_ready()
        found = []
        for number, level in enumerate(levels):
            laps = {
                arm: await run_lap(server, arm, questions, level, on_question)
                for arm in _in_turn(arms, number)
            }
            found.append(_level_report(level, {arm: laps[arm] for arm in arms}))
            on_level(found[-1])
        return found
    finally:
        await server.close()


def _in_turn(arms: Sequence[str], number: int) -> list[str]:
    """Another one comes first at each level: what comes first may find a cooler machine."""
    start = number % len(arms)
    return [*arms[start:], *arms[:start]]


async def _warm_up(server: Server, questions: Sequence[Question], arms: Sequence[str]) -> None:
    """The first passes pay for caches and threads, also those of each domain's draft; nobody's
    number should. A server that forgets no prompt reads all of them once, so that none of the arms
    is the one that has to.
    """
    short = [replace(own, max_tokens=min(_WARM_UP_TOKENS, own.max_tokens)) for own in questions]
    firsts = {own.domain: own for own in reversed(short)}
    for arm, (domain, question) in product(arms, firsts.items()):
        try:
            await server.ask(arm, question)
        except NotServed as error:
            raise ValueError(
                f"arms: {arm} does not answer the first prompt of {domain}: {error}"
            ) from error
    if not server.forgets:
        for question in {own.prompt: own for own in short}.values():
            with suppress(NotServed):  # it will be counted where it is measured
                await server.ask(arms[0], question)


async def run_lap(
    server: Server,
    arm: str,
    questions: Sequence[Question],
    level: Level,
    on_question: Callable[[], object],
) -> Lap:
    """All questions to one arm."""
    lap, still_open = Lap(), 0

    async def ask(question: Question, due: float) -> None:
        nonlocal still_open
        still_open += 1
        lap.most_open = max(lap.most_open, still_open)
        try:
            lap.add(question, await server.ask(arm, question), due)
        except NotServed as error:
            lap.lose(error)
        still_open -= 1
        on_question()

    server.begin()
    began = perf_counter()
    await level.drive(questions, ask)
    lap.seconds = perf_counter() - began
    lap.usage = server.end()
    return lap


def _level_report(level: Level, laps: Mapping[str, Lap]) -> dict[str, Any]:
    plain = laps.get(PLAIN)
    return {
        "load": level.name,
        "concurrency": level.concurrency if isinstance(level, Closed) else None,
        "rate": level.rate if isinstance(level, Open) else None,
        "arms": {arm: lap.report(plain) for arm, lap in laps.items()},
    }
