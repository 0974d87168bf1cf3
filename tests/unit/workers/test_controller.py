"""How much is verified, against a search of all there is to choose; and who is left alone."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workers.budget import WIDEST
from workers.controller import _LONGEST_PAUSE, _WATCHED, Controller, Step
from workers.pass_costs import PassCosts
from workers.speculation.tree import Proposal, TokenTree

FLAT_THEN_STEEP = {1: 8e-3, 6: 8.5e-3, 7: 11e-3, 12: 12e-3, 40: 40e-3}
COSTS = st.lists(st.floats(1e-4, 5e-3), min_size=12, max_size=12).map(
    lambda steps: {n: 5e-3 + sum(steps[:n]) for n in range(1, 13)}
)


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Any tree, whose nodes are as likely as their parents at most."""
    parents: list[int] = []
    confidence: list[float] = []
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, node - 1))
        parents.append(parent)
        reached = 1.0 if parent < 0 else confidence[parent]
        confidence.append(reached * draw(st.floats(0.01, 1)))
    assume(len(set(confidence)) == len(confidence))  # of equals, all are verified or none
    tree = TokenTree.from_nodes(range(len(parents)), parents)
    return Proposal(tree, tuple(confidence[token] for token in tree.tokens))


def chain(*confidence: float) -> Proposal:
    return Proposal(TokenTree.chain(range(len(confidence))), confidence)


def step_of(said: dict[int, int], own: dict[int, Proposal] | None = None, **changes: float) -> Step:
    """One in which as much time went as `FLAT_THEN_STEEP` says."""
    own = own or {}
    rows = len(said) + sum(len(proposal.tree) for proposal in own.values())
    times = {"draft_s": 0.5e-3, "rest_s": PassCosts(FLAT_THEN_STEEP).at(rows)} | changes
    return Step(rows=rows, said=said, proposals=own, prefill=False, **times)


@given(COSTS, st.dictionaries(st.integers(0, 3), proposals(), min_size=1), st.integers(0, 3))
def test_of_all_nodes_those_are_verified_that_bring_most_for_their_time(
    costs: dict[int, float], own: dict[int, Proposal], more: int
) -> None:
    assume(
        len({c for p in own.values() for c in p.confidence})
        == sum(len(p.tree) for p in own.values())
    )
    controller, sequences = Controller(PassCosts(costs)), len(own)
    rows = sequences + more
    price, curve = controller.price(sequences), PassCosts(costs)
    likely = sorted((c for p in own.values() for c in p.confidence), reverse=True)
    best = max(
        sum(likely[:nodes]) - price * curve.at(rows + nodes) for nodes in range(len(likely) + 1)
    )
    cut = controller.cut(own, sequences, rows)
    nodes = sum(len(p.tree) for p in cut.values())
    worth = sum(c for p in cut.values() for c in p.confidence) - price * curve.at(rows + nodes)
    assert worth == pytest.approx(best)
    assert cut.keys() == own.keys()


@given(COSTS, st.lists(st.floats(0.001, 1), max_size=WIDEST + 4, unique=True))
def test_no_draft_leaves_out_what_would_be_verified(
    costs: dict[int, float], confidence: list[float]
) -> None:
    controller = Controller(PassCosts(costs))
    likely, least = sorted(confidence, reverse=True), controller.terms(1).least
    grown = 0
    while grown < min(len(likely), len(least)) and likely[grown] >= least[grown]:
        grown += 1
    verified = controller.cut({0: chain(*likely[:WIDEST])}, 1, 1)[0]
    assert grown >= len(verified.tree) or likely[grown] == pytest.approx(least[grown])  # rounding


