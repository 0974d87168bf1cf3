"""What an n-gram draft guesses, and how its tree grows."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from workers import hybrid_draft, ngram_member
from workers.calibration import FLOOR
from workers.draft import DraftRequest, DraftSpec, DraftUpdate
from workers.engine.vocabulary import Vocabulary, vocabulary_of
from workers.hybrid_draft import HybridDraft
from workers.load_draft import load_draft
from workers.ngram_member import LOCAL_WEIGHT, NgramMember
from workers.speculation.tree import Proposal
from workers.training.ngram_table import ORDER, NgramTable
from workers.tree_growth import LEAST_CONFIDENCE, NEGLIGIBLE

ROOT = Path(__file__).parents[3]
CHILDREN = 6
TABLE = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2, 3, 4, 8], [9, 2, 3, 4]]


def table(*sequences: Sequence[int]) -> NgramTable:
    return NgramTable.build(sequences or TABLE, Vocabulary(50, "abc"), {})


def ngrams(table: NgramTable | None = None) -> HybridDraft:
    return HybridDraft("d", NgramMember(table), None, children=CHILDREN)


def proposed(
    draft: HybridDraft, tokens: Sequence[int], budget: int = 8, depth: int = 8, **request: int
) -> Proposal:
    draft.commit([DraftUpdate(0, 0, tuple(tokens))])
    (answer,) = draft.propose([DraftRequest(0, len(tokens), budget, depth, **request)])
    assert answer is not None
    return answer


# -- what it knows of a sequence -----------------------------------------------------------------


def test_it_guesses_only_for_what_it_knows_exactly() -> None:
    draft = ngrams()
    draft.commit([DraftUpdate(0, 0, (1, 2, 1))])

    def known(length: int, sequence: int = 0) -> bool:
        return draft.propose([DraftRequest(sequence, length, 4, 4)]) != [None]

    assert known(3)
    assert not known(3, sequence=1), "never heard of, as after a restart"
    assert not known(2)
    assert not known(4)
    draft.commit([DraftUpdate(0, 4, (9,)), DraftUpdate(1, 3, (9,))])  # something was missed
    assert known(3)
    assert not known(4, sequence=1)
    draft.commit([DraftUpdate(0, 3, (2, 1))])
    assert known(5)
    draft.commit([DraftUpdate(0, 0, (5,))])
    assert known(1), "start 0 begins anew"
    draft.forget([0, 77])
    assert not known(1)


def test_begun_anew_it_remembers_nothing() -> None:
    draft = ngrams()
    assert len(proposed(draft, [1, 2, 1]).tree) > 0
    assert proposed(draft, [3, 4, 1]) == Proposal.empty()


def test_sequences_do_not_learn_from_each_other() -> None:
    draft = ngrams()
    draft.commit([DraftUpdate(0, 0, (1, 2, 1)), DraftUpdate(1, 0, (1, 3, 1))])
    one, other = draft.propose([DraftRequest(0, 3, 1, 1), DraftRequest(1, 3, 1, 1)])
    assert one is not None
    assert other is not None
    assert (one.tree.tokens, other.tree.tokens) == ((2,), (3,))


def test_a_long_prompt_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is compiled, which needs no counting."""
    tokens = [1, 2, 3, 4, 5] * 5 + [1, 2]
    expected = proposed(ngrams(), tokens)
    monkeypatch.setattr(hybrid_draft, "CompiledGrowth", None)
    monkeypatch.setattr(ngram_member, "CATCH_UP", 10)
    draft = ngrams()
    draft.commit([DraftUpdate(0, 0, tuple(tokens))])
    request = DraftRequest(0, len(tokens), 8, 8)
    answers = [draft.propose([request])[0] for _ in range(3)]
    assert answers == [Proposal.empty(), Proposal.empty(), expected]


# -- its guesses ---------------------------------------------------------------------------------


def blended(
    tokens: Sequence[int], domain: Sequence[Sequence[int]], context: Sequence[int]
) -> dict[int, float]:
    """The next token's law by Witten and Bell, from the shortest context up, counted slowly."""
    p: dict[int, float] = {}
    for order in range(1, len(context) + 1):
        mine = followers([tokens], context[-order:])
        theirs = followers(domain, context[-order:])
        counts = Counter({token: LOCAL_WEIGHT * n for token, n in mine.items()}) + theirs
        distinct = len(mine) + len(theirs)
        if counts:
            p = {
                token: (counts[token] + distinct * p.get(token, 0)) / (counts.total() + distinct)
                for token in counts.keys() | p.keys()
            }
    return p


def followers(sequences: Sequence[Sequence[int]], context: Sequence[int]) -> Counter[int]:
    size = len(context)
    return Counter(
        sequence[at + size]
        for sequence in sequences
        for at in range(len(sequence) - size)
        if list(sequence[at : at + size]) == list(context)
    )


TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(TOKENS, st.lists(TOKENS, max_size=3))
@example([0, 0, 0], [[0, 0, 0, 1, 0, 2]])  # one guess is likely enough for a path, not for a member
def test_its_guesses_are_the_likeliest_of_the_blended_law(
    tokens: list[int], domain: list[list[int]]
) -> None:
    known = [sequence for sequence in domain if len(sequence) > 1]
    draft = ngrams(table(*known) if known else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_member, "NEGLIGIBLE", 0)
        proposal = proposed(draft, tokens, depth=1)
    # Nobody is surer than FLOOR allows.
    law = {t: min(p, 1 - FLOOR) for t, p in blended(tokens, known, tokens[-ORDER:]).items()}
    least = max(LEAST_CONFIDENCE, NEGLIGIBLE)
    assume(all(abs(p - least) > 1e-9 for p in law.values()))  # rounding would decide
    best = sorted((p for p in law.values() if p >= least), reverse=True)[:CHILDREN]
    assert proposal.confidence == pytest.approx(best)
    for token, confidence in zip(proposal.tree.tokens, proposal.confidence, strict=True):
        assert law[token] == pytest.approx(confidence)


