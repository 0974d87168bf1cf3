"""Exactness by enumeration: run the real code under every outcome of every random choice it makes.

`runs` executes a program that gets all its randomness from a `Dice`, once per outcome, and says how
probable each run was. A uniform handed to the ratio test is a `Coin`: comparing it with a
probability *is* the toss. So the law of the output is a finite sum, compared with p to 1e-12, and
nothing here is statistical except the race itself. The bugs that others made are written
out and must miss p by the total variation it states: the method would have seen them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.speculation.acceptance import (
    Verdict,
    accept_probability,
    choose,
    expected_acceptance,
    ratio_acceptance,
    ratio_walk,
    residual,
    try_siblings,
    walk,
    without,
)
from workers.speculation.noise import noise
from workers.speculation.tree import ROOT, TokenTree

EXACT = 1e-12
T = TypeVar("T")


def law(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


P = law(0.5, 0.3, 0.15, 0.05)
Q = law(0.2, 0.2, 0.3, 0.3)


def tv(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum()) / 2


# ---------------------------------------------------------------- every run, with its probability


class Dice:
    """Replays a script of outcomes; past its end it takes the first and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.rolled = 0
        self.probability = 1.0
        self.untried: list[tuple[int, ...]] = []

    def roll(self, law: Sequence[float]) -> int:
        if self.rolled == len(self.script):
            first, *others = (outcome for outcome, mass in enumerate(law) if mass > 0)
            self.untried += [(*self.script, other) for other in others]
            self.script = (*self.script, first)
        outcome = self.script[self.rolled]
        self.rolled += 1
        self.probability *= law[outcome]
        return outcome

    def draw(self, law: Tensor) -> int:
        return self.roll(law.tolist())

    def coins(self, count: int) -> list[Any]:
        return [Coin(self) for _ in range(count)]


