"""A token tree that grows where the whole path is likeliest, on what several members say.

The n-gram member is asked about every node: it costs microseconds. The neural member costs a
forward pass, so it is asked in rounds, about the nodes that matter most; where it was not asked the
n-grams stand alone. A node's children are the union of all members' guesses, equal tokens merged.

Nothing here can be lossy: under drafter invariance a tree only decides how many tokens a step may
yield (design.md, section 4).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from workers.calibration import Calibration, Regime
from workers.draft import DraftRequest
from workers.ngram_member import NgramLaw, NgramMember
from workers.speculation.tree import Proposal, SparseLaw, TokenTree, level_order
from workers.training.ngram_table import ORDER

SUFFIX, TABLE, NEURAL = "suffix", "table", "neural"
"""Members, as statistics name them: the request's own text, the domain's table, the eagle draft."""

# A path less likely than this is no guess. It is far below what a row of the verify pass costs: the
# budget says what may be paid for, and within it a weak guess beats none.
LEAST_CONFIDENCE = 0.003
# What a member gives less is not looked at.
NEGLIGIBLE = 0.005
# Nodes that the neural member is asked about in one round; it reads 8 rows about as fast as 1.
ROUND_NODES = 8
NEURAL_SHARE = 0.5
"""A round is about nodes where the walk may end for want of a right guess. The neural member has
one about every other time, until it is known better."""

# What a round must bring where nobody says what time is worth, in tokens: it costs a tenth of the
# verify pass over a tree of SMALL nodes and less of a larger one's.
ROUND_WORTH = 0.125
SMALL = 8

TreePath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, the estimated probability that the target says it here, and who gave it the most."""

    token: int
    confidence: float
    member: str


class Tree(Protocol):
    """One request's proposal as it grows. hoped: how often the walk is expected to end for want of
    a right guess where the last questions were about.
    """

    request: DraftRequest
    hoped: float

    def hear(self, path: TreePath, law: SparseLaw) -> None:
        """What the neural member says may follow `path`: its likeliest tokens."""

    def grow(self) -> None:
        """Anew, best first: always add the node with the likeliest path of all not yet in it."""

    def questions(self, round_s: float, share: float) -> list[TreePath]:
        """Nodes to ask the neural member about next, () for the root; none where that would not
        pay. The best are those where the walk is likely to come and to find no child.

        round_s: what asking takes; share: what it brings of what is hoped. Only requests with terms
        know the worth of either.
        """

    def worth(self) -> float:
        """Tokens that the tree is expected to bring, without those that its rows cost elsewhere."""

    def lose_neural(self) -> None:
        """The neural member cannot be asked about this sequence now."""

    def proposal(self) -> Proposal:
        """The tree as it is."""


class Growth(Protocol):
    """Grows the trees of one draft."""

    def ready(self, request: DraftRequest) -> bool:
        """Whether a tree can be grown already."""

    def tree(self, request: DraftRequest, *, neural: bool) -> Tree:
        """One request's; neural: whether there is such a member."""


class PlainGrowth:
    """`Growth` in Python, which can also tell of laws."""

    def __init__(
        self, ngram: NgramMember | None, calibration: Calibration, *, children: int
    ) -> None:
        self._ngram = ngram
        self._calibration = calibration
        self._children = children

    def ready(self, request: DraftRequest) -> bool:
        """Whether the n-grams have counted all of its tokens; they count some more."""
        return self._ngram is None or self._ngram.catch_up(request.sequence)

    def tree(self, request: DraftRequest, *, neural: bool) -> GrowingTree:
        """As `Growth` has it."""
        regime = self._calibration.at(request.temperature)
        return GrowingTree(request, self._ngram, regime, children=self._children, neural=neural)


