"""Who runs in the next pass: admission, chunked prefill, and one turn each for all who decode."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cache.kv_pool import KVPool
from workers.answer import Answer
from workers.engine.sampling import TokenHistory
from workers.request import Delta, GenerationRequest

Sink = Callable[[Delta | BaseException], None]


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

    def __init__(self, number: int, request: GenerationRequest, answer: Answer, sink: Sink) -> None:
        self.number = number
        self.request = request
        self.answer = answer
        self.sink = sink
        self.tokens = list(request.prompt)
        self.history = TokenHistory(request.prompt)

    @property
    def draft(self) -> str | None:
        return self.request.draft if self.request.budget else None

    @property
    def most_slots(self) -> int:
        """Slots it can ever need: all its tokens and one proposal."""
        return len(self.request.prompt) + self.request.max_tokens + self.request.budget

    def extend(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.history.extend(delta.tokens)


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


class Scheduler:
    """First come, first served. A request is admitted only when the pool can hold all that it may
    grow to, beside all that is running: none is ever out of pages once admitted.
    """

    def __init__(self, pool: KVPool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self.waiting: deque[LiveSequence] = deque()
        self.running: dict[int, LiveSequence] = {}

    def check(self, sequence: LiveSequence) -> None:
        """Raises ValueError for a request that could never be admitted."""
        if self._pages(sequence) > self._pool.pages:
            raise ValueError(
                f"max_tokens: prompt and answer need {sequence.most_slots} KV slots, but the pool "
                f"has {self._pool.pages * self._pool.page_size}; ask for fewer tokens, or raise "
                "target.kv_tokens"
            )

    def admit(self) -> list[LiveSequence]:
        """Move those who fit from the line into the batch."""
        admitted = []
        promised = sum(self._pages(sequence) for sequence in self.running.values())
        while self.waiting and len(self.running) < self._limits.max_running:
            promised += self._pages(self.waiting[0])
            if promised > self._pool.pages:
                break
            sequence = self.waiting.popleft()
            self._pool.open(sequence.number)
            self.running[sequence.number] = sequence
            admitted.append(sequence)
        return admitted

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
        if self.running.pop(sequence.number, None):
            self._pool.close(sequence.number)
        else:
            self.waiting.remove(sequence)

    def _pages(self, sequence: LiveSequence) -> int:
        return -(-sequence.most_slots // self._pool.page_size)
