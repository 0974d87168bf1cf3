"""Drafts of one or two kinds of members: who is asked what, who stands in, how they are loaded."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from tests.eagles import (
    LAYERS,
    attentive_eagle,
    save_tiny_eagle,
    some_features,
    some_tokens,
    tiny_eagle,
    trained_law,
)
from workers import eagle_member, tree_growth
from workers.calibration import CALIBRATION, UNCALIBRATED, Calibration, Pool, Regime
from workers.draft import DraftKind, DraftRequest, DraftSpec, DraftUpdate, Features
from workers.eagle_member import EagleMember
from workers.engine.eagle import EagleModel
from workers.engine.eagle_batch import LIKELIEST
from workers.engine.vocabulary import Vocabulary, vocabulary_of
from workers.hybrid_draft import HybridDraft, Rounds, kind_of
from workers.load_draft import load_draft
from workers.ngram_member import NgramMember
from workers.speculation.tree import Proposal, SparseLaw
from workers.training.ngram_table import ORDER, NgramTable
from workers.tree_growth import NEURAL, NEURAL_SHARE, SUFFIX, GrowingTree

pytestmark = pytest.mark.usefixtures("single_thread")

TOKENS = (*some_tokens(8), *some_tokens(8)[:5])  # the n-grams have seen this before
FEATURES = some_features(40)
# Where both are heard, one alone is believed as well; n-grams alone are never sure.
PLAIN = UNCALIBRATED.at(0.0)
NGRAM = (Pool(bias=-1.0, ngram=0.5),) * (ORDER + 1)
BOTH = (Pool(bias=2.0, ngram=0.5, neural=0.5),) * (ORDER + 1)
TRUSTING = Calibration({0.0: Regime(NGRAM, BOTH, PLAIN.neural)})


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> EagleModel:
    return attentive_eagle(tiny_folder)


def hybrid(model: EagleModel, *, ngram: bool = True, children: int = 6) -> HybridDraft:
    member = NgramMember(None) if ngram else None
    return HybridDraft("d", member, EagleMember(model), TRUSTING, children=children)


def tell(
    draft: HybridDraft,
    tokens: Sequence[int] = TOKENS,
    features: Tensor | None = FEATURES,
    sequence: int = 0,
) -> None:
    draft.commit([DraftUpdate(sequence, 0, tuple(tokens))])
    if features is not None:
        told = Features(0, LAYERS, features[: len(tokens) - 1])
        draft.commit([DraftUpdate(sequence, len(tokens), (), told)])


def ask(draft: HybridDraft, length: int = len(TOKENS), sequence: int = 0) -> Proposal | None:
    (answer,) = draft.propose([DraftRequest(sequence, length, budget=24, depth=6)])
    return answer


def proposed(draft: HybridDraft, length: int = len(TOKENS), sequence: int = 0) -> Proposal:
    answer = ask(draft, length, sequence)
    assert answer is not None
    return answer


# -- its guesses -----------------------------------------------------------------------------------


def expected(model: EagleModel, ngram: NgramMember | None) -> tuple[Proposal, int]:
    """The tree that grows on what training made the model say, and in how many rounds."""
    own = model.vocabulary.tolist()

    def law(path: tuple[int, ...]) -> SparseLaw:
        top = trained_law(model, TOKENS, FEATURES, path).topk(LIKELIEST)
        ids = tuple(own[place] for place in top.indices.tolist())
        return SparseLaw(ids, tuple(top.values.tolist()))

    request = DraftRequest(0, len(TOKENS), budget=24, depth=6)
    tree = GrowingTree(request, ngram, TRUSTING.at(0.0), children=6, neural=True)
    asked, rounds = [()], 0
    while asked:
        for path in asked:
            tree.hear(path, law(path))
        tree.grow()
        asked, rounds = tree.questions(0.0, NEURAL_SHARE), rounds + 1
    return tree.proposal(), rounds


@pytest.mark.parametrize("ngram", [False, True])
def test_its_tree_grows_on_what_its_members_say_of_each_node(
    model: EagleModel, ngram: bool
) -> None:
    """The neural one in as many rounds as pay."""
    draft = hybrid(model, ngram=ngram)
    tell(draft)
    proposal = proposed(draft)
    member = NgramMember(None) if ngram else None
    if member:
        member.commit(DraftUpdate(0, 0, TOKENS))
        assert member.catch_up(0)
    whole, rounds = expected(model, member)
    assert rounds > 2
    assert proposal.tree == whole.tree
    assert proposal.members == whole.members
    assert proposal.confidence == pytest.approx(whole.confidence, rel=1e-3)
    assert set(proposal.members) == ({SUFFIX, NEURAL} if ngram else {NEURAL})


def test_features_that_nobody_asks_for_do_not_pile_up(
    model: EagleModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(40)
    draft = hybrid(model)
    tell(draft, tokens[:3])
    with monkeypatch.context() as patch:
        patch.setattr(tree_growth, "ROUND_WORTH", 1e9)
        patch.setattr(eagle_member, "CATCH_UP", 4)
        for known in range(3, 30):
            run = Features(known - 1, LAYERS, FEATURES[known - 1 : known])
            draft.commit([DraftUpdate(0, known, (tokens[known],), run)])
            assert NEURAL not in proposed(draft, known + 1).members
            assert draft._eagle is not None
            assert draft._eagle._followed[0].waiting <= 4
    assert NEURAL in proposed(draft, 30).members


def test_sequences_asked_together_get_what_each_gets_alone(model: EagleModel) -> None:
    texts = [(TOKENS, FEATURES), (some_tokens(3, 5), some_features(3, 5)), (TOKENS[:9], FEATURES)]
    alone = []
    for tokens, features in texts:
        draft = hybrid(model)
        tell(draft, tokens, features)
        alone.append(proposed(draft, len(tokens)))
    draft = hybrid(model)
    for number, (tokens, features) in enumerate(texts):
        tell(draft, tokens, features, number)
    requests = [DraftRequest(number, len(text[0]), 24, 6) for number, text in enumerate(texts)]
    unknown = DraftRequest(77, 3, 24, 6)
    *together, nothing = draft.propose([*requests, unknown])
    assert nothing is None
    for one, other in zip(together, alone, strict=True):
        assert one is not None
        assert one.tree == other.tree
        assert one.members == other.members
        assert one.confidence == pytest.approx(other.confidence, rel=1e-4)


def test_the_tree_is_no_larger_than_asked_for(model: EagleModel) -> None:
    draft = hybrid(model, children=2)
    tell(draft)
    for budget, depth in ((0, 4), (1, 4), (7, 2), (30, 9)):
        (answer,) = draft.propose([DraftRequest(0, len(TOKENS), budget, depth)])
        assert answer is not None
        tree = answer.tree
        assert len(tree) <= budget
        assert tree.gamma <= depth
        assert all(len(tree.children(node)) <= 2 for node in range(-1, len(tree)))


@pytest.mark.parametrize("ngram", [False, True])
def test_with_one_child_a_node_the_tree_is_a_chain(model: EagleModel, ngram: bool) -> None:
    draft = hybrid(model, ngram=ngram, children=1)
    tell(draft)
    tree = proposed(draft).tree
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    assert len(tree) > 1


# -- who stands in ---------------------------------------------------------------------------------


def test_while_hidden_states_are_missing_the_n_grams_guess_alone(model: EagleModel) -> None:
    draft, plain = hybrid(model), HybridDraft("n", NgramMember(None), None, TRUSTING)
    tell(plain, features=None)
    tell(draft, features=None)
    alone = proposed(draft)
    assert alone == proposed(plain)
    assert set(alone.members) == {SUFFIX}
    early = Features(0, LAYERS, FEATURES[:5])
    draft.commit([DraftUpdate(0, len(TOKENS), (), early)])
    assert proposed(draft) == alone
    rest = Features(5, LAYERS, FEATURES[5 : len(TOKENS) - 1])
    draft.commit([DraftUpdate(0, len(TOKENS), (), rest)])
    assert NEURAL in proposed(draft).members


def test_an_eagle_alone_then_guesses_nothing(model: EagleModel) -> None:
    draft = hybrid(model, ngram=False)
    tell(draft, features=None)
    assert ask(draft) == Proposal.empty()


@pytest.mark.parametrize("ngram", [False, True])
def test_it_guesses_only_for_what_it_knows_exactly(model: EagleModel, ngram: bool) -> None:
    draft = hybrid(model, ngram=ngram)
    assert ask(draft) is None
    tell(draft)
    assert ask(draft) is not None
    assert ask(draft, len(TOKENS) + 1) is None
    draft.commit([DraftUpdate(0, len(TOKENS) + 1, (3,))])  # something was missed
    assert ask(draft, len(TOKENS) + 2) is None
    assert ask(draft) is not None
    draft.forget([0, 9])
    assert ask(draft) is None


# -- its calibration -------------------------------------------------------------------------------


def test_a_request_is_served_by_the_regime_of_its_temperature(model: EagleModel) -> None:
    """The hot one believes nobody."""
    nothing = (Pool(bias=-9.0),) * (ORDER + 1)
    calibration = Calibration({0.0: PLAIN, 1.0: Regime(nothing, nothing, nothing[0])})
    draft = HybridDraft("d", NgramMember(None), EagleMember(model), calibration)
    tell(draft)
    for temperature, empty in ((0.0, False), (0.4, False), (0.6, True), (1.2, True)):
        request = DraftRequest(0, len(TOKENS), 8, 4, temperature=temperature)
        (answer,) = draft.propose([request])
        assert (answer == Proposal.empty()) == empty


# -- loading ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A hybrid as it is made: a folder for each member, each with a calibration of its own."""
    save_tiny_eagle(tiny_eagle(tiny_folder), tmp_path / "eagle", tiny_folder)
    NgramTable.build([[1, 2, 3]], vocabulary_of(tiny_folder), {}).save(tmp_path / "ngram")
    TRUSTING.save(tmp_path)
    UNCALIBRATED.save(tmp_path / "eagle")
    return tmp_path