def test_a_long_match_outweighs_what_is_frequent_after_a_short_one() -> None:
    tokens = [1, 2, 3, 4, *[9, 3, 5] * 3, 1, 2, 3]
    assert proposed(ngrams(), tokens, depth=1).tree.tokens[0] == 4
    assert proposed(ngrams(), [*tokens[:-3], 8, 3], depth=1).tree.tokens[0] == 5


def test_the_request_counts_for_more_than_the_table() -> None:
    draft = ngrams(table([1, 4], [1, 4], [1, 5]))
    assert proposed(draft, [1, 7, 1], depth=1).tree.tokens == (7, 4, 5)


def test_confidence_is_that_of_the_whole_path() -> None:
    proposal = proposed(ngrams(table()), [1, 2, 3])
    tree = proposal.tree
    assert (tree.tokens[:2], tree.gamma) == ((4, 7), 3)
    for node, parent in enumerate(tree.parents):
        path = [tree.tokens[step] for step in tree.path(node)]
        step = blended([1, 2, 3], TABLE, [1, 2, 3, *path[:-1]][-ORDER:])[path[-1]]
        above = 1.0 if parent < 0 else proposal.confidence[parent]
        assert proposal.confidence[node] == pytest.approx(above * step, rel=0.03)


def test_nothing_known_nothing_guessed() -> None:
    assert proposed(ngrams(), [1, 2, 3]) == Proposal.empty()
    assert proposed(ngrams(table()), [33]) == Proposal.empty()


@given(TOKENS, st.lists(TOKENS, max_size=3), st.integers(0, 12), st.integers(0, 6))
def test_any_tree_keeps_to_budget_and_depth_and_is_a_best_one(
    tokens: list[int], domain: list[list[int]], budget: int, depth: int
) -> None:
    known = [sequence for sequence in domain if len(sequence) > 1]
    draft = ngrams(table(*known) if known else None)
    proposal = proposed(draft, tokens, budget, depth)
    tree = proposal.tree
    assert len(tree) <= budget
    assert tree.gamma <= depth
    assert all(LEAST_CONFIDENCE <= c <= 1 for c in proposal.confidence)
    assert all(len(tree.children(node)) <= CHILDREN for node in range(-1, len(tree)))
    # Every node of a greater tree is either in this one or no likelier than its least likely.
    rest = proposed(draft, tokens, 1000, depth)
    best = sorted(rest.confidence, reverse=True)[:budget]
    assert sorted(proposal.confidence, reverse=True) == pytest.approx(best)


# -- under the ratio test ------------------------------------------------------------------------


def test_under_ratio_it_samples_a_comb_from_its_own_law() -> None:
    draft = ngrams(table())
    seen = set()
    for seed in range(60):
        proposal = proposed(draft, [1, 2, 3], budget=4, depth=2, ratio_seed=seed)
        assert proposal.q is not None
        law = proposal.q[0]
        assert set(law.ids) == {4, 7}
        assert math.isclose(sum(law.probs), 1)
        expected = blended([1, 2, 3], TABLE, [1, 2, 3])
        ratio = dict(zip(law.ids, law.probs, strict=True))
        assert ratio[4] / ratio[7] == pytest.approx(expected[4] / expected[7], rel=0.05)
        assert set(proposal.tree.tokens[:2]) == {4, 7}
        assert proposal.tree.parents[:2] == (-1, -1)
        assert all(parent <= 0 for parent in proposal.tree.parents), "only first siblings go on"
        seen.add(proposal.tree.tokens[0])
    assert seen == {4, 7}
    again = proposed(draft, [1, 2, 3], budget=4, depth=2, ratio_seed=5)
    assert again == proposed(draft, [1, 2, 3], budget=4, depth=2, ratio_seed=5)


# -- loading -------------------------------------------------------------------------------------


def test_without_a_path_it_knows_its_requests_only(tiny_folder: Path) -> None:
    draft = load_draft(DraftSpec("mine", "ngram"), tiny_folder)
    assert draft.name == "mine"
    draft.commit([DraftUpdate(0, 0, (1, 2, 1))])
    (proposal,) = draft.propose([DraftRequest(0, 3, 1, 1)])
    assert proposal is not None
    assert proposal.tree.tokens == (2,)


def test_a_table_for_this_vocabulary_is_used(tiny_folder: Path, tmp_path: Path) -> None:
    NgramTable.build([[1, 2, 3]], vocabulary_of(tiny_folder), {}).save(tmp_path)
    draft = load_draft(DraftSpec("d", "ngram", path=str(tmp_path)), tiny_folder)
    assert isinstance(draft, HybridDraft)
    assert proposed(draft, [1]).tree.tokens == (2, 3)


def test_a_table_for_another_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    size = vocabulary_of(tiny_folder).size
    NgramTable.build([[1, 2, 3]], Vocabulary(size, "another"), {}).save(tmp_path)
    with pytest.raises(ValueError, match=r"^drafts\.d: its vocabulary .* is not the target's"):
        load_draft(DraftSpec("d", "ngram", path=str(tmp_path)), tiny_folder)


def test_it_does_without_torch() -> None:
    program = "import sys, workers.hybrid_draft; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
