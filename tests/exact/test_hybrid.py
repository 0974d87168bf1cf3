"""Drafts that read the target's hidden states: the text is plain decoding's, also where most of
what they guess is right, and the hidden states they read are those of one long pass.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tests.eagles import LAYERS, easy_target, guessing_eagle, save_hybrid, some_tokens
from tests.tiny import DEVICE, one_thread
from workers.completion import Completion, run_requests
from workers.draft import Draft, DraftRequest, DraftSpec, DraftUpdate, InlineDraft
from workers.engine.pack import Pack, Segment, chain_parents
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.load_draft import load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.speculation.tree import Proposal, TokenTree
from workers.target import Target, TargetSpec, load_target
from workers.training.ngram_table import NgramTable
from workers.verifier import Verifier, build_verifier

TOGETHER = 8
SAMPLINGS = (
    SamplingParams(seed=0, temperature=0),
    *(SamplingParams(seed=seed, temperature=0.8) for seed in range(1, 4)),
)
DRAFTS = ("hybrid", "eagle", "hybrid-chain", "eagle-chain")
BUDGETS = (1, 6, 24)


class Spy(InlineDraft):
    """Notes what the draft is told, by sequence, and the trees that it proposes."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(draft)
        self.told: dict[int, list[DraftUpdate]] = {}
        self.trees: list[TokenTree] = []

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Proposal | None]]:
        waiter = super().propose(requests)
        self.trees.extend(proposal.tree for proposal in waiter(0.0) if proposal)
        return waiter

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            self.told.setdefault(update.sequence, []).append(update)
        super().commit(updates)


@dataclass
class World:
    """The target, its drafts, and its plain answers as far as they were needed."""

    target: Target
    verifier: Verifier
    spies: dict[str, Spy]
    answers: dict[GenerationRequest, Completion] = field(default_factory=dict)

    def plain(self, request: GenerationRequest) -> Completion:
        alone = replace(request, id="plain", draft=None, budget=0)
        if alone not in self.answers:
            self.answers[alone] = run_requests(self.verifier, [alone]).completions[0]
        return self.answers[alone]

    def check(self, requests: Sequence[GenerationRequest], together: int) -> Counter[str]:
        """Each says what it says plainly; what was counted in all, members by their names."""
        counts = Counter[str]()
        done = run_requests(self.verifier, requests, together=together).completions
        for completion, request in zip(done, requests, strict=True):
            expected = self.plain(request)
            assert completion.tokens == expected.tokens, request
            assert completion.text.encode() == expected.text.encode()
            stats = completion.stats
            assert stats is not None
            assert sum(count for _, count in stats.members) == stats.accepted
            counts.update(dict(stats.members))
            counts.update(drafted=stats.drafted, accepted=stats.accepted, tested=stats.tested)
        self.target.pool.check_integrity()
        assert self.target.pool.pages_in_use == 0
        assert self.verifier.gauges().draft_faults == {}
        return counts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("hybrid")
    with one_thread():
        folder = easy_target(root / "target")
        target = load_target(
            TargetSpec(
                str(folder),
                "float32",
                device=DEVICE,
                kv_tokens=4096,
                threads=1,
                feature_layers=LAYERS,
            )
        )
        table = NgramTable.build([some_tokens(40)], vocabulary_of(folder), {})
        save_hybrid(guessing_eagle(folder), table, root / "draft", folder)
        specs = [
            DraftSpec(
                name,
                "hybrid" if name.startswith("hybrid") else "eagle",
                path=str(root / "draft" if name.startswith("hybrid") else root / "draft" / "eagle"),
                children=1 if name.endswith("chain") else 6,
            )
            for name in DRAFTS
        ]
        spies = {spec.name: Spy(load_draft(spec, folder, device=DEVICE)) for spec in specs}
        limits = Limits(max_running=TOGETHER, prefill_tokens=7)
        yield World(target, build_verifier(target, spies, limits, specs), spies)


def ask(number: int, sampling: SamplingParams, draft: str, budget: int) -> GenerationRequest:
    """A prompt of its own number, whose end stands in it before, and 20 tokens after it."""
    prompt = some_tokens(10 + number, number)
    return GenerationRequest(
        f"{number} {sampling.seed}",
        (*prompt, *prompt[:4]),
        20,
        sampling,
        draft=draft,
        budget=budget,
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_text_is_plain_decodings_alone_and_in_company(
    world: World, draft: str, budget: int
) -> None:
    world.spies[draft].trees.clear()
    alone = [ask(number, sampling, draft, budget) for number, sampling in enumerate(SAMPLINGS)]
    counts = world.check(alone, together=1)
    crowd = [ask(n % 8, sampling, draft, budget) for n, sampling in enumerate(SAMPLINGS * 4)]
    counts += world.check(crowd, together=TOGETHER)
    assert counts["drafted"] > 0
    assert counts["accepted"] > counts["tested"] / 5, "these tests see many guesses accepted"
    assert counts["neural"] > 0
    assert (counts["suffix"] > 0) == draft.startswith("hybrid")
    trees = world.spies[draft].trees
    assert max(map(len, trees)) >= min(budget, 3)
    chains = [tree.parents == tuple(range(-1, len(tree) - 1)) for tree in trees]
    assert all(chains) == (draft.endswith("chain") or budget == 1)


def one_pass(target: Target, tokens: Sequence[int]) -> Tensor:
    """Hidden states of a text that is run at once: [tokens, layers, hidden]."""
    size = len(tokens)
    target.pool.open(10**6)
    target.pool.reserve(10**6, size)
    extents = target.pool.extents(10**6)
    segment = Segment(tuple(tokens), 0, chain_parents(size), extents, ())
    features = target.forward(Pack((segment,))).features
    target.pool.rollback(10**6)
    target.pool.close(10**6)
    return features


@pytest.mark.parametrize("draft", ["hybrid", "eagle"])
def test_the_hidden_states_that_a_draft_reads_are_those_of_one_long_pass(
    world: World, draft: str
) -> None:
    """Prompts come in chunks of any size, answers a tree at a time, eight at once."""
    told = world.spies[draft].told
    told.clear()
    requests = [ask(number, sampling, draft, 24) for number, sampling in enumerate(SAMPLINGS * 2)]
    world.verifier.forget_prefixes()  # of what is known already, nobody is told
    world.check(requests, together=TOGETHER)
    assert len(told) == TOGETHER
    texts = {(*r.prompt, *world.plain(r).tokens) for r in requests}
    sizes = set()
    for updates in told.values():
        tokens = [token for update in updates for token in update.tokens]
        (text,) = (text for text in texts if text[: len(tokens)] == tuple(tokens))
        features = [update.features for update in updates if update.features is not None]
        assert {own.layers for own in features} == {LAYERS}
        lengths = [len(own.values) for own in features]
        assert [own.start for own in features] == [sum(lengths[:n]) for n in range(len(lengths))]
        assert sum(lengths) == len(tokens) - 1
        sizes |= {*lengths}
        expected = one_pass(world.target, text)[: sum(lengths)]
        found = torch.cat([own.values for own in features])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(sizes) > 3, "chunks and steps of many sizes"