def load(kind: DraftKind, path: Path, target: Path, **fields: int) -> HybridDraft:
    draft = load_draft(DraftSpec("d", kind, path=str(path), **fields), target)
    assert isinstance(draft, HybridDraft)
    return draft


def test_a_hybrid_and_each_of_its_members_is_a_draft(folder: Path, tiny_folder: Path) -> None:
    found = {}
    for kind, own in (
        ("hybrid", folder),
        ("ngram", folder / "ngram"),
        ("eagle", folder / "eagle"),
    ):
        draft = load(kind, own, tiny_folder)
        assert draft.name == "d"
        assert kind_of(own) == kind
        tell(draft)
        tell(draft, (1,), None, sequence=1)
        found[kind] = {*proposed(draft).members}, proposed(draft, 1, 1).tree.tokens
    assert found["ngram"] == ({SUFFIX}, (2, 3))
    assert found["eagle"] == ({NEURAL}, ())
    assert found["hybrid"] == ({SUFFIX, NEURAL}, (2, 3))


def test_its_number_of_children_is_the_specs(folder: Path, tiny_folder: Path) -> None:
    for children in (1, 3):
        draft = load("eagle", folder / "eagle", tiny_folder, children=children)
        tell(draft)
        tree = proposed(draft).tree
        assert max(len(tree.children(node)) for node in range(-1, len(tree))) == children


