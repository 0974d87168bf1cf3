"""What speculation is worth: pure arithmetic, to plan by and to check measurements with.

Costs are in plain target steps: 1 is a forward of the target over one token per sequence, at the
live batch size. All of this is expectation; what a step really yields is in its verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import fsum

from workers.speculation.tree import ROOT, TokenTree


def tau_chain(alpha: float, gamma: int) -> float:
    """Expected tokens per target step of a chain of `gamma` guesses, each right with `alpha`.

    The sum of alpha**depth, (1 - alpha**(gamma + 1)) / (1 - alpha) where alpha < 1. This alpha is
    per *tested* position; accepted/drafted also counts the guesses behind a wrong one, is always
    smaller, and does not belong here.
    """
    return fsum(alpha**depth for depth in range(gamma + 1))


def tau_tree(path_probabilities: Iterable[float]) -> float:
    """Expected tokens per target step of a tree: one, and each node as often as it is accepted.

    `path_probabilities` are, per node, those of the whole path down to it being accepted.
    """
    return fsum((1.0, *path_probabilities))


def speedup(tau: float, draft_cost: float, verify_cost: float, overhead: float = 0.0) -> float:
    """Tokens per second over plain decoding's, from the costs of one whole step."""
    return tau / (draft_cost + verify_cost + overhead)


def best_gamma(alpha: float, c: float, v: Callable[[int], float], max_gamma: int) -> int:
    """The chain length with the greatest speedup; 0, plain decoding, where drafting does not pay.

    `c` is the cost of one draft forward and `v(n)` that of a target forward over n tokens. Of
    equals the shortest wins.
    """

    def speedup_at(gamma: int) -> float:
        return speedup(tau_chain(alpha, gamma), gamma * c, v(gamma + 1))

    return max(range(max_gamma + 1), key=speedup_at)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree without tokens, in level order: node i is guess number `ranks[i]` of `parents[i]`."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    tau: float


def best_shape(child_probabilities: Sequence[float], budget: int) -> Shape:
    """The tree of at most `budget` nodes with the greatest tau.

    `child_probabilities[r]` is the probability that a node's guess of rank r is the right one: the
    same at every node, and not rising with r. A path's probability is the product along it, so no
    node beats its parent or the sibling ranked before it, and always taking the best node on offer
    is optimal. (Sequoia, Chen et al., 2024, reaches the same trees by dynamic programming.)
    """
    assert all(a >= b for a, b in pairwise((1.0, *child_probabilities, 0.0))), (
        f"{child_probabilities} are not probabilities that fall with the rank"
    )
    parents: list[int] = []
    ranks: list[int] = []
    reached: list[float] = []  # the path's probability, per node
    offers: list[tuple[float, int, int]] = []  # a heap of (-probability, parent, rank)

    def offer(parent: int, rank: int) -> None:
        if rank < len(child_probabilities):
            to_parent = 1.0 if parent == ROOT else reached[parent]
            heappush(offers, (-to_parent * child_probabilities[rank], parent, rank))

    offer(ROOT, 0)
    while len(parents) < budget and offers and offers[0][0] < 0:
        probability, parent, rank = heappop(offers)
        parents.append(parent)
        ranks.append(rank)
        reached.append(-probability)
        offer(parent, rank + 1)
        offer(len(parents) - 1, 0)
    tree = TokenTree.from_nodes(ranks, parents)  # siblings differ in rank as they do in token
    return Shape(tree.parents, tree.tokens, tau_tree(reached))
