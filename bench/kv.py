"""Four ways to hold K/V, on the same requests: how much of what they hold is used, who can run,
and what the book-keeping costs. No model is needed: what a target would say is in the trace.

Ours is the pool and the scheduler that serve, without pages on the host and with as many as it has
itself; the other two ways are other pools under the same scheduler. Time is counted in steps: in
each, all who run have a turn, as in the decode loop.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import numpy as np

from bench.kv_pools import MaxLengthPool, PagedPool, Pool
from bench.kv_trace import DEPTH, WIDTH, Arrival, arrivals
from cache.kv_pool import KVPool
from workers.answer import Answer
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest
from workers.scheduler import Limits, LiveSequence, Scheduler, Turn

WAYS = MAX_LENGTH, PAGED, OURS, HOSTED = (
    "maximum length",
    "plain paging",
    "outrider",
    "outrider, host",
)

# Memory alone is to decide who runs, and prompts are not to wait for each other for long.
LIMITS = Limits(max_running=1024, prefill_tokens=2048)
_GREEDY = SamplingParams(seed=0, temperature=0.0)
_POINTS = 400  # of the course over time, at most


@dataclass(frozen=True, slots=True)
class Settings:
    """requests: of the trace; rate: arrivals a step; kv_tokens: slots of each pool, as whole pages
    of page_size; max_tokens: the longest answer that a client asks for; seed: of the trace.
    """

    requests: int
    rate: float
    kv_tokens: int
    page_size: int
    max_tokens: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not 1 or more")

    @property
    def pages(self) -> int:
        return -(-self.kv_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class Sample:
    """One step: slots held and committed tokens in them, after it and in the midst of its pass;
    what else is held in its midst: tokens being written, and nodes of trees.
    """

    step: int
    running: int
    held: int
    stored: int
    held_in_pass: int
    stored_in_pass: int
    written: int
    trees: int


@dataclass(slots=True)
class Ledger:
    """What happened to a trace in a pool of so many slots.

    found: prompt tokens that were there at admission, of `prompts`; read_again: tokens of those who
    were sent back to the line; waits: steps from arrival to admission; seconds: CPU time of the
    scheduler and the pool.
    """

    slots: int
    samples: list[Sample] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    preemptions: int = 0
    evictions: int = 0
    recalls: int = 0
    prompts: int = 0
    found: int = 0
    read_again: int = 0
    seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        """Shares, means and counts; waste is the share of held slots without a committed token."""
        samples = self.samples
        return {
            "waste": _spread([1 - s.stored / s.held for s in samples if s.held]),
            "waste_in_passes": _spread([1 - s.stored_in_pass / s.held_in_pass for s in samples])
            | {
                "written": _mean([s.written / s.held_in_pass for s in samples]),
                "trees": _mean([s.trees / s.held_in_pass for s in samples]),
            },
            "held": _mean([s.held_in_pass / self.slots for s in samples]),
            "running": _mean([s.running for s in samples]),
            "finished": self.finished,
            "cancelled": self.cancelled,
            "refused": self.refused,
            "preemptions": self.preemptions,
            "evictions": self.evictions,
            "recalls": self.recalls,
            "prefix_hits": self.found / self.prompts if self.prompts else 0.0,
            "tokens_read_again": self.read_again,
            "steps": len(samples),
            "steps_in_line": _mean(self.waits),
            "microseconds_per_step": 1e6 * self.seconds / len(samples),
            "over_time": _course(samples),
        }


class Request(LiveSequence):
    """An arrival on its way; `steps` of its paths are behind it."""

    def __init__(self, number: int, arrival: Arrival) -> None:
        request = GenerationRequest(
            f"{number}", arrival.prompt, arrival.max_tokens, _GREEDY, draft="", budget=WIDTH * DEPTH
        )
        answer = Answer(request, _Mute(), frozenset())
        super().__init__(number, request, answer, lambda delta: None)
        self.arrival = arrival
        self.steps = 0
        self.admitted = False

    @property
    def said(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.arrival.prompt)

    @property
    def nodes(self) -> int:
        """Of its next proposal, which is no deeper than the answer may still grow, and one less:
        the last token needs no guess.
        """
        return WIDTH * min(DEPTH, self.arrival.max_tokens - self.said - 1)

    def hear(self) -> tuple[int, ...]:
        """Take what the target says next; which nodes were right."""
        path = self.arrival.paths[self.steps]
        self.steps += 1
        self.extend(self.arrival.answer[self.said : self.said + len(path) + 1])
        return path

    @property
    def complete(self) -> bool:
        return self.steps == len(self.arrival.paths)


class _Mute:
    """A tokenizer for answers that nobody reads."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return ""


