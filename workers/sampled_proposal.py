"""Proposals for the ratio test: sampled siblings in a shape that the samples cannot change.

Non-anticipation binds here: whether a sampled token is verified must not depend on its own value
or on what follows it. So the shape is fixed before anything is drawn: a comb, whose every level
holds `width` siblings drawn without replacement, only the first of which has children.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from workers.draft import DraftRequest
from workers.speculation.tree import Proposal, SparseLaw, TokenTree

LawAt = Callable[[tuple[int, ...]], SparseLaw | None]


def comb_proposal(request: DraftRequest, width: int, law_at: LawAt) -> Proposal:
    """Sample a comb. `law_at(path)` is q after the path; None ends the comb there.

    Noise: one generator per (seed, position), which the verifier's noise never touches.
    """
    assert request.ratio_seed is not None
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[SparseLaw] = []
    confidence: list[float] = []
    spine, path, reached = -1, (), 1.0
    for level in range(request.depth):
        room = min(width, request.budget - len(tokens))
        law = law_at(path) if room > 0 else None
        if law is None:
            break
        drawn = _without_replacement(law, room, _generator(request, level))
        first = len(tokens)
        for place in drawn:
            tokens.append(law.ids[place])
            parents.append(spine)
            laws.append(law)
            confidence.append(reached * law.probs[place])
        spine, path, reached = first, (*path, tokens[first]), confidence[first]
    return Proposal(TokenTree(tuple(tokens), tuple(parents)), tuple(confidence), tuple(laws))


def _generator(request: DraftRequest, level: int) -> Random:
    # A string seed goes through SHA-512: independent of the verifier's SplitMix64 streams.
    return Random(f"draft {request.ratio_seed} {request.length + level}")


def _without_replacement(law: SparseLaw, size: int, generator: Random) -> list[int]:
    """Places of up to `size` tokens: an exponential race, whose finishing order is such a draw."""
    times = [
        (-math.log(1.0 - generator.random()) / prob, place)
        for place, prob in enumerate(law.probs)
        if prob > 0
    ]
    return [place for _, place in sorted(times)[:size]]
