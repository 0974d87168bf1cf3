"""The neural member says what it was trained to say, in any company and after any history.

The oracle is training's own unroll, one text and one path at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.eagles import (
    LAYERS,
    attentive_eagle,
    some_features,
    some_tokens,
    trained_law,
)
from workers import eagle_member
from workers.draft import DraftUpdate, Features
from workers.eagle_member import EagleMember
from workers.engine import eagle_pass, pass_work
from workers.engine.eagle import EagleModel
from workers.engine.eagle_batch import LIKELIEST
from workers.engine.eagle_pass import NewRows, Told
from workers.engine.eagle_store import _FIRST_BLOCKS, BLOCK_SLOTS
from workers.speculation.tree import SparseLaw
from workers.tree_growth import TreePath as Tokens

pytestmark = pytest.mark.usefixtures("single_thread")

TOKENS, FEATURES = some_tokens(24), some_features(24)
OTHER_TOKENS, OTHER_FEATURES = some_tokens(24, seed=1), some_features(24, seed=1)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> EagleModel:
    return attentive_eagle(tiny_folder)


@pytest.fixture(scope="module", params=["compiled", "torch"], autouse=True)
def compute(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with both, where there are both."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(eagle_pass, "can_compile", lambda model: False)
        elif not pass_work.COMPILES:
            pytest.skip("nothing is compiled here")
        yield


@pytest.fixture
def member(model: EagleModel) -> EagleMember:
    return EagleMember(model)


def told(start: int, values: Tensor) -> Features:
    return Features(start, LAYERS, values)


def tell(member: EagleMember, tokens: Sequence[int], features: Tensor, sequence: int = 0) -> None:
    """A sequence from its beginning, with the features of all its tokens but the last."""
    member.commit(DraftUpdate(sequence, 0, tuple(tokens)))
    last = len(tokens) - 1
    member.commit(DraftUpdate(sequence, len(tokens), (), told(0, features[:last])))


def root(member: EagleMember, sequence: int = 0) -> SparseLaw:
    return member.catch_up([sequence])[sequence]


def check(model: EagleModel, law: SparseLaw, expected: Tensor) -> None:
    """The head of a law over the draft's tokens, likeliest first, by the target's ids."""
    best = expected.topk(LIKELIEST)
    assert law.probs == pytest.approx(best.values.tolist(), rel=1e-3)
    place = {token: own for own, token in enumerate(model.vocabulary.tolist())}
    own = [float(expected[place[token]]) for token in law.ids]
    assert law.probs == pytest.approx(own, rel=1e-3)
    assert len(set(law.ids)) == LIKELIEST


def same(one: SparseLaw, other: SparseLaw) -> bool:
    return one.ids == other.ids and one.probs == pytest.approx(other.probs, rel=1e-4)


# -- what it says ----------------------------------------------------------------------------------


def test_as_the_answer_grows_it_says_what_training_saw(
    model: EagleModel, member: EagleMember
) -> None:
    """A prompt in two chunks, then steps of one to four tokens, each with guesses asked before it,
    the right one and wrong ones, level by level.
    """
    known = 6
    member.commit(DraftUpdate(0, 0, TOKENS[:known]))
    member.commit(DraftUpdate(0, known, (), told(0, FEATURES[:3])))
    member.commit(DraftUpdate(0, known, (), told(3, FEATURES[3 : known - 1])))
    for said in (1, 4, 2, 3, 1):
        check(model, root(member), trained_law(model, TOKENS[:known], FEATURES, ()))
        for depth in range(1, 4):
            right = TOKENS[known : known + depth]
            paths = [right, (*right[:-1], 7), (*right[:-1], 8)]
            (laws,) = member.ask([(0, paths)])
            for path, law in zip(paths, laws, strict=True):
                check(model, law, trained_law(model, TOKENS[:known], FEATURES, path))
        new = TOKENS[known : known + said]
        run = FEATURES[known - 1 : known - 1 + said]
        member.commit(DraftUpdate(0, known, new, told(known - 1, run)))
        known += said
        assert member.length(0) == known


TOKEN = st.integers(0, 272)


@st.composite
def trees(draw: st.DrawFn) -> list[Tokens]:
    """Paths of a tree, parents first, of at most three levels of tokens from a few."""
    paths: list[Tokens] = [()]
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([path for path in paths if len(path) < 3]))
        child = (*parent, draw(st.integers(40, 43)))
        if child not in paths:
            paths.append(child)
    return paths[1:]


SEQUENCES = st.lists(
    st.tuples(st.integers(2, 24), st.integers(0, 3), trees()), min_size=1, max_size=3
)


@given(SEQUENCES)
@settings(max_examples=25)
def test_any_trees_of_any_sequences_asked_together_are_as_each_path_alone(
    model: EagleModel, sequences: list[tuple[int, int, list[Tokens]]]
) -> None:
    member = EagleMember(model)
    for number, (length, seed, _) in enumerate(sequences):
        tell(member, some_tokens(length, seed), some_features(length, seed), number)
    roots = member.catch_up(range(len(sequences)))
    for number, (length, seed, _) in enumerate(sequences):
        tokens, features = some_tokens(length, seed), some_features(length, seed)
        check(model, roots[number], trained_law(model, tokens, features, ()))
    for depth in range(1, 4):
        levels = [[path for path in tree if len(path) == depth] for _, _, tree in sequences]
        asked = [(number, level) for number, level in enumerate(levels) if level]
        for (number, paths), laws in zip(asked, member.ask(asked), strict=True):
            length, seed, _ = sequences[number]
            tokens, features = some_tokens(length, seed), some_features(length, seed)
            for path, law in zip(paths, laws, strict=True):
                check(model, law, trained_law(model, tokens, features, path))


def test_a_level_may_be_asked_for_in_several_rounds(model: EagleModel, member: EagleMember) -> None:
    tell(member, TOKENS, FEATURES)
    root(member)
    for paths in ([(5,)], [(6,), (5, 7)], [(5, 8), (6, 7), (5, 7, 9)], [(8,)]):
        (laws,) = member.ask([(0, paths)])
        for path, law in zip(paths, laws, strict=True):
            check(model, law, trained_law(model, TOKENS, FEATURES, path))


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=15)
def test_features_in_pieces_are_as_features_at_once(
    model: EagleModel, pieces: list[tuple[int, bool]]
) -> None:
    """It may be asked between any two of them."""
    member, whole = EagleMember(model), EagleMember(model)
    tell(whole, TOKENS, FEATURES)
    member.commit(DraftUpdate(0, 0, TOKENS))
    start, last = 0, len(TOKENS) - 1
    for size, asked in [*pieces, (last, False)]:
        values = FEATURES[start : min(start + size, last)]
        if asked and start < last:
            assert member.catch_up([0]) == {}
        member.commit(DraftUpdate(0, len(TOKENS), (), told(start, values)))
        start += len(values)
    assert same(root(member), root(whole))


def test_of_many_layers_it_reads_its_own(model: EagleModel, member: EagleMember) -> None:
    """A target shows every layer that some draft reads."""
    extra = some_features(23, seed=5, layers=1)
    wide = torch.cat([extra, FEATURES[:23, :1], extra, FEATURES[:23, 1:]], 1)
    member.commit(DraftUpdate(0, 0, TOKENS))
    member.commit(DraftUpdate(0, 24, (), Features(0, (0, LAYERS[0], 7, LAYERS[1]), wide)))
    check(model, root(member), trained_law(model, TOKENS, FEATURES, ()))
    with pytest.raises(ValueError, match="not in tuple"):
        member.commit(DraftUpdate(0, 24, (), Features(23, (5,), extra[:1])))


def test_an_answer_may_grow_far_beyond_its_first_slots(
    model: EagleModel, member: EagleMember
) -> None:
    """The tree's nodes and the pairs behind them find room as well."""
    length = _FIRST_BLOCKS * BLOCK_SLOTS + 2
    tokens, features = some_tokens(3 * length), some_features(3 * length)
    tell(member, tokens[: length - 3], features)
    for known in (length - 3, length, 3 * length):
        start = member.length(0)
        if known > start:
            run = told(start - 1, features[start - 1 : known - 1])
            member.commit(DraftUpdate(0, start, tokens[start:known], run))
        while not (law := member.catch_up([0]).get(0)):
            pass
        check(model, law, trained_law(model, tokens[:known], features, ()))
        (laws,) = member.ask([(0, [(5,), (6,), (7,)])])
        (deeper,) = member.ask([(0, [(6, 8)])])
        check(model, laws[2], trained_law(model, tokens[:known], features, (7,)))
        check(model, deeper[0], trained_law(model, tokens[:known], features, (6, 8)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_target_of_any_dtype_can_be_read(
    model: EagleModel, member: EagleMember, dtype: torch.dtype
) -> None:
    tell(member, TOKENS, FEATURES.to(dtype))
    check(model, root(member), trained_law(model, TOKENS, FEATURES.to(dtype).float(), ()))


# -- what it knows ---------------------------------------------------------------------------------


def test_without_the_features_of_what_was_said_it_says_nothing(
    model: EagleModel, member: EagleMember
) -> None:
    member.commit(DraftUpdate(0, 0, TOKENS[:6]))
    tell(member, OTHER_TOKENS[:9], OTHER_FEATURES, sequence=1)
    assert member.length(0) == 6
    assert member.catch_up([0, 1]).keys() == {1}
    member.commit(DraftUpdate(0, 6, (), told(0, FEATURES[:4])))
    assert member.catch_up([0, 1]).keys() == {1}, "one is missing"
    member.commit(DraftUpdate(0, 6, (), told(4, FEATURES[4:5])))
    check(model, root(member), trained_law(model, TOKENS[:6], FEATURES, ()))
    member.commit(DraftUpdate(0, 6, TOKENS[6:8]))
    assert member.catch_up([0]) == {}
    member.commit(DraftUpdate(0, 8, (), told(5, FEATURES[5:7])))
    check(model, root(member), trained_law(model, TOKENS[:8], FEATURES, ()))


@pytest.mark.parametrize("before", [0, 4, 9])
def test_after_a_gap_it_starts_anew_from_where_the_features_go_on(
    model: EagleModel, member: EagleMember, before: int
) -> None:
    """As after a restart, when it is told all tokens, and features from the next pass on only."""
    member.commit(DraftUpdate(0, 0, TOKENS[:10]))
    if before:
        member.commit(DraftUpdate(0, 10, (), told(0, FEATURES[:before])))
    if before == 9:
        root(member)
        member.ask([(0, [(5,)])])
    member.commit(DraftUpdate(0, 10, TOKENS[10:14]))
    member.commit(DraftUpdate(0, 14, TOKENS[14:15], told(13, FEATURES[13:14])))
    for known in range(15, 24):
        check(model, root(member), trained_law(model, TOKENS[13:known], FEATURES[13:], ()))
        path = TOKENS[known : known + 1]
        (laws,) = member.ask([(0, [path])])
        check(model, laws[0], trained_law(model, TOKENS[13:known], FEATURES[13:], path))
        run = told(known - 1, FEATURES[known - 1 : known])
        member.commit(DraftUpdate(0, known, path, run))
    late = EagleMember(model)
    late.commit(DraftUpdate(0, 0, TOKENS))
    late.commit(DraftUpdate(0, 24, (), told(13, FEATURES[13:23])))
    assert same(root(member), root(late))


def test_an_update_that_does_not_fit_is_ignored_with_its_features(
    model: EagleModel, member: EagleMember
) -> None:
    tell(member, TOKENS[:6], FEATURES)
    member.commit(DraftUpdate(0, 7, (9,), told(5, OTHER_FEATURES[:2])))
    member.commit(DraftUpdate(3, 7, (9,), told(5, OTHER_FEATURES[:2])))
    assert (member.length(0), member.length(3)) == (6, 0)
    check(model, root(member), trained_law(model, TOKENS[:6], FEATURES, ()))


def again_from_0(member: EagleMember) -> None:
    tell(member, OTHER_TOKENS, OTHER_FEATURES)


def forgotten(member: EagleMember) -> None:
    member.forget(0)
    assert member.length(0) == 0
    tell(member, OTHER_TOKENS, OTHER_FEATURES)


@pytest.mark.parametrize("begin_anew", [again_from_0, forgotten])
@pytest.mark.parametrize("used", [False, True])
def test_begun_anew_it_remembers_nothing(
    model: EagleModel,
    member: EagleMember,
    begin_anew: Callable[[EagleMember], None],
    used: bool,
) -> None:
    tell(member, TOKENS, FEATURES)
    if used:
        root(member)
        member.ask([(0, [(5,), (6,)])])
    begin_anew(member)
    check(model, root(member), trained_law(model, OTHER_TOKENS, OTHER_FEATURES, ()))


def test_what_is_forgotten_leaves_its_place_to_others(model: EagleModel) -> None:
    """Sequences come and go, some begun anew, and the store has grown once and for all."""
    member = EagleMember(model)
    store = member._pass._store
    for turn in range(3):
        for sequence in range(_FIRST_BLOCKS + 1):
            tell(member, TOKENS, FEATURES, sequence)
            check(model, root(member, sequence), trained_law(model, TOKENS, FEATURES, ()))
            if sequence % 2:
                tell(member, OTHER_TOKENS, OTHER_FEATURES, sequence)
                law = root(member, sequence)
                check(model, law, trained_law(model, OTHER_TOKENS, OTHER_FEATURES, ()))
        for sequence in range(turn, _FIRST_BLOCKS + 1):
            member.forget(sequence)
    for sequence in range(2):
        member.forget(sequence)
    assert len(store.keys) == 2 * _FIRST_BLOCKS * BLOCK_SLOTS
    assert sorted(store._free) == list(range(2 * _FIRST_BLOCKS))


def test_forgetting_the_unknown_is_no_error_and_costs_nobody_anything(member: EagleMember) -> None:
    tell(member, TOKENS, FEATURES, sequence=1)
    law = root(member, 1)
    member.forget(0)
    member.forget(77)
    assert root(member, 1) == law


def test_a_long_prompt_is_taken_in_in_pieces_and_the_others_do_not_wait(
    model: EagleModel, member: EagleMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_member, "CATCH_UP", 10)
    tell(member, TOKENS, FEATURES, 0)
    tell(member, OTHER_TOKENS[:5], OTHER_FEATURES, 1)
    known = [member.catch_up([0, 1]).keys() for _ in range(3)]
    assert known == [{1}, {1}, {0, 1}]
    check(model, root(member), trained_law(model, TOKENS, FEATURES, ()))


def test_several_long_prompts_share_what_a_call_takes_in(
    model: EagleModel, member: EagleMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_member, "CATCH_UP", 10)
    for sequence in range(3):
        tell(member, TOKENS, FEATURES, sequence)
    rows: list[int] = []
    run = member._pass.run

    def counting(own: Sequence[NewRows], *, fuse: bool) -> list[Told]:
        rows.append(sum(len(one.tokens) for one in own))
        return run(own, fuse=fuse)

    monkeypatch.setattr(member._pass, "run", counting)
    while len(laws := member.catch_up(range(3))) < 3:
        pass
    assert max(rows) == 10
    assert len(rows) == -(-3 * (len(TOKENS) - 1) // 10)
    for law in laws.values():
        check(model, law, trained_law(model, TOKENS, FEATURES, ()))


def test_a_pass_that_fails_costs_what_it_took_in_and_no_more(
    model: EagleModel, member: EagleMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(member, TOKENS[:20], FEATURES)
    with monkeypatch.context() as broken:
        broken.setattr(member._pass, "_compute", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            member.catch_up([0])
    assert member.catch_up([0]) == {}
    member.commit(DraftUpdate(0, 20, TOKENS[20:], told(19, FEATURES[19:23])))
    check(model, root(member), trained_law(model, TOKENS[19:], FEATURES[19:], ()))


def test_the_laws_depend_on_all_there_is(model: EagleModel, member: EagleMember) -> None:
    """Or the tests above could not fail: each input changes the law by far more than they allow."""
    tokens, features, path = [*TOKENS[:8]], FEATURES[:8].clone(), (7, 8)

    def law() -> Tensor:
        return trained_law(model, tokens, features, path)

    before = law()
    for change in (
        lambda: tokens.__setitem__(3, 99),
        lambda: features[2, 0].neg_(),
        lambda: features[2, 1].neg_(),
        lambda: features.__setitem__(slice(1, 3), features[1:3].flip(0)),
    ):
        change()
        after = law()
        assert float((after / before).log().abs().max()) > 0.05
        before = after
    path = (8, 8)
    assert float((law() / before).log().abs().max()) > 0.05
