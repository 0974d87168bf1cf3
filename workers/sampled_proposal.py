"""Proposals for the ratio test: sampled siblings in a shape that the samples cannot change.

Non-anticipation binds here: whether a sampled token is verified must not depend on its own value
or on what follows it. So the shape is fixed before anything is drawn: a comb, whose every level
holds `width` siblings drawn without replacement, only the first of which has children.
"""

from __future__ import annotations

import math
from random import Random

from workers.draft import DraftRequest
from workers.speculation.tree import Proposal, SparseLaw, TokenTree


class Comb:
    """Grows level by level: ask `path`, find q after it, `grow` with that q, while it is `open`.

    Noise: one generator per seed and position, independent of what the verifier draws.
    """

    def __init__(self, request: DraftRequest, width: int) -> None:
        assert request.ratio_seed is not None
        self.request = request
        self.path: tuple[int, ...] = ()
        self._width = width
        self._ended = False
        self._spine = -1
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._laws: list[SparseLaw] = []
        self._confidence: list[float] = []

    @property
    def open(self) -> bool:
        """Whether another level may follow."""
        room = self.request.budget - len(self._tokens)
        return not self._ended and room > 0 and len(self.path) < self.request.depth

    def grow(self, q: SparseLaw | None) -> None:
        """Draw the next level from q, the law after `path`; None, nothing is known there: end.

        Ending because of what `path` holds is safe: its tokens are verified either way.
        """
        if q is None:
            self._ended = True
            return
        size = min(self._width, self.request.budget - len(self._tokens))
        reached = 1.0 if self._spine < 0 else self._confidence[self._spine]
        first = len(self._tokens)
        for place in _without_replacement(q, size, self._generator()):
            self._tokens.append(q.ids[place])
            self._parents.append(self._spine)
            self._laws.append(q)
            self._confidence.append(reached * q.probs[place])
        self._spine = first
        self.path = (*self.path, self._tokens[first])

    def proposal(self) -> Proposal:
        tree = TokenTree(tuple(self._tokens), tuple(self._parents))
        return Proposal(tree, tuple(self._confidence), tuple(self._laws))

    def _generator(self) -> Random:
        # A string seed goes through SHA-512, so it has nothing in common with SplitMix64's noise.
        position = self.request.length + len(self.path)
        return Random(f"draft {self.request.ratio_seed} {position}")


def _without_replacement(q: SparseLaw, size: int, generator: Random) -> list[int]:
    """Places of up to `size` tokens: an exponential race, whose finishing order is such a draw."""
    times = [
        (-math.log(1.0 - generator.random()) / prob, place)
        for place, prob in enumerate(q.probs)
        if prob > 0
    ]
    return [place for _, place in sorted(times)[:size]]
