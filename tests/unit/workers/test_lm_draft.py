"""The model draft: its guesses against the model's own law, and its pages against its promises."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tiny import CONTEXT, make_target, tiny_tokenizer
from workers import lm_draft
from workers.draft import DraftRequest, DraftSpec, DraftUpdate
from workers.engine.pack import Pack
from workers.lm_draft import BEAM, CHILDREN, DEEPEST, LEAST_CONFIDENCE, RATIO_TOKENS, LMDraft
from workers.load_draft import load_draft
from workers.speculation.tree import Proposal

pytestmark = pytest.mark.usefixtures("single_thread")

TOKENS = tuple(range(10, 40))
Make = Callable[[], LMDraft]
Law = Callable[[Sequence[int]], Tensor]


@pytest.fixture
def make(tiny_folder: Path) -> Make:
    """The target as its own draft."""

    def load() -> LMDraft:
        draft = load_draft(DraftSpec("own", "lm", path=str(tiny_folder)), tiny_folder)
        assert isinstance(draft, LMDraft)
        return draft

    return load


@pytest.fixture(scope="module")
def law(tiny_folder: Path) -> Law:
    """The model's law after some tokens, by transformers."""
    model = LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()

    def after(tokens: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(tokens)])).logits[0, -1]
        return logits.softmax(0)

    return after


def ask(draft: LMDraft, length: int, *, sequence: int = 0, **changes: Any) -> Proposal | None:
    request = {"budget": 12, "depth": 4} | changes
    (answer,) = draft.propose([DraftRequest(sequence, length, **request)])
    return answer


def proposed(draft: LMDraft, tokens: Sequence[int], **changes: Any) -> Proposal:
    draft.commit([DraftUpdate(changes.get("sequence", 0), 0, tuple(tokens))])
    answer = ask(draft, len(tokens), **changes)
    assert answer is not None
    return answer


def same(one: Proposal | None, other: Proposal | None) -> bool:
    assert one is not None
    assert other is not None
    return one.tree == other.tree and one.confidence == pytest.approx(other.confidence, rel=1e-4)


# -- its guesses ---------------------------------------------------------------------------------


def test_its_confidence_is_the_models_probability_of_the_path(make: Make, law: Law) -> None:
    proposal = proposed(make(), TOKENS)
    tree = proposal.tree
    assert tree.gamma > 1
    for node in range(len(tree)):
        *above, last = (tree.tokens[step] for step in tree.path(node))
        reached = 1.0 if not above else proposal.confidence[tree.parents[node]]
        p = law([*TOKENS, *above])
        assert proposal.confidence[node] == pytest.approx(reached * float(p[last]), rel=1e-3)
        assert last in p.topk(CHILDREN).indices


def test_of_a_level_the_likeliest_nodes_get_children_and_the_likeliest_paths_stay(
    make: Make, law: Law
) -> None:
    """The same search, written over the model's law one path at a time."""
    found: dict[tuple[int, ...], float] = {}
    beam: list[tuple[int, ...]] = [()]
    for _ in range(3):
        newest = {}
        for path in beam:
            top = law([*TOKENS, *path]).topk(CHILDREN)
            for token, prob in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                newest[*path, token] = found.get(path, 1.0) * prob
        found |= {path: p for path, p in newest.items() if p >= LEAST_CONFIDENCE}
        found = dict(sorted(found.items(), key=lambda item: -item[1])[:7])
        newest = {path: p for path, p in newest.items() if path in found}
        beam = sorted(newest, key=lambda path: -newest[path])[:BEAM]
    proposal = proposed(make(), TOKENS, budget=7, depth=3)
    tree = proposal.tree
    paths = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    assert paths == found.keys()


@pytest.mark.parametrize(("budget", "depth"), [(0, 4), (1, 4), (5, 2), (30, 99)])
def test_it_keeps_to_budget_and_depth(make: Make, budget: int, depth: int) -> None:
    tree = proposed(make(), TOKENS, budget=budget, depth=depth).tree
    assert len(tree) <= budget
    assert tree.gamma <= min(depth, DEEPEST)
    assert (len(tree) == 0) == (budget == 0)


def test_sequences_asked_together_get_what_each_gets_alone(make: Make) -> None:
    texts = [TOKENS, TOKENS[:1], TOKENS[5:18]]
    alone = [proposed(make(), text) for text in texts]
    draft = make()
    draft.commit([DraftUpdate(n, 0, text) for n, text in enumerate(texts)])
    together = draft.propose([DraftRequest(n, len(text), 12, 4) for n, text in enumerate(texts)])
    assert all(map(same, together, alone))


