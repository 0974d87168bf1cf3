"""Trees: what is refused, how they are read, and that reordering keeps every path."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.speculation.tree import ROOT, Proposal, SparseLaw, TokenTree, level_order

#       ROOT
#      /    \
#     7(0)   5(1)
#    /   \     \
#   5(2) 9(3)  7(4)
#         |
#        1(5)
TREE = TokenTree((7, 5, 5, 9, 7, 1), (-1, -1, 0, 0, 1, 3))


@st.composite
def nodes(draw: st.DrawFn, most: int = 12) -> tuple[list[int], list[int]]:
    """Tokens and parents in some parent-before-child order, siblings distinct."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        tokens.append(draw(st.integers(0, most).filter(lambda t, taken=taken: t not in taken)))
        parents.append(parent)
    return tokens, parents


def climb(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    return () if node == ROOT else (*climb(tokens, parents, parents[node]), tokens[node])


def test_reading_a_tree() -> None:
    assert len(TREE) == 6
    assert TREE.depths == (1, 1, 2, 2, 2, 3)
    assert TREE.gamma == 3
    assert [TREE.children(node) for node in range(ROOT, 6)] == [
        (0, 1), (2, 3), (4,), (), (5,), (), (),
    ]  # fmt: skip
    assert TREE.child(ROOT, 5) == 1
    assert TREE.child(0, 9) == 3
    assert TREE.child(0, 7) is None
    assert TREE.child(5, 1) is None
    assert TREE.path(5) == (0, 3, 5)
    assert TREE.path(ROOT) == ()


def test_an_empty_tree_has_no_depth_and_no_children() -> None:
    tree = TokenTree.empty()
    assert (len(tree), tree.gamma, tree.depths, tree.children(ROOT)) == (0, 0, (), ())
    assert tree == TokenTree.chain([]) == TokenTree.from_nodes([], [])


def test_a_chain_is_one_path() -> None:
    tree = TokenTree.chain([4, 4, 6])
    assert tree == TokenTree((4, 4, 6), (-1, 0, 1))
    assert tree.path(2) == (0, 1, 2)
    assert tree.gamma == 3


@pytest.mark.parametrize(
    ("depth", "size"), [(0, 0), (1, 2), (2, 5), (3, 6), (9, 6)], ids=lambda value: str(value)
)
def test_cropping_drops_the_deeper_levels_only(depth: int, size: int) -> None:
    assert TREE.cropped(depth) == TokenTree(TREE.tokens[:size], TREE.parents[:size])


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ((1, 2), (-1,), "parents: 1 parents for 2 tokens"),
        ((1,), (0,), "parents: node 0 has parent 0"),
        ((1, 2), (-1, 2), "parents: node 1 has parent 2"),
        ((1, 2), (-1, -2), "parents: node 1 has parent -2"),
        ((1, -2), (-1, 0), "tokens: node 1 guesses -2"),
        ((1, 2, 3), (-1, 0, -1), "not level order; build the tree with TokenTree.from_nodes"),
        ((1, 2, 3, 4), (-1, -1, 1, 0), "parents: node 3 is a child of 0 but follows a child of 1"),
        ((1, 1), (-1, -1), "tokens: two siblings guess the same token"),
    ],
)
def test_what_is_not_a_tree_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        TokenTree(tokens, parents)


