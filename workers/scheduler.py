"""Who runs in the next pass: admission, chunked prefill, and one turn each for all who decode.

Whoever is admitted has room for what it knows and for some tokens more, not for all that it may
grow to: most answers end early. Should the pool run full, the youngest goes back to the line and
reads what it has said again later, as far as neither the pool nor the host knows it still. The
oldest always goes on, so there is always somebody who does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.answer import Answer
from workers.engine.sampling import Grammar, TokenHistory
from workers.line import Line
from workers.request import Delta, GenerationRequest

Sink = Callable[[Delta | BaseException], None]

# Tokens that everybody must have room for before another one is admitted, so that it is not sent
# back at once: some ten passes.
_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """max_running: requests in one pass; max_queued: requests that may wait for a place;
    prefill_tokens: prompt tokens in one pass, of all requests together; draft_timeout_s: longest
    wait for a draft's proposals before its sequences decode plainly.
    """

    max_running: int = 8
    max_queued: int = 64
    prefill_tokens: int = 256
    draft_timeout_s: float = 0.25

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name}: {getattr(self, name)} is not 1 or more")


class LiveSequence:
    """A request on its way.

    tokens: prompt and answer so far; the last one has no KV yet, nor has a prompt's tail that
    is still to be prefilled.
    """

    def __init__(
        self,
        number: int,
        request: GenerationRequest,
        answer: Answer,
        sink: Sink,
        grammar: Grammar | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.answer = answer
        self.sink = sink
        self.tokens = [*request.prompt, *request.said]
        self.history = TokenHistory(request.prompt, answer.ends, request.min_tokens, grammar)
        self.history.extend(request.said)

    @property
    def draft(self) -> str | None:
        return self.request.draft if self.request.budget else None

    @property
    def group(self) -> str:
        """With whom it takes turns in line."""
        return self.request.group or self.request.id

    @property
    def most_slots(self) -> int:
        """Slots it can ever need: all its tokens and one proposal."""
        return len(self.request.prompt) + self.request.max_tokens + self.request.budget

    def slots(self, ahead: int) -> int:
        """Slots for what it knows, a proposal, and up to `ahead` tokens more."""
        return min(len(self.tokens) + self.request.budget + ahead, self.most_slots)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self.history.extend(tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """A sequence's share of the next pass: its tokens from `start` up to `stop`."""

    sequence: LiveSequence
    start: int
    stop: int

    @property
    def decodes(self) -> bool:
        """Whether it reaches the end of what is known, so that a new token follows."""
        return self.stop == len(self.sequence.tokens)


class Pages(Protocol):
    """What a scheduler asks of a pool; `cache.kv_pool.KVPool` says what each means."""

    @property
    def pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def pages_free(self) -> int: ...

    def open(self, sequence: int, tokens: Sequence[int] = ()) -> int: ...

    def recall(self, sequence: int, tokens: Sequence[int]) -> int: ...

    def close(self, sequence: int) -> None: ...

    def committed(self, sequence: int) -> int: ...

    def pages_missing(self, sequence: int, slots: int) -> int: ...


class Scheduler:
    """Who has come first is served first, as far as `Line` says so."""

    def __init__(self, pool: Pages, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self.waiting: Line[LiveSequence] = Line()
        self.running: dict[int, LiveSequence] = {}

    def check(self, sequence: LiveSequence) -> None:
        """Raises ValueError for a request that could never be served."""
        room = self._pool.pages * self._pool.page_size
        if sequence.most_slots > room:
            raise ValueError(
                f"max_tokens: prompt, answer and tree need {sequence.most_slots} KV slots, but the "
                f"pool has {room}; ask for fewer tokens or a smaller budget, or raise "
                "target.kv_tokens"
            )

    def admit(self) -> list[LiveSequence]:
        """Move those who fit from the line into the batch."""
        admitted = []
        while self.waiting and len(self.running) < self._limits.max_running:
            sequence = self.waiting.first
            self._pool.open(sequence.number, sequence.tokens)
            self.running[sequence.number] = sequence
            if self._pages_missing(_AHEAD) > self._pool.pages_free:
                self._close(sequence)
                break
            self._pool.recall(sequence.number, sequence.tokens)
            self.waiting.remove(sequence)
            admitted.append(sequence)
        return admitted

    def preempt(self) -> list[LiveSequence]:
        """Move the youngest back into the line until the others have room for the next pass."""
        preempted = []
        while self._pages_missing(0) > self._pool.pages_free:
            sequence = next(reversed(self.running.values()))
            self._close(sequence)
            self.waiting.put_back(sequence)
            preempted.append(sequence)
        return preempted

    def turns(self) -> list[Turn]:
        """One turn for each that decodes, and prompt chunks up to the limit for the others."""
        turns = []
        left = self._limits.prefill_tokens
        for sequence in self.running.values():
            start, known = self._pool.committed(sequence.number), len(sequence.tokens)
            stop = min(known, start + max(left, 0)) if known - start > 1 else known
            left -= stop - start if known - start > 1 else 0
            if stop > start:
                turns.append(Turn(sequence, start, stop))
        return turns

    def leave(self, sequence: LiveSequence) -> None:
        """End a sequence wherever it is, and give back what it holds."""
        if sequence.number in self.running:
            self._close(sequence)
        else:
            self.waiting.remove(sequence)

    def _close(self, sequence: LiveSequence) -> None:
        del self.running[sequence.number]
        self._pool.close(sequence.number)

    def _pages_missing(self, ahead: int) -> int:
        """Pages that those who run lack for what they know, a proposal, and `ahead` tokens each."""
        return sum(
            self._pool.pages_missing(number, sequence.slots(ahead))
            for number, sequence in self.running.items()
        )
