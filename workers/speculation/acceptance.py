"""Verification: which guesses of a tree become output, and which token follows them.

Two ways, both exact. `walk` is drafter-invariant: the target chooses its token from p and the
request's noise alone, and a guess is right or wrong; a seed gives the same text under any draft.
`ratio_walk` is the ratio test of speculative sampling (Leviathan, Kalman, Matias, 2023; Chen et
al., 2023), over siblings drawn without replacement (Jeon et al., "Recursive speculative decoding",
2024): the output follows p in distribution only.

Everywhere p [V] is the target's law and q [V] the draft's, each summing to 1, both float64 where it
can be had. There is no threshold here, and none may be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.speculation.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification returns for one proposal.

    The output is the tokens of `path` (accepted nodes, first level first), then `token`: the bonus
    if the path ended in a leaf (or the tree is empty: plain decoding), else recovered. `tested`
    counts the positions where a guess was made and all before it were right: the denominator of
    alpha, whose numerator is `len(path)`.
    """

    path: tuple[int, ...]
    token: int
    bonus: bool
    tested: int


def choose(p: Tensor, e: Tensor) -> int:
    """The index that wins the exponential race: argmax(p / e) of p [K] >= 0 and noise e [K] > 0.

    Index x wins with probability p[x] / sum(p) (the Gumbel-max trick), so p need not be normalised,
    and an impossible token never wins.
    """
    winner = int(torch.argmax(p / e))
    assert p[winner] > 0, "no token has a positive probability"
    return winner


def walk(tree: TokenTree, choose_at: Callable[[int], int]) -> Verdict:
    """Follow the target's own choices down the tree for as long as the draft guessed them.

    `choose_at(node)` is the target's token after `node` (ROOT: after the last committed token). It
    is asked for the visited nodes only, once each, parents first.
    """
    node = ROOT
    path: list[int] = []
    while True:
        token = choose_at(node)
        child = tree.child(node, token)
        if child is None:
            break
        node = child
        path.append(node)
    bonus = not tree.children(node)
    return Verdict(tuple(path), token, bonus, tested=len(path) + (not bonus))


def expected_acceptance(p: Tensor, children_tokens: Sequence[int]) -> float:
    """Probability that `walk` steps from a node to one of its children: the sum of p over them."""
    return float(p[list(children_tokens)].sum())


def ratio_walk(
    tree: TokenTree,
    p_at: Callable[[int], Tensor],
    q_at: Callable[[int], Tensor],
    uniform_at: Callable[[int, int], Sequence[float]],
    draw: Callable[[Tensor, int], int],
) -> Verdict:
    """The ratio test down a tree whose siblings were drawn without replacement, in node order.

    At a visited node, `p_at(node)` is the target's law and `q_at(node)` the law its children were
    drawn from. `uniform_at(depth, count)` gives fresh uniforms for `count` siblings, `draw(law,
    depth)` a fresh token from a law; depth is the number of tokens accepted so far.

    Lossless only if no node is in the tree, or missing from it, because of its own token or of what
    follows it: the number of siblings and the depth must not depend on the values drawn.
    """
    node = ROOT
    path: list[int] = []
    while children := tree.children(node):
        tokens = [tree.tokens[child] for child in children]
        uniforms = uniform_at(len(path), len(tokens))
        winner, law = try_siblings(p_at(node), q_at(node), tokens, uniforms)
        if winner is None:
            return Verdict(tuple(path), draw(law, len(path)), bonus=False, tested=len(path) + 1)
        node = children[winner]
        path.append(node)
    return Verdict(tuple(path), draw(p_at(node), len(path)), bonus=True, tested=len(path))


def try_siblings(
    p: Tensor,
    q: Tensor,
    candidates: Sequence[int],
    uniforms: Sequence[float],
    replacement: bool = False,
) -> tuple[int | None, Tensor]:
    """Try tokens drawn from q in turn; return the index of the accepted one and the law left over.

    With None, that law is the one to draw the recovered token from. After each rejection p becomes
    what the candidate left uncovered, and q the law the next one was drawn from: without
    replacement, q without this candidate.
    """
    for index, (token, u) in enumerate(zip(candidates, uniforms, strict=True)):
        if u < accept_probability(p, q, token):
            return index, p
        p = residual(p, q)
        q = q if replacement else without(q, token)
    return None, p


def accept_probability(p: Tensor, q: Tensor, x: int) -> float:
    """min(1, p/q) of a token x that was drawn from q."""
    assert q[x] > 0, f"token {x} cannot have been drawn from q"
    return min(1.0, float(p[x] / q[x]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(p - q, 0)) [V]: what is left of p when a draw from q was rejected.

    Where q covers p entirely a rejection is impossible, except for rounding: p is left as it is.
    """
    uncovered = (p - q).clamp_(min=0)
    mass = uncovered.sum()
    return uncovered / mass if mass > 0 else p


def without(q: Tensor, x: int) -> Tensor:
    """norm(q with q(x) = 0) [V]: the law of the next sibling when x was drawn before it.

    All zeros when x was the only token left: no further sibling can have been drawn.
    """
    rest = q.clone()
    rest[x] = 0
    mass = rest.sum()
    return rest / mass if mass > 0 else rest


def ratio_acceptance(p: Tensor, q: Tensor) -> float:
    """Probability that the ratio test accepts one draw from q: sum(min(p, q)) = 1 - TV(p, q)."""
    return float(torch.minimum(p, q).sum())
