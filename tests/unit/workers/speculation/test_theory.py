"""Theory against closed forms, against simulation by the real walk, and against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.speculation.acceptance import walk
from workers.speculation.theory import (
    Shape,
    best_gamma,
    best_shape,
    speedup,
    tau_chain,
    tau_tree,
)
from workers.speculation.tree import ROOT, TokenTree

EXACT = 1e-12
ALPHAS = st.floats(0, 1)


def test_the_stated_tau_and_the_common_error() -> None:
    tau = tau_chain(0.8, 5)
    assert tau == pytest.approx(3.68928, abs=EXACT)
    drafted_share = (tau - 1) / 5
    assert round(drafted_share, 3) == 0.538
    assert tau_chain(drafted_share, 5) < 2.2  # accepted/drafted fed in as alpha


@given(st.floats(0, 0.999), st.integers(0, 20))
def test_tau_chain_is_the_closed_form(alpha: float, gamma: int) -> None:
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    assert tau_chain(alpha, gamma) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_tau_chain_at_the_ends(gamma: int) -> None:
    assert tau_chain(0.0, gamma) == 1
    assert tau_chain(1.0, gamma) == gamma + 1


def test_tau_is_what_walk_emits_on_average() -> None:
    """Every outcome of five guesses that are right with .8, through the real walk."""
    tree = TokenTree.chain([1] * 5)
    tau = 0.0
    for rights in product((0, 1), repeat=5):
        probability = prod(0.8 if right else 0.2 for right in rights)
        verdict = walk(tree, lambda node, rights=rights: (*rights, 0)[node + 1])
        tau += probability * (len(verdict.path) + 1)
    assert tau == pytest.approx(tau_chain(0.8, 5), abs=EXACT)


@given(ALPHAS, st.integers(0, 12))
def test_a_chain_is_a_tree(alpha: float, gamma: int) -> None:
    path_probabilities = [alpha**depth for depth in range(1, gamma + 1)]
    assert tau_tree(path_probabilities) == pytest.approx(tau_chain(alpha, gamma), abs=EXACT)


def test_tau_tree_counts_every_node_once() -> None:
    assert tau_tree(()) == 1
    assert tau_tree((0.5, 0.25, 0.125)) == 1.875


def test_speedup_divides_by_the_whole_step() -> None:
    assert speedup(1.0, 0.0, 1.0) == 1.0  # plain decoding
    assert speedup(3.0, 0.5, 1.25, 0.25) == 1.5


def test_best_gamma_by_hand() -> None:
    # Free drafts and a flat target: the longer the better. A draft as dear as the target: none.
    assert best_gamma(0.8, 0.0, lambda n: 1.0, 8) == 8
    assert best_gamma(0.8, 1.0, lambda n: 1.0, 8) == 0
    assert best_gamma(0.0, 0.0, lambda n: 1.0, 8) == 0
    # A target that costs its tokens, n forwards for n: never.
    assert best_gamma(0.9, 0.0, lambda n: float(n), 8) == 0
    # c = .1: gamma 5 gives 3.6893 / 1.5 = 2.460, 6 gives 3.9514 / 1.6 = 2.470, 7 gives 2.448.
    assert best_gamma(0.8, 0.1, lambda n: 1.0, 10) == 6


@given(ALPHAS, st.floats(0, 1), st.floats(0, 0.5), st.integers(0, 10))
def test_no_gamma_beats_the_best(alpha: float, c: float, slope: float, most: int) -> None:
    def v(n: int) -> float:
        return 1 + slope * (n - 1)

    def speedup_at(gamma: int) -> float:
        return speedup(tau_chain(alpha, gamma), gamma * c, v(gamma + 1))

    best = best_gamma(alpha, c, v, most)
    assert 0 <= best <= most
    assert all(speedup_at(gamma) <= speedup_at(best) for gamma in range(most + 1))
    assert all(speedup_at(gamma) < speedup_at(best) for gamma in range(best))


# ---------------------------------------------------------------- shapes

Path = tuple[int, ...]


def all_trees(ranks: int, budget: int) -> Iterator[frozenset[Path]]:
    """Every set of at most `budget` paths of ranks that contains each path's parent."""
    trees: set[frozenset[Path]] = {frozenset()}
    yield frozenset()
    for _ in range(budget):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in ((), *tree)
            for rank in range(ranks)
            if (*parent, rank) not in tree
        }
        yield from trees


def paths(shape: Shape) -> list[Path]:
    tree = TokenTree(shape.ranks, shape.parents)
    return [tuple(shape.ranks[n] for n in tree.path(node)) for node in range(len(tree))]


def tau_of(tree: frozenset[Path], probabilities: list[float]) -> float:
    return tau_tree(prod(probabilities[rank] for rank in path) for path in tree)


falling = st.lists(st.floats(0, 1), min_size=1, max_size=3).map(
    lambda ps: sorted((p / max(1.0, sum(ps)) for p in ps), reverse=True)
)


@settings(max_examples=40)
@given(falling, st.integers(0, 4))
def test_no_tree_beats_the_best_shape(probabilities: list[float], budget: int) -> None:
    shape = best_shape(probabilities, budget)
    found = frozenset(paths(shape))
    assert len(found) == len(shape.parents) <= budget
    assert shape.tau == pytest.approx(tau_of(found, probabilities), abs=EXACT)
    best = max(tau_of(tree, probabilities) for tree in all_trees(len(probabilities), budget))
    assert shape.tau == pytest.approx(best, abs=EXACT)


def test_best_shape_by_hand() -> None:
    # On offer: .6, then .36 (below it), .216, .2 (its sibling), ...
    shape = best_shape([0.6, 0.2], 4)
    assert shape == Shape((-1, -1, 0, 2), (0, 1, 0, 0), shape.tau)
    assert shape.tau == pytest.approx(1 + 0.6 + 0.36 + 0.216 + 0.2, abs=EXACT)


def test_a_sure_guess_makes_a_chain_and_a_flat_one_makes_a_bush() -> None:
    assert best_shape([1.0, 0.0], 5).parents == (-1, 0, 1, 2, 3)
    assert best_shape([0.25] * 4, 4) == Shape((ROOT,) * 4, (0, 1, 2, 3), 2.0)


def test_guesses_that_cannot_be_right_are_left_out() -> None:
    assert best_shape([0.0, 0.0], 5) == best_shape([], 5) == Shape((), (), 1.0)
    assert best_shape([0.5, 0.0], 3).ranks == (0, 0, 0)


@pytest.mark.parametrize("wrong", [[0.2, 0.3], [1.2], [0.5, -0.1], [float("nan")]])
def test_probabilities_that_rise_or_are_none_are_refused(wrong: list[float]) -> None:
    with pytest.raises(AssertionError, match="are not probabilities that fall with the rank"):
        best_shape(wrong, 3)