class Coin:
    """A uniform that has not been drawn yet: only `coin < probability` can be asked of it."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice

    def __lt__(self, probability: float) -> bool:
        return self.dice.roll((1 - probability, probability)) == 1


def runs(program: Callable[[Dice], T]) -> Iterator[tuple[float, T]]:
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        dice = Dice(scripts.pop())
        result = program(dice)
        scripts += dice.untried
        yield dice.probability, result


def draw_siblings(dice: Dice, q: Tensor, count: int, replacement: bool = False) -> list[int]:
    drawn = []
    for _ in range(count):
        drawn.append(dice.draw(q))
        q = q if replacement else without(q, drawn[-1])
    return drawn


def output_law(step: Callable[[Dice], int], vocabulary: int = 4) -> Tensor:
    output = torch.zeros(vocabulary, dtype=torch.float64)
    for probability, token in runs(step):
        output[token] += probability
    return output


Test = Callable[..., tuple[int | None, Tensor]]


def siblings_step(
    p: Tensor, q: Tensor, count: int, replacement: bool = False, test: Test = try_siblings
) -> Callable[[Dice], int]:
    """One token: draw siblings from q, test them, draw from the law left over if all failed."""

    def step(dice: Dice) -> int:
        drawn = draw_siblings(dice, q, count, replacement)
        accepted, rest = test(p, q, drawn, dice.coins(count), replacement)
        return dice.draw(rest) if accepted is None else drawn[accepted]

    return step


def accepted_mass(p: Tensor, q: Tensor, count: int, replacement: bool = False) -> float:
    def accepts(dice: Dice) -> bool:
        drawn = draw_siblings(dice, q, count, replacement)
        return try_siblings(p, q, drawn, dice.coins(count), replacement)[0] is not None

    return sum(probability for probability, accepted in runs(accepts) if accepted)


def test_the_enumeration_is_complete() -> None:
    def program(dice: Dice) -> tuple[int, bool]:
        return dice.draw(P), dice.coins(1)[0] < 0.25

    found = {result: probability for probability, result in runs(program)}
    assert found == {
        (x, hit): pytest.approx(float(P[x]) * (0.25 if hit else 0.75), abs=EXACT)
        for x, hit in product(range(4), (False, True))
    }


# ---------------------------------------------------------------- the pieces of the ratio test


def test_acceptance_by_hand() -> None:
    assert accept_probability(P, Q, 0) == 1.0
    assert accept_probability(P, Q, 2) == pytest.approx(0.5, abs=EXACT)
    with pytest.raises(AssertionError, match="token 1 cannot have been drawn from q"):
        accept_probability(P, law(1, 0, 0, 0), 1)


def test_residual_by_hand() -> None:
    torch.testing.assert_close(residual(P, Q), law(0.75, 0.25, 0, 0), rtol=0, atol=EXACT)
    assert residual(P, P) is P  # nothing is left, and nothing could have been rejected


def test_without_by_hand() -> None:
    torch.testing.assert_close(without(Q, 0), law(0, 0.25, 0.375, 0.375), rtol=0, atol=EXACT)
    assert without(law(0, 1, 0, 0), 1).tolist() == [0, 0, 0, 0]
    assert float(Q[0]) == 0.2  # the law itself is left as it was


def test_expected_acceptance_by_hand() -> None:
    assert expected_acceptance(P, (0, 3)) == pytest.approx(0.55, abs=EXACT)
    assert expected_acceptance(P, ()) == 0.0
    assert ratio_acceptance(P, Q) == pytest.approx(0.6, abs=EXACT)
    assert ratio_acceptance(P, Q) == pytest.approx(1 - tv(P, Q), abs=EXACT)


def test_uniforms_are_compared_as_probabilities() -> None:
    assert try_siblings(P, Q, (2,), (0.499,))[0] == 0
    rejected, rest = try_siblings(P, Q, (2,), (0.501,))
    assert rejected is None
    torch.testing.assert_close(rest, residual(P, Q))
    assert try_siblings(P, Q, (2, 0), (0.9, 0.9))[0] == 1
    with pytest.raises(ValueError, match="zip"):
        try_siblings(P, Q, (2, 0), (0.9,))


@pytest.mark.parametrize(
    ("count", "replacement", "acceptance"),
    [(1, False, 0.6), (2, True, 0.76), (2, False, 57 / 70)],
)
def test_oracles_of_the_ratio_test(count: int, replacement: bool, acceptance: float) -> None:
    assert accepted_mass(P, Q, count, replacement) == pytest.approx(acceptance, abs=EXACT)
    assert tv(output_law(siblings_step(P, Q, count, replacement)), P) < EXACT
    assert round(57 / 70, 4) == 0.8143


# ---------------------------------------------------------------- bugs, and how they would show


def test_a_residual_that_is_not_updated_between_siblings_shows() -> None:
    def buggy(p: Tensor, q: Tensor, drawn: Any, coins: Any, _: bool) -> tuple[int | None, Tensor]:
        for index, (token, u) in enumerate(zip(drawn, coins, strict=True)):
            if u < accept_probability(p, q, token):
                return index, p
        return None, p

    assert tv(output_law(siblings_step(P, Q, 2, True, buggy)), P) == pytest.approx(0.14, abs=EXACT)


def test_a_q_that_is_not_renormalised_shows() -> None:
    def buggy(p: Tensor, q: Tensor, drawn: Any, coins: Any, _: bool) -> tuple[int | None, Tensor]:
        for index, (token, u) in enumerate(zip(drawn, coins, strict=True)):
            if u < accept_probability(p, q, token):
                return index, p
            p = residual(p, q)
            q = q.clone()
            q[token] = 0
        return None, p

    missed = tv(output_law(siblings_step(P, Q, 2, False, buggy)), P)
    assert missed == pytest.approx(1 / 35, abs=EXACT)
    assert round(1 / 35, 4) == 0.0286


@pytest.mark.parametrize(("p", "q", "missed"), [(P, Q, 0.1), (law(0.7, 0.3), law(0.5, 0.5), 0.06)])
def test_resampling_from_p_after_a_rejection_shows(p: Tensor, q: Tensor, missed: float) -> None:
    def buggy(p: Tensor, q: Tensor, drawn: Any, coins: Any, _: bool) -> tuple[int | None, Tensor]:
        return try_siblings(p, q, drawn, coins)[0], p

    output = output_law(siblings_step(p, q, 1, test=buggy), len(p))
    assert tv(output, p) == pytest.approx(missed, abs=EXACT)


def test_keeping_the_likelier_of_two_siblings_shows() -> None:
    def buggy(dice: Dice) -> int:
        kept = max(draw_siblings(dice, Q, 2, replacement=True), key=lambda token: float(Q[token]))
        accepted, rest = try_siblings(P, Q, (kept,), dice.coins(1))
        return dice.draw(rest) if accepted is None else kept

    assert tv(output_law(buggy), P) == pytest.approx(0.08, abs=EXACT)


def test_an_argmax_draft_verified_with_its_softmax_shows() -> None:
    p, q = law(0.7, 0.3), law(0.5, 0.5)

    def buggy(dice: Dice) -> int:
        guess = int(torch.argmax(q))
        accepted, rest = try_siblings(p, q, (guess,), dice.coins(1))
        return dice.draw(rest) if accepted is None else guess

    assert tv(output_law(buggy, 2), p) == pytest.approx(0.3, abs=EXACT)


# ---------------------------------------------------------------- any p, any q


def laws(vocabulary: int, zeros: bool = True) -> st.SearchStrategy[Tensor]:
    weights = st.lists(
        st.integers(0 if zeros else 1, 20), min_size=vocabulary, max_size=vocabulary
    ).filter(any)
    return weights.map(lambda ws: law(*ws) / sum(ws))


@settings(max_examples=150)
@given(laws(4), laws(4), st.integers(1, 3), st.booleans())
def test_siblings_leave_the_law_of_the_target(
    p: Tensor, q: Tensor, count: int, replacement: bool
) -> None:
    assume(replacement or count <= int((q > 0).sum()))
    assert tv(output_law(siblings_step(p, q, count, replacement)), p) < EXACT


@settings(max_examples=150)
@given(laws(5), laws(5))
def test_one_sibling_is_accepted_with_one_minus_tv(p: Tensor, q: Tensor) -> None:
    assert accepted_mass(p, q, 1) == pytest.approx(ratio_acceptance(p, q), abs=EXACT)
    assert ratio_acceptance(p, q) == pytest.approx(1 - tv(p, q), abs=EXACT)


# ---------------------------------------------------------------- whole trees

Context = tuple[int, ...]


class World:
    """A target and a draft over a small vocabulary: random laws, one per context."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.p = cache(self._law)
        self.q = cache(self._law)

    def _law(self, context: Context) -> Tensor:
        weights = torch.rand(self.vocabulary, generator=self.generator, dtype=torch.float64)
        return (weights + 0.01) / (weights + 0.01).sum()

    def text(self, context: Context, length: int) -> Tensor:
        """Law of what follows `context` up to `length` tokens: one axis [V] per missing token."""
        if len(context) == length:
            return torch.ones((), dtype=torch.float64)
        p = self.p(context)
        rest = [self.text((*context, x), length) for x in range(self.vocabulary)]
        return torch.stack([p[x] * rest[x] for x in range(self.vocabulary)])