@pytest.mark.parametrize(
    ("tokens", "parents"), [([1], [-1, 0]), ([1, 2], [-1, 1]), ([3, 3], [-1, -1]), ([-1], [-1])]
)
def test_from_nodes_mends_the_order_and_nothing_else(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^(tokens|parents): "):
        TokenTree.from_nodes(tokens, parents)


def test_cousins_may_guess_the_same_token() -> None:
    assert TokenTree((1, 2, 3, 3), (-1, -1, 0, 1)).path(3) == (1, 3)


@given(nodes())
def test_level_order_keeps_every_path_and_the_order_of_siblings(
    given_nodes: tuple[list[int], list[int]],
) -> None:
    tokens, parents = given_nodes
    order = level_order(parents)
    assert sorted(order) == list(range(len(tokens)))
    tree = TokenTree.from_nodes(tokens, parents)
    for new, old in enumerate(order):
        assert tuple(tree.tokens[n] for n in tree.path(new)) == climb(tokens, parents, old)
    for node in range(ROOT, len(tree)):
        siblings = [order[child] for child in tree.children(node)]
        assert siblings == sorted(siblings)
    assert list(tree.depths) == sorted(tree.depths)
    assert tree.gamma == max(tree.depths, default=0)
    assert level_order(tree.parents) == tuple(range(len(tree)))


@given(nodes(), st.integers(0, 6))
def test_a_cropped_tree_has_just_the_paths_that_are_short_enough(
    given_nodes: tuple[list[int], list[int]], depth: int
) -> None:
    tree = TokenTree.from_nodes(*given_nodes)
    kept = [node for node in range(len(tree)) if len(tree.path(node)) <= depth]
    cropped = tree.cropped(depth)
    assert len(cropped) == len(kept)
    assert [cropped.path(node) for node in range(len(cropped))] == [tree.path(n) for n in kept]


@given(nodes())
def test_children_and_child_agree_with_parents(given_nodes: tuple[list[int], list[int]]) -> None:
    tree = TokenTree.from_nodes(*given_nodes)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert node in tree.children(parent)
        assert tree.child(parent, token) == node
    assert sum(len(tree.children(node)) for node in range(ROOT, len(tree))) == len(tree)


def test_a_proposal_knows_one_confidence_and_one_law_per_node() -> None:
    tree = TokenTree.chain([1, 2])
    law = SparseLaw((1, 2), (0.5, 0.5))
    assert Proposal(tree, (0.5, 0.25), (law, law)).q == (law, law)
    assert Proposal.empty() == Proposal(TokenTree.empty(), ())
    with pytest.raises(ValueError, match="members: 1 names for a tree of 2 nodes"):
        Proposal(TokenTree.chain([1, 2]), (1, 1), members=("table",))
    with pytest.raises(ValueError, match="confidence: 1 values for a tree of 2 nodes"):
        Proposal(tree, (0.5,))
    with pytest.raises(ValueError, match="q: 1 laws for a tree of 2 nodes"):
        Proposal(tree, (0.5, 0.25), (law,))
    with pytest.raises(ValueError, match="probs: 1 probabilities for 2 ids"):
        SparseLaw((1, 2), (1.0,))


@given(nodes(), st.data())
def test_the_likeliest_part_of_a_proposal_is_a_tree_with_the_same_paths(
    given_nodes: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    tree = TokenTree.from_nodes(*given_nodes)
    confidence = tuple(data.draw(st.floats(0, 1)) for _ in tree.tokens)
    members = tuple(f"member {node}" for node in range(len(tree)))
    least = data.draw(st.floats(0, 1))
    whole = Proposal(tree, confidence, members=members)
    part = whole.likeliest(least)
    expected = {
        tuple(tree.tokens[step] for step in tree.path(node)): (confidence[node], members[node])
        for node in range(len(tree))
        if all(confidence[step] >= least for step in tree.path(node))
    }
    found = {
        tuple(part.tree.tokens[step] for step in part.tree.path(node)): (
            part.confidence[node],
            part.members[node],
        )
        for node in range(len(part.tree))
    }
    assert found == expected
    assert Proposal(tree, confidence).likeliest(least).members == ()
    assert whole.likeliest(0.0) == whole


def test_a_proposal_pickles_small_and_its_siblings_still_share_their_law() -> None:
    law = SparseLaw(tuple(range(64)), (1 / 64,) * 64)
    plain = Proposal(TREE, (0.5,) * 6)
    ratio = Proposal(TREE, (0.5,) * 6, (law,) * 6)
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert len(pickle.dumps(plain)) < 400
    loaded = pickle.loads(pickle.dumps(ratio))
    assert loaded == ratio
    assert all(q is loaded.q[0] for q in loaded.q)


def test_trees_do_not_import_torch() -> None:
    program = "import sys, workers.speculation.tree; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
