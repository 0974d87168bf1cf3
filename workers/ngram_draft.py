"""The `ngram` draft: it has seen these tokens before, in this request or in its domain.

After a context of up to six tokens it proposes what followed the longest match, backing off to
shorter ones, and grows the tree where the whole path is likeliest to be accepted.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from workers.draft import DraftRequest, DraftSpec, DraftUpdate
from workers.engine.vocabulary import vocabulary_of
from workers.sampled_proposal import Comb
from workers.speculation.tree import Proposal, SparseLaw, TokenTree, level_order
from workers.training.ngram_table import ORDER, NgramTable

# How often the next token is among those seen after a match of 0, 1, ... 6 tokens.
HIT_RATE = (0.0, 0.21, 0.36, 0.47, 0.55, 0.60, 0.74)
# One occurrence in the request itself says as much as this many in the table.
LOCAL_WEIGHT = 4
CHILDREN = 3
# A path less likely than this is not worth a row of the verify pass.
LEAST_CONFIDENCE = 0.02
MOST_CONFIDENCE = 0.98


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, and the estimated probability that the target says it here."""

    token: int
    confidence: float


class LocalIndex:
    """Next-token counts within one request."""

    def __init__(self) -> None:
        self._counts: list[dict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(ORDER)
        ]

    def add(self, tokens: Sequence[int], place: int) -> None:
        """Count the token at `place` after each of its contexts."""
        for order in range(1, min(ORDER, place) + 1):
            self._counts[order - 1][tuple(tokens[place - order : place])][tokens[place]] += 1

    def counts(self, context: tuple[int, ...]) -> Iterator[Counter[int] | None]:
        """After the last 1, 2, ... tokens of `context`."""
        for order in range(1, len(context) + 1):
            yield self._counts[order - 1].get(context[-order:])


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    index: LocalIndex = field(default_factory=LocalIndex)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.index.add(self.tokens, len(self.tokens) - 1)


class NgramDraft:
    """Proposes from each request's own tokens and, where there is one, from a domain's table."""

    def __init__(self, name: str, table: NgramTable | None) -> None:
        self.name = name
        self._table = table
        self._sequences: dict[int, _Sequence] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        return [self._propose(request) for request in requests]

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            if update.start == 0:
                self._sequences[update.sequence] = _Sequence()
            known = self._sequences.get(update.sequence)
            if known is not None and len(known.tokens) == update.start:
                known.extend(update.tokens)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def _propose(self, request: DraftRequest) -> Proposal | None:
        known = self._sequences.get(request.sequence)
        if known is None or len(known.tokens) != request.length:
            return None
        tail = tuple(known.tokens[-ORDER:])
        if request.ratio_seed is not None:
            return self._sample(known.index, tail, request)
        return self._grow(known.index, tail, request.budget, request.depth)

    def _grow(self, index: LocalIndex, tail: tuple[int, ...], budget: int, depth: int) -> Proposal:
        """Best first: always add the node with the likeliest path of all not yet in the tree."""
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        order = count()  # breaks ties, so that paths are never compared
        waiting: list[tuple[float, int, int, tuple[int, ...]]] = []

        def expand(node: int, path: tuple[int, ...], reached: float) -> None:
            for guess in self._guesses(index, (*tail, *path)[-ORDER:]):
                likely = reached * guess.confidence
                if likely >= LEAST_CONFIDENCE:
                    heapq.heappush(waiting, (-likely, next(order), node, (*path, guess.token)))

        if budget > 0 and depth > 0:
            expand(-1, (), 1.0)
        while waiting and len(tokens) < budget:
            negative, _, parent, path = heapq.heappop(waiting)
            tokens.append(path[-1])
            parents.append(parent)
            confidence.append(-negative)
            if len(path) < depth:
                expand(len(tokens) - 1, path, -negative)
        placed = level_order(parents)
        return Proposal(
            TokenTree.from_nodes(tokens, parents), tuple(confidence[node] for node in placed)
        )

    def _sample(self, index: LocalIndex, tail: tuple[int, ...], request: DraftRequest) -> Proposal:
        comb = Comb(request, CHILDREN)
        while comb.open:
            comb.grow(self._law(index, (*tail, *comb.path)))
        return comb.proposal()

    def _guesses(self, index: LocalIndex, context: tuple[int, ...]) -> list[Guess]:
        """Up to CHILDREN tokens, those after longer matches first."""
        guesses: dict[int, float] = {}
        for order, counts in self._matches(index, context):
            total = sum(counts.values())
            for token, times in counts.most_common(CHILDREN):
                share = HIT_RATE[order] * times / total
                guesses.setdefault(token, min(share, MOST_CONFIDENCE))
            if len(guesses) >= CHILDREN:
                break
        return [Guess(token, share) for token, share in list(guesses.items())[:CHILDREN]]

    def _matches(
        self, index: LocalIndex, context: tuple[int, ...]
    ) -> Iterator[tuple[int, Counter[int]]]:
        """(order, counts) from the longest match down, request and table counted together."""
        table = self._table.counts(context) if self._table else []
        local = list(index.counts(context))
        for order in range(len(context), 0, -1):
            mine = local[order - 1]
            domain = table[order - 1] if order <= len(table) else None
            if mine:
                weighted = Counter({token: LOCAL_WEIGHT * n for token, n in mine.items()})
                if domain:
                    weighted.update(domain)
                yield order, weighted
            elif domain:
                yield order, domain

    def _law(self, index: LocalIndex, context: tuple[int, ...]) -> SparseLaw | None:
        """q for the ratio test: the guesses, renormalised; None where nothing is known."""
        guesses = self._guesses(index, context[-ORDER:])
        if not guesses:
            return None
        total = sum(guess.confidence for guess in guesses)
        return SparseLaw(
            tuple(guess.token for guess in guesses),
            tuple(guess.confidence / total for guess in guesses),
        )


def load_ngram_draft(spec: DraftSpec, target: Path) -> NgramDraft:
    """Raises ValueError when the table was learned over another vocabulary."""
    if spec.path is None:
        return NgramDraft(spec.name, None)
    table = NgramTable.load(Path(spec.path))
    vocabulary_of(target).check_same(table.vocabulary, f"drafts.{spec.name}")
    return NgramDraft(spec.name, table)
