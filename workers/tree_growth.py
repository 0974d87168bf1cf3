"""A token tree that grows where the whole path is likeliest, on what several members say.

The n-gram member is asked about every node: it costs microseconds. The neural member costs a
forward pass, so it is asked in rounds, about the nodes that matter most; where it was not asked the
n-grams stand alone. A node's children are the union of all members' guesses, equal tokens merged.

Nothing here can be lossy: under drafter invariance a tree only decides how many tokens a step may
yield (design.md, section 4).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

from workers.calibration import Regime
from workers.draft import DraftRequest
from workers.ngram_member import NgramLaw, NgramMember
from workers.speculation.tree import Proposal, SparseLaw, TokenTree, level_order
from workers.training.ngram_table import ORDER

SUFFIX, TABLE, NEURAL = "suffix", "table", "neural"
"""Members, as statistics name them: the request's own text, the domain's table, the eagle draft."""

# A path less likely than this is not worth a row of the verify pass.
LEAST_CONFIDENCE = 0.02
# A guess of the n-grams with less is not looked at.
_NEGLIGIBLE = 0.005
# Nodes that the neural member is asked about in one round; it reads 4 rows about as fast as 1.
ROUND_NODES = 6
# A round is worth its time where the nodes it asks about are reached this often, all together.
ROUND_REACH = 0.35

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, the estimated probability that the target says it here, and who guessed it first."""

    token: int
    confidence: float
    member: str


class GrowingTree:
    """One request's proposal. children: most per node; neural: whether there is such a member."""

    def __init__(
        self,
        request: DraftRequest,
        ngram: NgramMember | None,
        regime: Regime,
        *,
        children: int,
        neural: bool,
    ) -> None:
        self.request = request
        self._ngram = ngram
        self._tail = ngram.tail(request.sequence) if ngram else ()
        self._regime = regime
        self._children = children
        self._neural = neural
        self._near: dict[Path, NgramLaw] = {}
        self._heard: dict[Path, SparseLaw] = {}
        self._guessed: dict[Path, list[Guess]] = {}
        self._nodes: dict[Path, Guess] = {}  # by path, parents first; confidence is the path's

    def hear(self, path: Path, law: SparseLaw) -> None:
        """What the neural member says may follow `path`: its likeliest tokens."""
        self._heard[path] = law
        self._guessed.pop(path, None)

    def grow(self) -> None:
        """Anew, best first: always add the node with the likeliest path of all not yet in it."""
        self._nodes = {}
        order = count()  # breaks ties, so that guesses are never compared
        waiting: list[tuple[float, int, Path, Guess]] = []
        reached = 1.0
        path: Path = ()
        while self.request.budget > 0:
            if len(path) < self.request.depth:
                for guess in self._guesses(path):
                    likely = reached * guess.confidence
                    if likely < LEAST_CONFIDENCE:
                        break
                    heapq.heappush(waiting, (-likely, next(order), (*path, guess.token), guess))
            if not waiting or len(self._nodes) == self.request.budget:
                return
            negative, _, path, guess = heapq.heappop(waiting)
            reached = -negative
            self._nodes[path] = Guess(guess.token, reached, guess.member)

    def questions(self) -> list[Path]:
        """Nodes to ask the neural member about next; none where that would not pay."""
        if not self._neural:
            return []
        asked = list(islice(self._unasked(), ROUND_NODES))
        reach = sum(self._nodes[path].confidence for path in asked)
        return asked if reach >= ROUND_REACH else []

    def proposal(self) -> Proposal:
        place = {path: number for number, path in enumerate(self._nodes)} | {(): -1}
        parents = [place[path[:-1]] for path in self._nodes]
        guesses = list(self._nodes.values())
        ordered = [guesses[node] for node in level_order(parents)]
        return Proposal(
            TokenTree.from_nodes([guess.token for guess in guesses], parents),
            tuple(guess.confidence for guess in ordered),
            members=tuple(guess.member for guess in ordered),
        )

    def law(self, path: Path) -> SparseLaw | None:
        """q for the ratio test: the guesses after `path`, renormalised; None without any."""
        guesses = self._guesses(path)
        if not guesses:
            return None
        total = sum(guess.confidence for guess in guesses)
        return SparseLaw(
            tuple(guess.token for guess in guesses),
            tuple(guess.confidence / total for guess in guesses),
        )

    def _unasked(self) -> Iterator[Path]:
        """Likeliest first. What the neural member says of a node it makes from its parent's state,
        so that must have been asked about before."""
        for path in self._nodes:
            if (
                len(path) < self.request.depth
                and path not in self._heard
                and path[:-1] in self._heard
            ):
                yield path

    def _guesses(self, path: Path) -> list[Guess]:
        """The likeliest next tokens, likeliest first."""
        found = self._guessed.get(path)
        if found is None:
            found = self._guessed[path] = self._combine(path)
        return found

    def _combine(self, path: Path) -> list[Guess]:
        near, heard = self._near_law(path), self._heard.get(path)
        neural = dict(zip(heard.ids, heard.probs, strict=True)) if heard else {}
        if near is None:
            pool = self._regime.neural
        else:
            pool = (self._regime.both if heard else self._regime.ngram)[near.order]
        by_ngram = {} if near is None else near.likely(_NEGLIGIBLE)
        guesses = []
        for token in by_ngram.keys() | neural.keys():
            own, other = by_ngram.get(token, 0.0), neural.get(token, 0.0)
            confidence = pool.confidence(own, other, len(path))
            guesses.append(Guess(token, confidence, _member(near, token, own, other)))
        guesses.sort(key=lambda guess: (-guess.confidence, guess.token))
        return guesses[: self._children]

    def _near_law(self, path: Path) -> NgramLaw | None:
        if self._ngram is None:
            return None
        found = self._near.get(path)
        if found is None:
            context = (*self._tail, *path)[-ORDER:]
            found = self._near[path] = self._ngram.law(self.request.sequence, context)
        return found


def _member(near: NgramLaw | None, token: int, by_ngram: float, by_neural: float) -> str:
    """Who gave a token the most."""
    if near is None or by_neural > by_ngram:
        return NEURAL
    return SUFFIX if near.suffix.get(token, 0.0) >= near.table.get(token, 0.0) else TABLE