class GrowingTree:
    """`Tree` in Python. children: most per node; neural: whether there is such a member."""

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
        self.hoped = 0.0
        self._ngram = ngram
        self._tail = () if ngram is None else ngram.tail(request.sequence)
        self._regime = regime
        self._children = children
        self._neural = neural
        self._least = least_of(request)
        self._near: dict[TreePath, NgramLaw] = {}
        self._heard: dict[TreePath, SparseLaw] = {}
        self._guessed: dict[TreePath, list[Guess]] = {}
        self._nodes: dict[TreePath, Guess] = {}  # by path, parents first; confidence is the path's

    def hear(self, path: TreePath, law: SparseLaw) -> None:
        """What the neural member says may follow `path`: its likeliest tokens."""
        self._heard[path] = law
        self._guessed.pop(path, None)

    def grow(self) -> None:
        """Anew, best first: always add the node with the likeliest path of all not yet in it."""
        self._nodes = {}
        order = count()  # breaks ties, so that guesses are never compared
        waiting: list[tuple[float, int, TreePath, Guess]] = []
        reached = 1.0
        path: TreePath = ()
        while self.request.budget > 0:
            if len(path) < self.request.depth:
                for guess in self._guesses(path):
                    likely = reached * guess.confidence
                    if likely < LEAST_CONFIDENCE:
                        break
                    heapq.heappush(waiting, (-likely, next(order), (*path, guess.token), guess))
            size = len(self._nodes)
            if not waiting or size == len(self._least) or -waiting[0][0] < self._least[size]:
                return
            negative, _, path, guess = heapq.heappop(waiting)
            reached = -negative
            self._nodes[path] = Guess(guess.token, reached, guess.member)

    def questions(self, round_s: float, share: float) -> list[TreePath]:
        """As `Tree` has it."""
        if not self._neural:
            return []
        worth = {path: self._reach(path) * self._uncovered(path) for path in self._unasked()}
        best = heapq.nlargest(ROUND_NODES, worth, key=worth.__getitem__)
        self.hoped = sum(worth[path] for path in best)
        return best if pays(self.request, self.hoped, round_s, share) else []

    def worth(self) -> float:
        """As `Tree` has it."""
        brings = sum(guess.confidence for guess in self._nodes.values())
        return brings - sum(self._least[: len(self._nodes)])

    def lose_neural(self) -> None:
        """The neural member cannot be asked about this sequence now."""
        self._neural = False

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

    def law(self, path: TreePath) -> SparseLaw | None:
        """q for the ratio test: the guesses after `path`, renormalised; None without any."""
        guesses = self._guesses(path)
        if not guesses:
            return None
        total = sum(guess.confidence for guess in guesses)
        return SparseLaw(
            tuple(guess.token for guess in guesses),
            tuple(guess.confidence / total for guess in guesses),
        )

    def _unasked(self) -> Iterator[TreePath]:
        """What the neural member says of a node it makes from its parent's state, so that must have
        been asked about before: first of all the root.
        """
        if () not in self._heard and self.request.depth > 0 and self.request.budget > 0:
            yield ()
        for path in self._nodes:
            if (
                len(path) < self.request.depth
                and path not in self._heard
                and path[:-1] in self._heard
            ):
                yield path

    def _reach(self, path: TreePath) -> float:
        return self._nodes[path].confidence if path else 1.0

    def _uncovered(self, path: TreePath) -> float:
        """Estimated probability that none of the guesses after `path` is right."""
        return max(0.0, 1.0 - sum(guess.confidence for guess in self._guesses(path)))

    def _guesses(self, path: TreePath) -> list[Guess]:
        """The likeliest next tokens, likeliest first."""
        found = self._guessed.get(path)
        if found is None:
            found = self._guessed[path] = self._combine(path)
        return found

    def _combine(self, path: TreePath) -> list[Guess]:
        near, heard = self._near_law(path), self._heard.get(path)
        by_neural = likely(heard) if heard else {}
        if near is None:
            pool = self._regime.neural
        else:
            pool = (self._regime.both if heard else self._regime.ngram)[near.order]
        by_ngram = {} if near is None else near.likely(NEGLIGIBLE)
        rated = sorted(
            (
                -pool.confidence(by_ngram.get(token, 0.0), by_neural.get(token, 0.0), len(path)),
                token,
            )
            for token in by_ngram.keys() | by_neural.keys()
        )
        return [
            Guess(token, -negative, _member(near, token, by_ngram, by_neural))
            for negative, token in rated[: self._children]
        ]

    def _near_law(self, path: TreePath) -> NgramLaw | None:
        if self._ngram is None:
            return None
        found = self._near.get(path)
        if found is None:
            context = (*self._tail, *path)[-ORDER:]
            found = self._near[path] = self._ngram.law(self.request.sequence, context)
        return found


def pays(request: DraftRequest, hoped: float, round_s: float, share: float) -> bool:
    """Whether a round of questions brings more than it takes."""
    if request.terms is None:
        return NEURAL_SHARE * hoped >= ROUND_WORTH * SMALL / max(SMALL, request.budget)
    return share * hoped >= request.terms.price * round_s


def least_of(request: DraftRequest) -> tuple[float, ...]:
    """By how many nodes a tree has, the confidence that another one must have."""
    budget = request.budget
    return request.terms.least[:budget] if request.terms else (0.0,) * budget


def likely(law: SparseLaw) -> dict[int, float]:
    """What of a neural member's law is looked at."""
    return {
        token: probability
        for token, probability in zip(law.ids, law.probs, strict=True)
        if probability >= NEGLIGIBLE
    }


def _member(
    near: NgramLaw | None, token: int, by_ngram: Mapping[int, float], by_neural: Mapping[int, float]
) -> str:
    """Who gave a token the most."""
    if near is None or by_neural.get(token, 0.0) > by_ngram.get(token, 0.0):
        return NEURAL
    return SUFFIX if near.suffix.get(token, 0.0) >= near.table.get(token, 0.0) else TABLE
