"""The `ngram` draft: it has seen these tokens before, in this request or in its domain.

After a context of up to six tokens it knows what followed the longest match, and the shorter ones.
Prediction by partial matching blends them: a context is trusted as far as its followers repeat
(Witten and Bell, 1991: escape with distinct / (total + distinct)), the rest goes to the shorter
one. So a guess has a probability, and the tree grows where the whole path is likeliest.
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
from workers.training.ngram_table import ORDER, Followers, NgramTable

# One occurrence in the request itself says as much as this many in the table.
LOCAL_WEIGHT = 8
CHILDREN = 4
# A path less likely than this is not worth a row of the verify pass.
LEAST_CONFIDENCE = 0.02
# Shorter contexts are not looked at once this little is left to them.
NEGLIGIBLE = 0.02
# Tokens counted per proposal (about 15 ms): the decode loop must not wait for one long prompt.
CATCH_UP = 512
NOTHING = Followers(total=0, distinct=0, likeliest=())


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

    def followers(self, context: tuple[int, ...]) -> list[Followers]:
        """After the last 1, 2, ... tokens of `context`, as far as they occur."""
        found = []
        for order in range(1, len(context) + 1):
            counts = self._counts[order - 1].get(context[-order:])
            if counts is None:
                break
            found.append(Followers(counts.total(), len(counts), tuple(counts.items())))
        return found


@dataclass(slots=True)
class _Sequence:
    tokens: list[int] = field(default_factory=list)
    index: LocalIndex = field(default_factory=LocalIndex)
    indexed: int = 0

    def catch_up(self) -> bool:
        """Count some more of the tokens; whether all are counted now."""
        stop = min(len(self.tokens), self.indexed + CATCH_UP)
        for place in range(self.indexed, stop):
            self.index.add(self.tokens, place)
        self.indexed = stop
        return stop == len(self.tokens)


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
                known.tokens.extend(update.tokens)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._sequences.pop(sequence, None)

    def _propose(self, request: DraftRequest) -> Proposal | None:
        known = self._sequences.get(request.sequence)
        if known is None or len(known.tokens) != request.length:
            return None
        if not known.catch_up():
            return Proposal.empty()
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
        """The CHILDREN likeliest next tokens, likeliest first."""
        probabilities: dict[int, float] = defaultdict(float)
        left = 1.0
        for local, table in self._matches(index, context):
            total = LOCAL_WEIGHT * local.total + table.total
            scale = left / (total + local.distinct + table.distinct)
            for token, times in local.likeliest:
                probabilities[token] += scale * LOCAL_WEIGHT * times
            for token, times in table.likeliest:
                probabilities[token] += scale * times
            left -= scale * total
            if left < NEGLIGIBLE:
                break
        likeliest = sorted(probabilities.items(), key=lambda item: -item[1])
        return [Guess(token, probability) for token, probability in likeliest[:CHILDREN]]

    def _matches(
        self, index: LocalIndex, context: tuple[int, ...]
    ) -> Iterator[tuple[Followers, Followers]]:
        """(in the request, in the table) of the longest match and of all shorter ones."""
        table = self._table.followers(context) if self._table else []
        local = index.followers(context)
        for order in range(max(len(table), len(local)), 0, -1):
            yield (
                local[order - 1] if order <= len(local) else NOTHING,
                table[order - 1] if order <= len(table) else NOTHING,
            )

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
