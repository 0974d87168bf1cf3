"""Choosing a draft for a request, and learning from how it went."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from cache.similarity import Evidence, SimilarityCache
from router.decision import (
    PLAIN,
    Candidate,
    Outcome,
    Reason,
    RouteDecision,
    RouteRequest,
    check_pool,
)
from router.fingerprint import Fingerprint, Fingerprinter, text_of
from router.intent import IntentModel
from router.strategy import (
    DefaultStrategy,
    IntentStrategy,
    RouteContext,
    SimilarityStrategy,
    Strategy,
)

NEIGHBOURS = 16
"""Similar prompts consulted at most: enough to even out one noisy run, few enough to stay near."""


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Counts since the start. A hit is a decision that found a similar prompt, used or not."""

    decisions: dict[Reason, int]
    cache_hits: int
    cache_misses: int
    cache_entries: int
    dropped_writes: int
    cache_connected: bool


class Router:
    """Asks its strategies in order; the first that chooses decides.

    Every decision costs one embedding (in a thread) and one matrix product. Nothing in it waits for
    the network. The cache begins to follow other replicas with the first call, in its event loop.

    Args:
        candidates: the pool, in the order in which the operator prefers its members.
        threshold: cosine above which two prompts count as similar.

    Raises:
        ValueError: for a pool whose names clash, or a threshold that is no cosine.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        fingerprinter: Fingerprinter,
        intent: IntentModel,
        cache: SimilarityCache,
        *,
        threshold: float = 0.85,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is a cosine, above 0 and below 1, not {threshold}")
        self._candidates = check_pool(candidates)
        self._fingerprinter = fingerprinter
        self._intent = intent
        self._cache = cache
        self._threshold = threshold
        self._strategies: tuple[Strategy, ...] = (
            SimilarityStrategy(),
            IntentStrategy(),
            DefaultStrategy(),
        )
        self._decisions: Counter[Reason] = Counter()
        self._hits: Counter[bool] = Counter()

    async def decide(self, request: RouteRequest) -> RouteDecision:
        """The draft for this request, and why."""
        await self._cache.start()
        context = self._look_up(request, await self._fingerprinter.fingerprint(request))
        decision = await self._ask(context)
        self._decisions[decision.reason] += 1
        self._hits[bool(context.neighbours)] += 1
        return decision

    async def fingerprint(self, request: RouteRequest) -> str:
        """The wire form under which an outcome is recorded that no decision led to: when the client
        chose the draft, its speed is evidence all the same.
        """
        return (await self._fingerprinter.fingerprint(request)).to_wire()

    async def observe(self, outcome: Outcome) -> None:
        """Record how a request went, so that the next similar prompt knows.

        Off the critical path: it may wait tens of milliseconds for Redis. An outcome without tokens
        measured nothing and is ignored.

        Raises:
            ValueError: for a fingerprint that is not one of a decision.
        """
        if outcome.tokens == 0 or outcome.tokens_per_second == 0:
            return
        fingerprint = Fingerprint.from_wire(outcome.fingerprint)
        if fingerprint.vector.shape != (self._fingerprinter.dim,):
            raise ValueError("fingerprint is one of another release: record nothing for it")
        seconds = outcome.tokens / outcome.tokens_per_second
        measured = Evidence(outcome.tokens, seconds, outcome.alpha)
        draft = PLAIN if outcome.draft is None else outcome.draft
        await self._cache.record(fingerprint.key, fingerprint.vector, draft, measured)

    def stats(self) -> RouterStats:
        """Counts for the metrics page."""
        cache = self._cache.stats()
        return RouterStats(
            decisions={reason: self._decisions[reason] for reason in get_args(Reason)},
            cache_hits=self._hits[True],
            cache_misses=self._hits[False],
            cache_entries=cache.entries,
            dropped_writes=cache.dropped_writes,
            cache_connected=cache.connected,
        )

    async def close(self) -> None:
        """Stop following other replicas."""
        await self._cache.close()

    def _look_up(self, request: RouteRequest, fingerprint: Fingerprint) -> RouteContext:
        vector = fingerprint.vector
        return RouteContext(
            fingerprint=fingerprint,
            intent=self._intent.classify(text_of(request), vector),
            neighbours=self._cache.nearest(vector, self._threshold, NEIGHBOURS),
            typical_speed=self._cache.typical_speed,
        )

    async def _ask(self, context: RouteContext) -> RouteDecision:
        for strategy in self._strategies:
            decision = await strategy.choose(context, self._candidates)
            if decision is not None:
                return decision
        raise AssertionError("the default strategy never abstains")