def test_after_any_commit_it_proposes_as_if_it_had_read_the_text_at_once(make: Make) -> None:
    draft = make()
    proposed(draft, TOKENS[:7])
    known = 7
    for size in (1, 4, 2):
        draft.commit([DraftUpdate(0, known, TOKENS[known : known + size])])
        known += size
        assert same(ask(draft, known), proposed(make(), TOKENS[:known]))
    draft._pool.check_integrity()


def test_under_ratio_it_samples_a_comb_from_the_head_of_its_law(make: Make, law: Law) -> None:
    draft = make()
    proposal = proposed(draft, TOKENS, budget=7, depth=9, ratio_seed=3)
    tree = proposal.tree
    assert tree.parents == (-1, -1, -1, 0, 0, 0, 3)
    assert proposal.q is not None
    for node, q in enumerate(proposal.q):
        *above, last = (tree.tokens[step] for step in tree.path(node))
        top = law([*TOKENS, *above]).topk(RATIO_TOKENS)
        assert set(q.ids) == set(top.indices.tolist())
        head = dict(
            zip(top.indices.tolist(), (top.values / top.values.sum()).tolist(), strict=True)
        )
        assert dict(zip(q.ids, q.probs, strict=True)) == pytest.approx(head, rel=1e-3)
        assert last in q.ids
    assert ask(draft, len(TOKENS), budget=7, depth=9, ratio_seed=3) == proposal
    other = ask(draft, len(TOKENS), budget=7, depth=9, ratio_seed=4)
    assert other is not None
    assert other.tree != tree


# -- what it knows -------------------------------------------------------------------------------


def test_what_it_does_not_know_exactly_it_says(make: Make) -> None:
    draft = make()
    draft.commit([DraftUpdate(0, 0, (1, 2, 3))])
    draft.commit([DraftUpdate(0, 5, (9,)), DraftUpdate(1, 2, (9,))])  # something was missed
    assert ask(draft, 3) is not None
    assert ask(draft, 6) is None
    assert ask(draft, 3, sequence=1) is None
    draft.forget([0, 5])
    assert ask(draft, 3) is None