@given(COSTS)
def test_a_node_must_pay_alone_or_with_some_behind_it(costs: dict[int, float]) -> None:
    controller, curve = Controller(PassCosts(costs)), PassCosts(costs)
    price, least = controller.price(1), controller.terms(1).least
    assert len(least) == WIDEST
    for nodes, own in enumerate(least):
        ways = [
            price * (curve.at(1 + more) - curve.at(1 + nodes)) / (more - nodes)
            for more in range(nodes + 1, WIDEST + 1)
        ]
        assert own == pytest.approx(min(ways))


def test_the_price_of_time_is_what_steps_bring() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    assert controller.price(1) == pytest.approx(1 / 8e-3), "as plain decoding, to begin with"
    assert controller.price(4) == pytest.approx(4 / 8.3e-3)
    for _ in range(200):
        controller.asks(0)
        controller.learn(step_of({0: 3}, {0: chain(0.9, 0.8)}))
    assert controller.price(1) == pytest.approx(3 / (8.2e-3 + 0.5e-3), rel=0.01)


def test_the_dearer_time_is_the_fewer_nodes_pay() -> None:
    controller = Controller(PassCosts({1: 8e-3, 60: 20e-3}))
    own = {0: chain(*(0.8**n for n in range(1, 12)))}
    alone = controller.cut(own, 1, 1)[0]
    beside_many = controller.cut(own, 20, 20)[0]
    assert len(alone.tree) > len(beside_many.tree) > 0


def test_steps_that_read_prompts_tell_nothing_of_what_guesses_bring() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    own = Step(rows=30, draft_s=0.1, rest_s=1.0, said={0: 9}, proposals={}, prefill=True)
    controller.asks(0)
    controller.learn(own)
    assert controller.price(1) == pytest.approx(1 / controller._costs.at(1))


def asked_in(controller: Controller, steps: int, said: int, own: Proposal) -> list[bool]:
    """In which of some steps a draft is asked, where the target says so much in each of these."""
    found = []
    for _ in range(steps):
        found.append(controller.asks(0))
        mine = {0: own} if found[-1] else {}
        controller.learn(step_of({0: said if mine else 1}, mine))
    return found


def test_who_guesses_in_vain_is_left_alone_and_tried_again_ever_less_often() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    asked = asked_in(controller, 400, said=1, own=chain(0.02))
    assert asked.index(False) == _WATCHED
    pauses = [len(run) for run in "".join(".x"[own] for own in asked).split("x") if run]
    assert pauses[:4] == [4, 8, 16, 32]
    assert max(pauses) == _LONGEST_PAUSE


def test_neither_does_it_help_to_boast() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    assert asked_in(controller, 400, said=1, own=chain(0.9)).index(False) < 4 * _WATCHED


def test_who_guesses_well_is_asked_at_every_step() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    assert all(asked_in(controller, 200, said=3, own=chain(0.9, 0.8)))


def test_who_was_left_alone_recovers() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    asked_in(controller, 300, said=1, own=chain(0.02))
    asked_in(controller, 2 * (_LONGEST_PAUSE + _WATCHED), said=3, own=chain(0.9, 0.8))
    assert all(asked_in(controller, 100, said=3, own=chain(0.9, 0.8)))


def test_a_draft_that_boasts_is_believed_less() -> None:
    controller = Controller(PassCosts({1: 8e-3, 60: 67e-3}))
    boast = chain(0.9, 0.8, 0.7, 0.6, 0.5)
    before = controller.cut({0: boast}, 1, 1)[0]
    for _ in range(10):
        controller.asks(0)
        controller.learn(step_of({0: 1}, {0: boast}))
    assert len(controller.cut({0: boast}, 1, 1)[0].tree) < len(before.tree)


def test_a_sequence_that_is_over_leaves_nothing_behind() -> None:
    controller = Controller(PassCosts(FLAT_THEN_STEEP))
    asked_in(controller, 100, said=1, own=chain(0.02))
    controller.forget(0)
    controller.forget(7)
    assert controller.asks(0)
    controller.forget(0)
    controller.learn(step_of({0: 1}))  # it ended within the step
    assert not controller._habits