def texts_after(world: World, length: int, step: Callable[[Dice], Context]) -> Tensor:
    """Law of the first `length` tokens when `step` gives the first few and the target goes on."""
    texts = torch.zeros((world.vocabulary,) * length, dtype=torch.float64)
    for probability, emitted in runs(step):
        texts[emitted] += probability * world.text(emitted, length)
    return texts


def context_of(tree: TokenTree, node: int) -> Context:
    return tuple(tree.tokens[n] for n in tree.path(node))


def emitted(tree: TokenTree, verdict: Verdict) -> Context:
    return (*(tree.tokens[node] for node in verdict.path), verdict.token)


def sampled_tree(dice: Dice, world: World, shape: TokenTree) -> TokenTree:
    """Fill a shape, fixed beforehand, with siblings drawn from q without replacement."""
    tokens: Context = ()
    for parent in range(ROOT, len(shape)):
        partial = TokenTree(tokens, shape.parents[: len(tokens)])
        q = world.q(context_of(partial, parent))
        tokens += tuple(draw_siblings(dice, q, len(shape.children(parent))))
    return TokenTree(tokens, shape.parents)


def ratio_step(world: World, shape: TokenTree) -> Callable[[Dice], Context]:
    def step(dice: Dice) -> Context:
        tree = sampled_tree(dice, world, shape)
        verdict = ratio_walk(
            tree,
            p_at=lambda node: world.p(context_of(tree, node)),
            q_at=lambda node: world.q(context_of(tree, node)),
            uniform_at=lambda depth, count: dice.coins(count),
            draw=lambda left, depth: dice.draw(left),
        )
        return emitted(tree, verdict)

    return step