def test_a_long_prompt_is_read_in_pieces(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proposed(make(), TOKENS)
    monkeypatch.setattr(lm_draft, "CATCH_UP", 12)
    draft = make()
    draft.commit([DraftUpdate(0, 0, TOKENS), DraftUpdate(1, 0, (5, 6))])
    requests = [DraftRequest(0, len(TOKENS), 12, 4), DraftRequest(1, 2, 12, 4)]
    answers = [draft.propose(requests) for _ in range(3)]
    assert [answer[0] == Proposal.empty() for answer in answers] == [True, True, False]
    assert same(answers[2][0], whole)
    short = proposed(make(), (5, 6))
    assert all(same(answer[1], short) for answer in answers), "the others do not wait for it"


def test_near_the_end_of_its_context_it_guesses_less_and_behind_it_nothing(make: Make) -> None:
    draft = make()
    text = (TOKENS * 6)[: CONTEXT + 1]
    depths = {}
    for left in (3, 1, 0, -1):
        proposal = proposed(draft, text[: CONTEXT - left], budget=30, depth=9)
        depths[left] = proposal.tree.gamma
        sampled = ask(draft, CONTEXT - left, budget=30, depth=9, ratio_seed=1)
        assert sampled is not None
        assert sampled.tree.gamma <= max(left, 0)
    assert 1 <= depths[3] <= 3
    assert (depths[1], depths[0], depths[-1]) == (1, 0, 0)
    draft._pool.check_integrity()


# -- its pages -----------------------------------------------------------------------------------


def test_what_is_forgotten_gives_its_pages_back(make: Make) -> None:
    draft = make()
    for sequence in range(3):
        proposed(draft, TOKENS, sequence=sequence)
    assert draft._pool.pages_in_use == 1 + 3  # they share the first
    assert draft._pool.tokens_stored == 16 + 3 * (len(TOKENS) - 1 - 16)
    proposed(draft, (1, 2), sequence=1)  # begun anew
    assert draft._pool.pages_in_use == 1 + 3
    draft.forget([0, 1, 2, 3])
    assert draft._pool.pages_in_use == 0
    draft._pool.check_integrity()


def test_with_a_full_pool_the_last_ones_wait_and_nobody_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = proposed(make(), TOKENS)
    monkeypatch.setattr(lm_draft, "KV_TOKENS", 80)  # five pages; a sequence and its tree take three
    draft = make()
    draft.commit([DraftUpdate(n, 0, TOKENS) for n in range(3)])
    requests = [DraftRequest(n, len(TOKENS), 12, 4) for n in range(3)]
    first, second, third = draft.propose(requests)
    assert same(first, expected)
    assert third == Proposal.empty()
    assert second is not None
    draft._pool.check_integrity()
    assert draft._pool.tokens_stored == 16 + 2 * (len(TOKENS) - 1 - 16)
    sampled = draft.propose([DraftRequest(n, len(TOKENS), 6, 2, ratio_seed=0) for n in range(3)])
    assert None not in sampled
    draft.forget([0, 1])
    assert same(draft.propose(requests[2:])[0], expected)
    draft._pool.check_integrity()


@pytest.mark.parametrize("passes_before", [0, 1, 2])
def test_a_failed_pass_leaves_nothing_behind(
    make: Make, monkeypatch: pytest.MonkeyPatch, passes_before: int
) -> None:
    expected = proposed(make(), TOKENS)
    draft = make()
    draft.commit([DraftUpdate(0, 0, TOKENS)])
    good = [draft._runner.forward] * passes_before

    def failing(pack: Pack) -> Tensor:
        if good:
            return good.pop()(pack)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(draft._runner, "forward", failing)
        with pytest.raises(RuntimeError):
            ask(draft, len(TOKENS))
    assert same(ask(draft, len(TOKENS)), expected)
    draft._pool.check_integrity()


# -- loading -------------------------------------------------------------------------------------


def test_some_of_the_targets_layers_are_a_draft(tiny_folder: Path) -> None:
    draft = load_draft(DraftSpec("lm", "lm", layers=(1,)), tiny_folder)
    assert isinstance(draft, LMDraft)
    assert len(draft._runner.store.keys) == 1
    assert len(proposed(draft, TOKENS, budget=3, depth=1).tree) == 3


def test_a_foreign_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    foreign = make_target(tmp_path / "foreign", extra=["zz"])
    with pytest.raises(ValueError, match=r"^drafts\.d: its vocabulary .* is not the target's"):
        load_draft(DraftSpec("d", "lm", path=str(foreign)), tiny_folder)


def test_a_vocabulary_of_the_same_size_is_not_the_same(tmp_path: Path) -> None:
    """Whose ids mean something else would only ever guess wrong."""
    target = make_target(tmp_path / "target", extra=["zz"])
    foreign = make_target(tmp_path / "foreign", extra=["yy"])
    with pytest.raises(ValueError, match=r"^drafts\.d: its vocabulary .* is not the target's"):
        load_draft(DraftSpec("d", "lm", path=str(foreign)), target)


def test_weights_for_fewer_tokens_than_the_tokenizer_has_are_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    small = make_target(tmp_path / "small", vocab_size=200)
    with pytest.raises(ValueError, match=r"^drafts\.d: its model scores 200 tokens"):
        load_draft(DraftSpec("d", "lm", path=str(small)), tiny_folder)


def test_a_text_with_tokens_it_does_not_have_gets_no_guesses(make: Make) -> None:
    draft = make()
    draft.commit([DraftUpdate(0, 0, (5, draft._vocab_size, 7)), DraftUpdate(1, 0, TOKENS)])
    foreign, known = draft.propose([DraftRequest(0, 3, 8, 4), DraftRequest(1, len(TOKENS), 8, 4)])
    assert foreign == Proposal.empty()
    assert known is not None
    assert len(known.tree) > 0
    draft.commit([DraftUpdate(0, 0, TOKENS)])
    assert same(ask(draft, len(TOKENS), budget=8), known), "begun anew it can be read"


def test_padded_ids_are_never_guessed(tiny_folder: Path, tmp_path: Path) -> None:
    real = len(tiny_tokenizer())
    padded = make_target(tmp_path / "padded", vocab_size=real + 200)
    draft = load_draft(DraftSpec("d", "lm", path=str(padded)), tiny_folder)
    assert isinstance(draft, LMDraft)
    for length in range(1, len(TOKENS), 5):
        tree = proposed(draft, TOKENS[:length], budget=30).tree
        assert max(tree.tokens, default=0) < real
        q = proposed(draft, TOKENS[:length], ratio_seed=length).q
        assert q is not None
        assert all(max(law.ids) < real for law in q)