def test_its_calibration_is_the_folders_own(folder: Path, tiny_folder: Path) -> None:
    """A hybrid's lies beside its members; one that a table was not given is done without."""
    nothing = (Pool(bias=-9.0),) * (ORDER + 1)
    Calibration({0.0: Regime(nothing, nothing, nothing[0])}).save(folder)
    draft = load("hybrid", folder, tiny_folder)
    tell(draft)
    assert ask(draft) == Proposal.empty()
    draft = load("eagle", folder / "eagle", tiny_folder)
    tell(draft)
    assert ask(draft) != Proposal.empty()
    (folder / CALIBRATION).rename(folder / "ngram" / CALIBRATION)
    draft = load("ngram", folder / "ngram", tiny_folder)
    tell(draft)
    assert ask(draft) == Proposal.empty()
    with pytest.raises(ValueError, match="is no calibration"):
        load("hybrid", folder, tiny_folder)


def test_what_was_made_for_another_target_is_refused(
    folder: Path, tiny_folder: Path, stranger_folder: Path, tmp_path: Path
) -> None:
    for kind, own in (("hybrid", folder), ("eagle", folder / "eagle")):
        with pytest.raises(ValueError, match=r"^drafts\.d: was made for the target 'tiny'"):
            load(kind, own, stranger_folder)
    size = vocabulary_of(tiny_folder).size
    NgramTable.build([[1, 2]], Vocabulary(size, "another"), {}).save(folder / "ngram")
    with pytest.raises(ValueError, match=r"^drafts\.d: its vocabulary .* is not the target's"):
        load("hybrid", folder, tiny_folder)


def test_a_folder_says_what_kind_of_draft_it_holds(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    assert kind_of(tiny_folder) == "lm"
    assert kind_of(tmp_path / "nothing") is None
    assert kind_of(folder / "eagle") == "eagle"
    assert kind_of(folder) == "hybrid"


class Asked(GrowingTree):
    """A tree that a round makes worth more by `brings`, where `hoped` was hoped for."""

    def __init__(self, hoped: float, brings: float) -> None:
        self.hoped = hoped
        self.worth = lambda: brings  # type: ignore[method-assign]


def test_what_rounds_bring_of_what_is_hoped_is_learned_and_doubted_again() -> None:
    rounds = Rounds()
    assert rounds.share == NEURAL_SHARE
    for _ in range(200):
        rounds.learn([Asked(2.0, 1.3), Asked(1.0, 0.3)], [1.0, 0.0], 0.004)
    assert rounds.share == pytest.approx(0.2, rel=0.1)
    assert rounds.seconds == pytest.approx(0.002)
    for _ in range(40):
        rounds.forget()
    assert 0.22 < rounds.share < 0.3
    for _ in range(2000):
        rounds.forget()
    assert rounds.share == pytest.approx(NEURAL_SHARE, rel=0.01)
    assert rounds.seconds < 0.0001


def test_one_round_that_takes_long_is_not_taken_for_the_rule() -> None:
    rounds = Rounds()
    rounds.learn([Asked(1.0, 0.5)], [0.0], 0.001)
    rounds.learn([Asked(1.0, 0.5)], [0.0], 5.0)
    assert 0.001 < rounds.seconds < 0.0011