class Replay:
    """A trace, ascending by steps, through one pool; on_end is called for every request's end."""

    def __init__(
        self,
        trace: Sequence[Arrival],
        pool: Pool,
        limits: Limits = LIMITS,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.ledger = Ledger(pool.pages * pool.page_size)
        self.scheduler = Scheduler(pool, limits)
        self._pool = pool
        self._on_end = on_end
        self._now = 0
        self._coming = deque(Request(number, arrival) for number, arrival in enumerate(trace))

    def run(self) -> Ledger:
        """Until everybody has ended. Fails an assertion if the pool's book is not in order then."""
        while self.step():
            pass
        self._pool.check_integrity()
        assert not self._pool.pages_in_use, f"{self._pool.pages_in_use} pages are never given back"
        self.ledger.evictions, self.ledger.recalls = self._pool.evictions, self._pool.recalls
        return self.ledger

    def step(self) -> bool:
        """One pass for all who run; False when nobody is left."""
        self._skip_idle_time()
        self._take_in()
        gone = [request for request in self._everybody() if self._has_left(request)]
        turns = self._begin(gone)
        for _ in gone:
            self.ledger.cancelled += 1
            self._on_end()
        assert turns or not self._everybody(), "somebody always moves"
        if turns:
            held, stored = self._used()
            own = sum(turn.stop - turn.start for turn in turns)
            trees = sum(_nodes(turn) for turn in turns)
            self._settle(turns)
            self.ledger.samples.append(
                Sample(self._now, len(turns), *self._used(), held, stored, own, trees)
            )
        self._now += 1
        return bool(self._coming or self._everybody())

    def _skip_idle_time(self) -> None:
        if self._coming and not self._everybody():
            self._now = max(self._now, self._coming[0].arrival.step)

    def _take_in(self) -> None:
        """Those who have arrived by now join the line, if they can be served at all."""
        while self._coming and self._coming[0].arrival.step <= self._now:
            request = self._coming.popleft()
            try:
                self.scheduler.check(request)
            except ValueError:
                self.ledger.refused += 1
                self._on_end()
            else:
                self.scheduler.waiting.extend([request])

    def _everybody(self) -> list[LiveSequence]:
        return [*self.scheduler.waiting, *self.scheduler.running.values()]

    def _has_left(self, sequence: LiveSequence) -> bool:
        arrival = _request(sequence).arrival
        return arrival.leaves is not None and arrival.step + arrival.leaves <= self._now

    def _begin(self, gone: Sequence[LiveSequence]) -> list[Turn]:
        """Turns, and slots for them, as the decode loop has them before a pass."""
        began = process_time()
        for sequence in gone:
            self.scheduler.leave(sequence)
        preempted = self.scheduler.preempt()
        admitted = self.scheduler.admit()
        turns = self.scheduler.turns()
        for turn in turns:
            number = turn.sequence.number
            self._pool.reserve(number, turn.stop - turn.start + _nodes(turn))
            self._pool.extents(number)
        self._pool.swaps()
        self.ledger.seconds += process_time() - began
        self.ledger.preemptions += len(preempted)
        for sequence in admitted:
            self._note_admission(_request(sequence))
        return turns

    def _note_admission(self, request: Request) -> None:
        known = self._pool.committed(request.number)
        if request.admitted:
            self.ledger.read_again += len(request.tokens) - known
            return
        request.admitted = True
        self.ledger.waits.append(self._now - request.arrival.step)
        self.ledger.prompts += len(request.arrival.prompt)
        self.ledger.found += known

    def _settle(self, turns: Sequence[Turn]) -> None:
        """What the decode loop does after a pass: keep the accepted, and let the complete go."""
        kept = [_kept(turn) for turn in turns]
        began = process_time()
        for turn, (slots, tokens) in zip(turns, kept, strict=True):
            self._pool.commit(turn.sequence.number, slots, tokens)
            if _request(turn.sequence).complete:
                self.scheduler.leave(turn.sequence)
        self._pool.end_step()
        self.ledger.seconds += process_time() - began
        for turn in turns:
            if _request(turn.sequence).complete:
                self.ledger.finished += 1
                self._on_end()

    def _used(self) -> tuple[int, int]:
        """Slots held, and committed tokens in them."""
        held, stored = self._pool.pages_in_use * self._pool.page_size, self._pool.tokens_stored
        assert stored <= held, f"{stored} tokens in {held} slots"
        return held, stored


def _request(sequence: LiveSequence) -> Request:
    assert isinstance(sequence, Request)
    return sequence


def _nodes(turn: Turn) -> int:
    return _request(turn.sequence).nodes if turn.decodes else 0


def _kept(turn: Turn) -> tuple[list[int], list[int]]:
    """Which slots of a turn are kept, and the tokens in them."""
    sequence, own = turn.sequence, turn.stop - turn.start
    path = _request(sequence).hear() if turn.decodes else ()
    slots = [*range(own), *(own + node for node in path)]
    return slots, sequence.tokens[turn.start : turn.start + len(slots)]


# -- all of them -----------------------------------------------------------------------------------


def pools(settings: Settings, trace: Sequence[Arrival]) -> dict[str, Pool]:
    """Of the same size, by way."""
    sizes = {number: Request(number, arrival).most_slots for number, arrival in enumerate(trace)}
    return {
        MAX_LENGTH: MaxLengthPool(settings.pages * settings.page_size, sizes),
        PAGED: PagedPool(settings.pages, settings.page_size),
        OURS: KVPool(settings.pages, settings.page_size),
        HOSTED: KVPool(settings.pages, settings.page_size, host_pages=settings.pages),
    }


def measure(settings: Settings, on_end: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """`ways.<way>` as `Ledger.report` has it, and `trace`, what was asked of each.

    on_end: called for each request's end in each way. Raises ValueError that names the setting that
    cannot be, or lets no request run.
    """
    trace = arrivals(settings.requests, settings.rate, settings.max_tokens, settings.seed)
    ways = {}
    for name, pool in pools(settings, trace).items():
        ledger = Replay(trace, pool, on_end=on_end).run()
        if not ledger.samples:
            raise ValueError(
                f"kv_tokens: no request of the trace fits into {settings.kv_tokens}; give the "
                "pools more, or lower max_tokens"
            )
        ways[name] = ledger.report()
    return {"ways": ways, "trace": describe(trace)}


def describe(trace: Sequence[Arrival]) -> dict[str, Any]:
    """Sums and means of what is asked."""
    return {
        "requests": len(trace),
        "prompt_tokens": _mean([len(arrival.prompt) for arrival in trace]),
        "answer_tokens": _mean([len(arrival.answer) for arrival in trace]),
        "max_tokens": _mean([arrival.max_tokens for arrival in trace]),
        "tokens_per_pass": sum(len(arrival.answer) for arrival in trace)
        / sum(len(arrival.paths) for arrival in trace),
        "leaving": sum(arrival.leaves is not None for arrival in trace),
    }


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people; ROWS say what is what."""
    ways = summary["ways"]
    lines = [f"{'':<36}" + "".join(f"{name:>16}" for name in ways)]
    lines += [
        f"{title:<36}" + "".join(f"{text(report):>16}" for report in ways.values())
        for title, text in ROWS
    ]
    return "\n".join(lines)


Cell = Callable[[Mapping[str, Any]], str]


def _share(key: str, part: str) -> Cell:
    return lambda report: f"{report[key][part]:.1%}"


def _number(key: str, form: str = ",d") -> Cell:
    return lambda report: format(report[key], form)


ROWS: Sequence[tuple[str, Cell]] = (
    ("waste after steps: mean", _share("waste", "mean")),
    ("  95th percentile", _share("waste", "p95")),
    ("  most", _share("waste", "max")),
    ("uncommitted in passes: mean", _share("waste_in_passes", "mean")),
    ("  95th percentile", _share("waste_in_passes", "p95")),
    ("  most", _share("waste_in_passes", "max")),
    ("  tokens being written, of it", _share("waste_in_passes", "written")),
    ("  guesses, of it", _share("waste_in_passes", "trees")),
    ("of the pool held", _number("held", ".1%")),
    ("requests running", _number("running", ".1f")),
    ("finished", _number("finished")),
    ("cancelled", _number("cancelled")),
    ("refused", _number("refused")),
    ("preemptions", _number("preemptions")),
    ("evicted pages", _number("evictions")),
    ("pages back from the host", _number("recalls")),
    ("prompt tokens found", _number("prefix_hits", ".1%")),
    ("tokens read again", _number("tokens_read_again")),
    ("steps", _number("steps")),
    ("steps in line", _number("steps_in_line", ".1f")),
    ("book-keeping, microseconds a step", _number("microseconds_per_step", ".0f")),
)
"""What tables show of a way's report, by title."""


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _spread(shares: Sequence[float]) -> dict[str, float]:
    p95 = float(np.percentile(shares, 95)) if shares else 0.0
    return {"mean": _mean(shares), "p95": p95, "max": max(shares, default=0.0)}


def _course(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Means over equal numbers of steps, so that a picture has a few hundred points."""
    size = -(-len(samples) // _POINTS)
    parts = [samples[first : first + size] for first in range(0, len(samples), size)]
    wastes = [_mean([1 - s.stored / s.held for s in part if s.held]) for part in parts]
    return {
        "step": [part[0].step for part in parts],
        "waste": [round(waste, 4) for waste in wastes],
        "running": [round(_mean([s.running for s in part]), 2) for part in parts],
    }
