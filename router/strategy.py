"""Ways to choose a draft: each looks at the context and chooses or abstains; the first choice wins.

A strategy is a policy over things already measured or looked up. One that must go and measure (an
estimate of acceptance on the prompt's own tokens) fits the same protocol: hence `async`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.similarity import Evidence, Neighbour, combine
from router.decision import PLAIN, Candidate, Reason, RouteDecision
from router.fingerprint import Fingerprint
from router.intent import Intent

SURE = 0.6
"""Probability of an intent from which it is acted upon."""

EVERYDAY = ("en", None)
"""Domains fit for a prompt of no known kind: everyday language, or a draft made for anything."""


@dataclass(frozen=True, slots=True)
class RouteContext:
    """All that is known about a request.

    `neighbours` are similar prompts with what was measured on them, nearest first. `typical_speed`
    gives a draft's mean recorded tokens per second over all prompts it ran on (None: never ran).
    """

    fingerprint: Fingerprint
    intent: Intent
    neighbours: tuple[Neighbour, ...]
    typical_speed: Callable[[str], float | None]

    def decide(self, draft: str | None, reason: Reason, detail: str) -> RouteDecision:
        """A decision about this request."""
        return RouteDecision(draft, reason, detail, self.fingerprint.to_wire())


class Strategy(Protocol):
    """Context and candidates in, one choice with its reason out; None: not mine to say."""

    async def choose(
        self, context: RouteContext, candidates: Sequence[Candidate]
    ) -> RouteDecision | None: ...


class SimilarityStrategy:
    """The draft that ran fastest on similar prompts; plain decoding if that did.

    Only what has run has a recorded speed, and what is chosen runs: without care the first draft
    ever tried in a neighbourhood would be chosen there for good. Care here is one rule. Call the
    draft that would run if nothing similar were known (the intent's, else the default) the native
    one. When the native draft has no evidence among the neighbours, and either has none anywhere or
    typically runs faster than the neighbours' best, this strategy abstains: the native draft runs,
    its outcome becomes evidence at this very fingerprint, and from then on speeds are compared
    with speeds. So a neighbourhood pays for one trial at most, and another draft keeps its place
    only where its recorded speed beats what the native one promises.

    What is chosen is measured again each time, old runs fade (`cache.similarity.DECAY`) and unused
    evidence expires, so a speed recorded under another load does not rule for long either.
    """

    async def choose(
        self, context: RouteContext, candidates: Sequence[Candidate]
    ) -> RouteDecision | None:
        """The neighbours' best, unless the native draft deserves its one trial."""
        runs = evidence_by_draft(context.neighbours, [c.name for c in candidates])
        if not runs:
            return None
        ranked = sorted(runs, key=lambda draft: runs[draft].tokens_per_second, reverse=True)
        best = ranked[0]
        if _trial_due(context, candidates, runs, runs[best].tokens_per_second):
            return None
        return context.decide(
            None if best == PLAIN else best, "similar", _similar_detail(context, ranked, runs)
        )


class IntentStrategy:
    """The draft made for the kind of text asked for, when the classifier is sure of the kind."""

    async def choose(
        self, context: RouteContext, candidates: Sequence[Candidate]
    ) -> RouteDecision | None:
        """The intent's draft; None when unsure, or when the pool has no draft for it."""
        chosen = draft_for_intent(context, candidates)
        if chosen is None:
            return None
        speed = context.typical_speed(chosen.name)
        known = "not measured yet" if speed is None else f"typically {speed:.1f} tokens/s"
        intent = context.intent
        detail = f"The prompt looks like {intent.label} ({intent.probability:.2f}): {chosen.name}"
        return context.decide(chosen.name, "intent", f"{detail} is its draft, {known}.")


class DefaultStrategy:
    """A draft for everyday language, whatever the prompt is: the last word, so it always answers.

    Speeds measured elsewhere do not help here: a code draft looks fast because code is predictable.
    """

    async def choose(
        self, context: RouteContext, candidates: Sequence[Candidate]
    ) -> RouteDecision | None:
        """The first general or English draft of the pool, else its first; plain if it is empty."""
        intent = context.intent
        guess = f"No draft stands out (best guess {intent.label}, {intent.probability:.2f})"
        chosen = default_draft(candidates)
        if chosen is None:
            return context.decide(None, "default", f"{guess} and the pool is empty.")
        return context.decide(chosen.name, "default", f"{guess}: {chosen.name} is the default.")


def draft_for_intent(context: RouteContext, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate made for the intent; of several, one that never ran, then the fastest.

    None when the classifier is unsure, or nothing in the pool was made for it.
    """
    if context.intent.probability < SURE:
        return None
    made_for_it = [c for c in candidates if c.domain == context.intent.label]
    return max(made_for_it, key=lambda c: _hope(context, c.name), default=None)


def default_draft(candidates: Sequence[Candidate]) -> Candidate | None:
    """The first general or English draft of the pool, else its first; None if it is empty."""
    everyday = [c for c in candidates if c.domain in EVERYDAY]
    return next(iter([*everyday, *candidates]), None)


def evidence_by_draft(neighbours: Sequence[Neighbour], names: Sequence[str]) -> dict[str, Evidence]:
    """Per draft still in the pool (or plain), all its runs on the neighbours as one."""
    runs: dict[str, list[Evidence]] = {}
    for neighbour in neighbours:
        for draft, run in neighbour.evidence.items():
            if draft == PLAIN or draft in names:
                runs.setdefault(draft, []).append(run)
    return {draft: combine(measured) for draft, measured in runs.items()}


def _trial_due(
    context: RouteContext,
    candidates: Sequence[Candidate],
    runs: Collection[str],
    tokens_per_second: float,
) -> bool:
    """Whether the native draft, not among `runs`, may beat what the best of them recorded."""
    native = draft_for_intent(context, candidates) or default_draft(candidates)
    if native is None or native.name in runs:
        return False
    return _hope(context, native.name) > tokens_per_second


def _hope(context: RouteContext, draft: str) -> float:
    speed = context.typical_speed(draft)
    return float("inf") if speed is None else speed


def _similar_detail(context: RouteContext, ranked: Sequence[str], runs: dict[str, Evidence]) -> str:
    count, closest = len(context.neighbours), context.neighbours[0].cosine
    prompts = "1 similar prompt" if count == 1 else f"{count} similar prompts"
    speeds = ", ".join(_measured(draft, runs[draft]) for draft in ranked)
    return f"On {prompts} (cosine up to {closest:.2f}) these ran: {speeds}."


def _measured(draft: str, run: Evidence) -> str:
    name = "plain decoding" if draft == PLAIN else draft
    alpha = "" if run.alpha is None else f" (alpha {run.alpha:.2f})"
    return f"{name} at {run.tokens_per_second:.1f} tokens/s{alpha}"
