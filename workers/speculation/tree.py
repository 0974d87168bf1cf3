"""Proposals: what a draft guesses, as a tree of tokens.

Plain Python on purpose: these objects cross from the draft actors to the verifier on every step,
and an n-gram draft builds them in a process that must not pay for torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ROOT = -1
"""The last committed token: the parent of a tree's first level. It is no node and has no index."""


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Guesses for the next tokens. Node `i` guesses `tokens[i]` right after node `parents[i]`.

    Nodes are in level order, each level in the order of its parents, so that a node's children sit
    side by side: they are found by bisection, and every prefix of the nodes is itself a tree.

    Raises ValueError for anything that is not such a tree; `from_nodes` accepts any order in which
    parents precede their children. Two siblings with one token are refused because the walk could
    not tell them apart, and the budget spent on the second would be wasted.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        _refuse_orphans(self.tokens, self.parents)
        for node, (before, parent) in enumerate(pairwise(self.parents), start=1):
            if parent < before:
                raise ValueError(
                    f"parents: node {node} is a child of {parent} but follows a child of {before}: "
                    "not level order; build the tree with TokenTree.from_nodes"
                )
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self):
            raise ValueError("tokens: two siblings guess the same token; merge them into one node")

    @classmethod
    def empty(cls) -> TokenTree:
        """No guess at all: verifying it is one step of plain decoding."""
        return cls((), ())

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """One guess per position, each the child of the one before."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))

    @classmethod
    def from_nodes(cls, tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
        """The tree of nodes in any parent-before-child order; siblings keep theirs.

        Values kept per node beside the tree are reordered with `level_order(parents)`.
        """
        _refuse_orphans(tokens, parents)
        order = level_order(parents)
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(order)}
        return cls(tuple(tokens[node] for node in order), tuple(place[parents[n]] for n in order))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Levels below the last committed token, per node: 1 for its children."""
        return tuple(_depths(self.parents))

    @property
    def gamma(self) -> int:
        """Depth of the deepest guess, which is the last node's; 0 when there is none."""
        return len(self.path(len(self) - 1))

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes that guess what follows `node` (or ROOT), in node order."""
        first = bisect_left(self.parents, node)
        return tuple(range(first, bisect_right(self.parents, node, first)))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or ROOT) that guesses `token`."""
        return next((child for child in self.children(node) if self.tokens[child] == token), None)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the first level down to `node`; nothing for ROOT."""
        climb = []
        while node != ROOT:
            climb.append(node)
            node = self.parents[node]
        return tuple(reversed(climb))

    def cropped(self, depth: int) -> TokenTree:
        """The same tree without the nodes deeper than `depth`."""
        kept = bisect_right(_depths(self.parents), depth)
        return TokenTree(self.tokens[:kept], self.parents[:kept])


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """A distribution over a few tokens: token `ids[k]` has probability `probs[k]`, all others 0."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.probs):
            raise ValueError(f"probs: {len(self.probs)} probabilities for {len(self.ids)} ids")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft's answer: the tree, and what the draft knows about it.

    `confidence[i]` is the draft's estimate of the probability that the whole path down to node `i`
    is accepted. It steers how much of the tree is verified, never what is accepted.

    `q` is there under `verification: ratio` only: per node, the law its sibling set was drawn from,
    one object shared by the siblings, whose node order is the order in which they were drawn.

    `members` names, per node, who of the draft's members guessed it, where it has several.
    """

    tree: TokenTree
    confidence: tuple[float, ...]
    q: tuple[SparseLaw, ...] | None = None
    members: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.confidence) != len(self.tree):
            raise ValueError(
                f"confidence: {len(self.confidence)} values for a tree of {len(self.tree)} nodes"
            )
        if self.q is not None and len(self.q) != len(self.tree):
            raise ValueError(f"q: {len(self.q)} laws for a tree of {len(self.tree)} nodes")
        if self.members and len(self.members) != len(self.tree):
            raise ValueError(
                f"members: {len(self.members)} names for a tree of {len(self.tree)} nodes"
            )

    @classmethod
    def empty(cls) -> Proposal:
        """What a draft says that has nothing to guess."""
        return cls(TokenTree.empty(), ())

    def likeliest(self, least: float) -> Proposal:
        """Without the nodes of a lower confidence, and what is below them.

        Not for one with `q`: what was drawn must not decide what is verified.
        """
        assert self.q is None, "a sampled proposal is verified as it was drawn"
        kept: list[int] = []
        place = {ROOT: ROOT}
        for node, (parent, confidence) in enumerate(
            zip(self.tree.parents, self.confidence, strict=True)
        ):
            if confidence >= least and parent in place:
                place[node] = len(kept)
                kept.append(node)
        tokens, parents = self.tree.tokens, self.tree.parents
        return Proposal(
            TokenTree(
                tuple(tokens[node] for node in kept), tuple(place[parents[node]] for node in kept)
            ),
            tuple(self.confidence[node] for node in kept),
            members=tuple(self.members[node] for node in kept if self.members),
        )


def level_order(parents: Sequence[int]) -> tuple[int, ...]:
    """The old nodes in their new order: what brings parent-before-child nodes into level order.

    A breadth-first search, so siblings keep their order, and cousins that of their parents.
    """
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # below[ROOT] is the last
    for node, parent in enumerate(parents):
        below[parent].append(node)
    order = list(below[ROOT])
    for node in order:  # grows while it is read: the queue of the search
        order.extend(below[node])
    return tuple(order)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def _refuse_orphans(tokens: Sequence[int], parents: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise ValueError(f"parents: {len(parents)} parents for {len(tokens)} tokens")
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < node:
            raise ValueError(f"parents: node {node} has parent {parent}, not -1 or an earlier node")
        if token < 0:
            raise ValueError(f"tokens: node {node} guesses {token}, which is no token id")
