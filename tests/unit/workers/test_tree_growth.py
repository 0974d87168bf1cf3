"""How a tree grows on what several members say, against a search that tries every path."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import tree_growth
from workers.calibration import UNCALIBRATED, Calibration, Pool, Regime
from workers.draft import DraftRequest, DraftUpdate, Terms
from workers.engine.vocabulary import Vocabulary
from workers.hybrid_draft import CompiledGrowth
from workers.ngram_member import NgramMember
from workers.speculation.tree import Proposal, SparseLaw
from workers.training.ngram_table import COUNTED, LIKELIEST, ORDER, NgramTable
from workers.tree_growth import (
    LEAST_CONFIDENCE,
    NEURAL,
    NEURAL_SHARE,
    ROUND_NODES,
    ROUND_WORTH,
    SMALL,
    SUFFIX,
    TABLE,
    PlainGrowth,
    Tree,
    TreePath,
)

NEGLIGIBLE = 0.005
VOCABULARY = Vocabulary(50, "abc")
PLAIN = UNCALIBRATED.at(0.0)
Laws = Mapping[TreePath, Mapping[int, float]]


# Whichever of the two a test is run with.
GROWTH: list[type[PlainGrowth] | type[CompiledGrowth]] = []


@pytest.fixture(
    scope="module", params=[PlainGrowth, CompiledGrowth], ids=["plain", "compiled"], autouse=True
)
def growth(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param is None:
        pytest.skip("nothing is compiled here")
    GROWTH.append(request.param)
    yield
    GROWTH.pop()


@dataclass
class Setting:
    """Everything a tree grows from. `table` None: no n-grams at all."""

    tokens: Sequence[int] = (1, 2, 1)
    table: Sequence[Sequence[int]] | None = ()
    regime: Regime = PLAIN
    laws: Laws = field(default_factory=dict)
    budget: int = 8
    depth: int = 4
    children: int = 6
    terms: Terms | None = None

    def ngrams(self) -> NgramMember | None:
        if self.table is None:
            return None
        known = [sequence for sequence in self.table if len(sequence) > 1]
        table = NgramTable.build(known, VOCABULARY, {}) if known else None
        member = NgramMember(table)
        member.commit(DraftUpdate(0, 0, tuple(self.tokens)))
        assert member.catch_up(0)
        return member

    def tree(self, *, neural: bool = True) -> Tree:
        request = DraftRequest(0, len(self.tokens), self.budget, self.depth, terms=self.terms)
        calibration = Calibration({0.0: self.regime})
        growth = GROWTH[-1](self.ngrams(), calibration, children=self.children)
        assert growth.ready(request)
        tree = growth.tree(request, neural=neural)
        for path, law in self.laws.items():
            tree.hear(path, SparseLaw(tuple(law), tuple(law.values())))
        return tree

    def grown(self) -> Proposal:
        tree = self.tree()
        tree.grow()
        return tree.proposal()


def paths_of(proposal: Proposal) -> list[TreePath]:
    tree = proposal.tree
    return [tuple(tree.tokens[step] for step in tree.path(node)) for node in range(len(tree))]


def every_path(setting: Setting) -> dict[TreePath, tuple[float, str]]:
    """Confidence of each path that is worth a row, and who guessed its last token."""
    ngrams = setting.ngrams()
    found: dict[TreePath, tuple[float, str]] = {}

    def search(path: TreePath, reached: float) -> None:
        for token, (probability, member) in guesses(setting, ngrams, path).items():
            if reached * probability >= LEAST_CONFIDENCE:
                found[*path, token] = reached * probability, member
                if len(path) + 1 < setting.depth:
                    search((*path, token), reached * probability)

    if setting.depth:
        search((), 1.0)
    return found


def guesses(
    setting: Setting, ngrams: NgramMember | None, path: TreePath
) -> dict[int, tuple[float, str]]:
    """The likeliest tokens after a path, as many as a node may have children."""
    heard = setting.laws.get(path)
    neural = heard or {}
    suffix: Mapping[int, float] = {}
    table: Mapping[int, float] = {}
    pool = setting.regime.neural
    if ngrams:
        near = ngrams.law(0, (*setting.tokens, *path)[-ORDER:])
        suffix, table = near.suffix, near.table
        pool = (setting.regime.ngram if heard is None else setting.regime.both)[near.order]
    found = {}
    for token in {*suffix, *table, *neural}:
        own = [suffix.get(token, 0.0), table.get(token, 0.0)]
        by_ngrams = sum(own) if sum(own) >= NEGLIGIBLE else 0.0
        if by_ngrams or token in neural:
            other = neural.get(token, 0.0)
            confidence = pool.confidence(by_ngrams, other, len(path))
            member = (SUFFIX if own[0] >= own[1] else TABLE) if ngrams else NEURAL
            found[token] = confidence, NEURAL if other > by_ngrams else member
    best = sorted(found, key=lambda token: (-found[token][0], token))[: setting.children]
    return {token: found[token] for token in best}


TOKEN = st.integers(0, 3)  # few tokens: contexts repeat, and members guess the same ones
TOKENS = st.lists(TOKEN, min_size=1, max_size=12)
POOLS = st.builds(
    Pool,
    bias=st.floats(-1, 1),
    ngram=st.floats(0, 1.2),
    neural=st.floats(0, 1.2),
    farther=st.floats(-0.5, 0.5),
)
REGIMES = st.builds(
    Regime,
    ngram=st.tuples(*[POOLS] * (ORDER + 1)),
    both=st.tuples(*[POOLS] * (ORDER + 1)),
    neural=POOLS,
)
LAWS = st.dictionaries(
    st.lists(TOKEN, max_size=2).map(tuple),
    st.dictionaries(TOKEN, st.floats(0.01, 0.9), min_size=1, max_size=4),
    max_size=6,
)
SETTINGS = st.builds(
    Setting,
    tokens=TOKENS,
    table=st.none() | st.lists(TOKENS, max_size=3),
    regime=REGIMES,
    laws=LAWS,
    budget=st.integers(0, 12),
    depth=st.integers(0, 3),
    children=st.integers(1, 4),
)


@given(SETTINGS)
@settings(max_examples=150)
def test_a_tree_holds_the_likeliest_paths_of_all(setting: Setting) -> None:
    proposal, every = setting.grown(), every_path(setting)
    paths = paths_of(proposal)
    best = sorted((confidence for confidence, _ in every.values()), reverse=True)
    assert sorted(proposal.confidence, reverse=True) == pytest.approx(best[: setting.budget])
    for path, confidence, member in zip(paths, proposal.confidence, proposal.members, strict=True):
        assert confidence == pytest.approx(every[path][0])
        assert member == every[path][1]
    tree = proposal.tree
    assert len(tree) <= setting.budget
    assert tree.gamma <= setting.depth
    assert all(len(tree.children(node)) <= setting.children for node in range(-1, len(tree)))


@given(SETTINGS)
@settings(max_examples=150)
def test_the_neural_member_is_asked_where_the_walk_is_likeliest_to_end(setting: Setting) -> None:
    tree = setting.tree()
    tree.grow()
    proposal = tree.proposal()
    reached = dict(zip(paths_of(proposal), proposal.confidence, strict=True))
    worth = {
        path: confidence * missed(setting, path)
        for path, confidence in ({(): 1.0} | reached).items()
        if path not in setting.laws
        and (not path or path[:-1] in setting.laws)
        and len(path) < setting.depth
        and setting.budget
    }
    best = sorted(worth.values(), reverse=True)[:ROUND_NODES]
    asked = tree.questions(0.0, NEURAL_SHARE)
    enough = ROUND_WORTH / NEURAL_SHARE * SMALL / max(SMALL, setting.budget)
    if sum(best) < enough - 1e-9:
        assert asked == []
    elif sum(best) > enough + 1e-9:
        assert [worth[path] for path in asked] == pytest.approx(best)
        assert len(set(asked)) == len(asked)
    assert setting.tree(neural=False).questions(0.0, NEURAL_SHARE) == []


def missed(setting: Setting, path: TreePath) -> float:
    """Probability that none of the guesses after a path is right."""
    found = guesses(setting, setting.ngrams(), path)
    return max(0.0, 1.0 - sum(confidence for confidence, _ in found.values()))


@given(SETTINGS, st.dictionaries(TOKEN, st.floats(0.01, 0.9), min_size=1), st.data())
def test_what_is_heard_while_it_grows_counts_as_if_it_was_known_before(
    setting: Setting, law: dict[int, float], data: st.DataObject
) -> None:
    """Also where the same node was heard about before: the newest counts."""
    tree = setting.tree()
    tree.grow()
    path = data.draw(st.sampled_from([(), *paths_of(tree.proposal())]))
    tree.hear(path, SparseLaw(tuple(law), tuple(law.values())))
    tree.grow()
    setting.laws = {**setting.laws, path: law}
    assert tree.proposal() == setting.grown()


# -- examples --------------------------------------------------------------------------------------


def children_of(proposal: Proposal, path: TreePath) -> dict[int, str]:
    """Its children, and who guessed them."""
    guessed = zip(paths_of(proposal), proposal.members, strict=True)
    return {below[-1]: member for below, member in guessed if below[:-1] == path}


def test_each_node_is_credited_to_who_gave_it_the_most() -> None:
    setting = Setting(tokens=(1, 2, 1), table=[[1, 5]], laws={(): {7: 0.6, 2: 0.1, 5: 0.05}})
    proposal = setting.grown()
    first = children_of(proposal, ())
    assert first == {2: SUFFIX, 5: TABLE, 7: NEURAL}
    assert children_of(proposal, (2,)) == {1: SUFFIX}
    surer = Setting(tokens=(1, 2, 1), table=[[1, 5]], laws={(): {2: 0.99}})
    assert children_of(surer.grown(), ())[2] == NEURAL


def test_what_two_members_guess_is_one_node_and_likelier_for_it() -> None:
    alone = Setting(laws={(): {9: 0.5}})
    agreed = Setting(laws={(): {2: 0.5}})
    doubted = Setting(laws={(): {9: 0.98}})

    def confidence(setting: Setting) -> float:
        proposal = setting.grown()
        paths = paths_of(proposal)
        assert paths.count((2,)) == 1
        return proposal.confidence[paths.index((2,))]

    assert confidence(agreed) > confidence(alone)
    assert confidence(doubted) == pytest.approx(confidence(alone)), "nobody speaks against a token"


def test_a_longer_match_is_weighed_by_its_own_pool() -> None:
    """Here: after a match of one token believe the neural member, after longer ones the n-grams."""
    sure = tuple(
        Pool(ngram=0.0 if order <= 1 else 1.0, neural=1.0 if order <= 1 else 0.0)
        for order in range(ORDER + 1)
    )
    regime = Regime(ngram=PLAIN.ngram, both=sure, neural=PLAIN.neural)
    law = {(): {8: 0.9}}
    short = Setting(tokens=(1, 2, 3, 1), regime=regime, laws=law).grown()
    long = Setting(tokens=(1, 2, 3, 1, 2), regime=regime, laws=law).grown()
    assert (short.tree.tokens[0], long.tree.tokens[0]) == (8, 3)


def test_children_1_makes_chains() -> None:
    setting = Setting(
        tokens=(1, 2, 1, 3, 1),
        table=[[1, 5, 6, 7], [2, 1]],
        laws={(): {7: 0.4, 2: 0.3}, (2,): {5: 0.5}},
        budget=5,
        children=1,
    )
    tree = setting.grown().tree
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert len(tree) > 1


@pytest.mark.parametrize(
    ("law", "asked"),
    [
        ({5: 0.9, 6: 0.05}, [(5,), (6,)]),
        ({5: 0.16, 6: 0.15}, [(5,), (6,)]),
        ({5: 0.14, 6: 0.15}, []),
        ({t: 0.08 for t in range(5, 15)}, [(t,) for t in range(5, 5 + ROUND_NODES)]),
    ],
)
def test_a_round_of_questions_must_pay(
    monkeypatch: pytest.MonkeyPatch, law: dict[int, float], asked: list[TreePath]
) -> None:
    monkeypatch.setattr(tree_growth, "ROUND_WORTH", NEURAL_SHARE * 0.3 * 20 / SMALL)
    tree = Setting(table=None, laws={(): law}, budget=20, children=99).tree()
    tree.grow()
    assert tree.questions(0.0, NEURAL_SHARE) == asked


@pytest.mark.parametrize(
    ("least", "size"),
    [
        ((0.0,) * 9, 5),
        ((0.0,) * 2, 2),
        ((0.09,) * 9, 3),
        ((0.5, 0.0, 0.0), 0),
        ((0.1, 0.0, 0.1, 0.08, 0.2), 4),  # the third one pays, but only with others behind it
        ((), 0),
    ],
)
def test_with_terms_a_tree_grows_as_far_as_that_pays(least: tuple[float, ...], size: int) -> None:
    likely = {5: 0.3, 6: 0.2, 7: 0.1, 8: 0.08, 9: 0.05}
    setting = Setting(table=None, laws={(): likely}, budget=8, terms=Terms(100.0, least))
    assert setting.grown().tree.tokens == tuple(likely)[:size]


def test_with_terms_a_round_must_bring_what_its_time_is_worth() -> None:
    tree = Setting(table=None, terms=Terms(100.0, (0.0,) * 8)).tree()
    tree.grow()
    break_even = NEURAL_SHARE / 100.0
    assert tree.questions(0.99 * break_even, NEURAL_SHARE) == [()]
    assert tree.questions(1.01 * break_even, NEURAL_SHARE) == []


def test_where_the_ngrams_are_sure_nobody_else_is_asked() -> None:
    certain = Regime(ngram=(Pool(bias=9.0),) * (ORDER + 1), both=PLAIN.both, neural=PLAIN.neural)
    tree = Setting(tokens=(1, 2, 1), regime=certain).tree()
    tree.grow()
    assert tree.questions(0.0, NEURAL_SHARE) == []
    unsure = Setting(tokens=(1, 2, 3)).tree()
    unsure.grow()
    assert unsure.questions(0.0, NEURAL_SHARE) == [()]
    unsure.lose_neural()
    assert unsure.questions(0.0, NEURAL_SHARE) == []


def test_answers_lead_to_questions_about_their_children() -> None:
    tree = Setting(table=None, laws={(): {5: 0.9}}, depth=3).tree()
    for path in ((5,), (5, 5), None):
        tree.grow()
        asked = tree.questions(0.0, NEURAL_SHARE)
        assert asked == ([path] if path else []), "at the deepest level nothing is asked"
        if path:
            tree.hear(path, SparseLaw((5,), (0.9,)))
    assert paths_of(tree.proposal()) == [(5,), (5, 5), (5, 5, 5)]
    assert tree.proposal().confidence == pytest.approx((0.9, 0.81, 0.729))


def test_for_the_ratio_test_guesses_are_a_law() -> None:
    setting = Setting(tokens=(1, 2, 1, 3, 1), table=[[1, 5]])
    growth = PlainGrowth(setting.ngrams(), UNCALIBRATED, children=6)
    tree = growth.tree(DraftRequest(0, 5, 8, 4), neural=False)
    law = tree.law(())
    assert law is not None
    assert sum(law.probs) == pytest.approx(1.0)
    assert set(law.ids) == {2, 3, 5}
    assert law.probs == tuple(sorted(law.probs, reverse=True))
    assert tree.law((9,)) is None


def test_without_anything_to_say_the_tree_is_empty() -> None:
    for setting in (Setting(tokens=(1, 2, 3)), Setting(table=None), Setting(depth=0)):
        assert setting.grown() == Proposal.empty()
    assert len(Setting().grown().tree) > 0


@pytest.mark.skipif(CompiledGrowth is None, reason="nothing is compiled here")
def test_of_long_texts_both_ways_say_the_same() -> None:
    """Longer than what is counted of a context, or than there is room for at first; and of several
    requests in turn.
    """
    generator = random.Random(0)

    def text(length: int) -> list[int]:
        return [min(generator.randrange(40), generator.randrange(40)) for _ in range(length)]

    table = NgramTable.build([text(3 * COUNTED), *(text(50) for _ in range(20))], VOCABULARY, {})
    assert len(table.followers([0])[0].likeliest) == LIKELIEST
    member = NgramMember(table)
    lengths = (1, 7, 40, 700, 3000)
    for sequence, length in enumerate(lengths):
        member.commit(DraftUpdate(sequence, 0, tuple(text(length))))
    plain, compiled = (
        growth(member, UNCALIBRATED, children=6) for growth in (PlainGrowth, CompiledGrowth)
    )
    for _ in range(2):
        for sequence, length in enumerate(lengths):
            request = DraftRequest(sequence, length, 24, 6)
            while not plain.ready(request):
                pass
            trees = [growth.tree(request, neural=True) for growth in (plain, compiled)]
            for tree in trees:
                tree.grow()
            ours, theirs = (tree.proposal() for tree in trees)
            assert ours.tree == theirs.tree
            assert ours.members == theirs.members
            assert ours.confidence == pytest.approx(theirs.confidence)
            assert trees[0].questions(0.0, NEURAL_SHARE) == trees[1].questions(0.0, NEURAL_SHARE)