@st.composite
def trees(draw: st.DrawFn, vocabulary: int, most: int = 7) -> TokenTree:
    nodes: list[Context] = []
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.sampled_from([(), *nodes]))
        node = (*parent, draw(st.integers(0, vocabulary - 1)))
        if node not in nodes:
            nodes.append(node)
    parents = [nodes.index(node[:-1]) if len(node) > 1 else ROOT for node in nodes]
    return TokenTree.from_nodes([node[-1] for node in nodes], parents)


SHAPES = {
    "nothing": TokenTree.empty(),
    "chain": TokenTree.chain((0, 0)),
    "siblings": TokenTree((0, 1, 2), (-1, -1, -1)),
    "comb": TokenTree((0, 1, 0, 1), (-1, -1, 0, 0)),
    "below the second": TokenTree((0, 1, 0, 0), (-1, -1, 0, 1)),
    "full": TokenTree((0, 1, 0, 1, 0, 1), (-1, -1, 0, 0, 1, 1)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_ratio_walk_leaves_the_law_of_the_text(shape: TokenTree) -> None:
    world = World(seed=1, vocabulary=3)
    texts = texts_after(world, 3, ratio_step(world, shape))
    torch.testing.assert_close(texts, world.text((), 3), rtol=0, atol=EXACT)


@settings(max_examples=25)
@given(trees(vocabulary=3, most=6), st.integers(0, 2**32))
def test_ratio_walk_leaves_the_law_of_the_text_in_any_shape(shape: TokenTree, seed: int) -> None:
    shape, world = shape.cropped(3), World(seed, vocabulary=3)
    texts = texts_after(world, 4, ratio_step(world, shape))
    torch.testing.assert_close(texts, world.text((), 4), rtol=0, atol=EXACT)


def test_choosing_the_shape_by_what_was_drawn_would_show() -> None:
    """Non-anticipation: the draft cuts its second guess off when the draw looks bad."""
    world = World(seed=1, vocabulary=3)

    def anticipating(dice: Dice) -> Context:
        tree = sampled_tree(dice, world, SHAPES["chain"])
        if world.q(tree.tokens[:1])[tree.tokens[1]] < 0.3:
            tree = tree.cropped(1)
        verdict = ratio_walk(
            tree,
            p_at=lambda node: world.p(context_of(tree, node)),
            q_at=lambda node: world.q(context_of(tree, node)),
            uniform_at=lambda depth, count: dice.coins(count),
            draw=lambda left, depth: dice.draw(left),
        )
        return emitted(tree, verdict)

    assert tv(texts_after(world, 3, anticipating).flatten(), world.text((), 3).flatten()) > 0.01


def test_ratio_walk_says_what_it_did() -> None:
    tree = TokenTree((1, 2, 3, 0), (-1, -1, 1, 2))
    asked: list[tuple[str, int, int]] = []

    def verdict(*uniforms: float) -> Verdict:
        asked.clear()
        pending = list(uniforms)

        def uniform_at(depth: int, count: int) -> list[float]:
            asked.append(("uniform", depth, count))
            return [pending.pop(0) for _ in range(count)]

        def draw(left: Tensor, depth: int) -> int:
            asked.append(("draw", depth, int(left.argmax())))
            return 9

        return ratio_walk(tree, lambda node: P, lambda node: Q, uniform_at, draw)

    # p/q is 1.5, .5, .167 for tokens 1, 2, 3; after 1 is rejected it never is.
    assert verdict(0.9, 0.9) == Verdict((0,), 9, bonus=True, tested=1)
    assert asked == [("uniform", 0, 2), ("draw", 1, 0)]
    tree = TokenTree((2, 0, 3, 0), (-1, -1, 1, 2))
    assert verdict(0.9, 0.9, 0.9) == Verdict((1,), 9, bonus=False, tested=2)
    assert asked == [("uniform", 0, 2), ("uniform", 1, 1), ("draw", 1, 0)]
    assert verdict(0.9, 0.9, 0.1, 0.5) == Verdict((1, 2, 3), 9, bonus=True, tested=3)
    assert asked[-1] == ("draw", 3, 0)


# ---------------------------------------------------------------- drafter invariance


def test_choose_takes_the_winner_of_the_race() -> None:
    assert choose(law(0.1, 0.2, 0.7), law(0.1, 0.1, 0.4)) == 1
    assert choose(law(0, 5, 0), law(1e-9, 30, 1e-9)) == 1
    with pytest.raises(AssertionError, match="no token has a positive probability"):
        choose(law(0, 0), law(1, 1))
    with pytest.raises(AssertionError, match="no token has a positive probability"):
        choose(law(0.5, float("nan")), law(1, 1))


def test_choose_draws_from_p_whatever_its_scale_and_precision() -> None:
    draws = 8000
    e = torch.stack([noise(11, position, 4) for position in range(draws)])
    counts = torch.zeros(4)
    for row in e:
        token = choose(P, row)
        assert choose(P.float() * 3, row) == token
        counts[token] += 1
    chi_square = float(((counts - draws * P) ** 2 / (draws * P)).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, one chance in a thousand; the seed is fixed


def test_walk_says_what_it_did() -> None:
    tree = TokenTree((7, 5, 9, 1), (-1, -1, 0, 2))
    asked: list[int] = []

    def verdict(choices: dict[int, int], tree: TokenTree = tree) -> Verdict:
        asked.clear()
        return walk(tree, lambda node: asked.append(node) or choices[node])

    assert verdict({-1: 4}) == Verdict((), 4, bonus=False, tested=1)
    assert verdict({-1: 7, 0: 5}) == Verdict((0,), 5, bonus=False, tested=2)
    assert verdict({-1: 5, 1: 7}) == Verdict((1,), 7, bonus=True, tested=1)
    assert verdict({-1: 7, 0: 9, 2: 1, 3: 1}) == Verdict((0, 2, 3), 1, bonus=True, tested=3)
    assert asked == [-1, 0, 2, 3]  # the visited nodes, once each
    assert verdict({-1: 3}, TokenTree.empty()) == Verdict((), 3, bonus=True, tested=0)


@settings(max_examples=150)
@given(trees(vocabulary=3), st.integers(0, 2**32))
def test_walk_leaves_the_law_of_the_text_under_any_tree(tree: TokenTree, seed: int) -> None:
    tree, world = tree.cropped(3), World(seed, vocabulary=3)

    def step(dice: Dice) -> Context:
        verdict = walk(tree, lambda node: dice.draw(world.p(context_of(tree, node))))
        return emitted(tree, verdict)

    torch.testing.assert_close(texts_after(world, 4, step), world.text((), 4), rtol=0, atol=EXACT)


@settings(max_examples=150)
@given(trees(vocabulary=4), st.integers(0, 2**32))
def test_a_step_of_walk_accepts_with_the_sum_of_p_over_the_children(
    tree: TokenTree, seed: int
) -> None:
    world = World(seed, vocabulary=4)
    children = [tree.tokens[child] for child in tree.children(ROOT)]
    hits = sum(
        probability
        for probability, token in runs(lambda dice: dice.draw(world.p(())))
        if walk(tree, lambda node, token=token: token).path[:1]
    )
    assert hits == pytest.approx(expected_acceptance(world.p(()), children), abs=EXACT)


@settings(max_examples=30)
@given(st.integers(0, 2**64 - 1), st.lists(trees(vocabulary=4), min_size=1, max_size=8))
def test_a_seed_gives_the_same_text_under_any_drafts(seed: int, proposals: list[TokenTree]) -> None:
    world = World(seed % 1000, vocabulary=4)

    def chosen(text: Context) -> int:
        # Laws that look two tokens back: the text matters, the steps that made it must not.
        return choose(world.p(text[-2:]), noise(seed, len(text), 4))

    text: Context = ()
    for tree in proposals:
        committed = text
        verdict = walk(
            tree,
            lambda node, c=committed, t=tree: chosen((*c, *context_of(t, node))),
        )
        text += emitted(tree, verdict)
    plain: Context = ()
    while len(plain) < len(text):
        plain = (*plain, chosen(plain))
    assert text == plain
