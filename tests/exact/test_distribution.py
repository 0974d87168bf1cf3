"""The first three tokens at temperature 1, over many seeds, follow the target's own law.

The whole engine runs: scheduler, draft, packed passes, KV commit, verification. The expected counts
come from transformers alone. `OUTRIDER_SEEDS=200000` runs the full-size test; by default it is
a tenth of that, which still sees a total variation of two hundredths.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.eagles import LAYERS, tiny_eagle
from tests.text_law import (
    LENGTH,
    SIGNIFICANCE,
    VOCABULARY,
    TextLaw,
    p_value,
    six_tokens,
    text_law,
)
from tests.tiny import one_thread
from workers.completion import run_requests
from workers.draft import DraftKind, DraftSpec, InlineDraft, Verification
from workers.eagle_member import EagleMember
from workers.engine.model import load_model
from workers.engine.runner import Runner
from workers.engine.sampling import SamplingParams
from workers.hybrid_draft import HybridDraft
from workers.lm_draft import KV_TOKENS, LMDraft
from workers.load_draft import load_draft
from workers.ngram_member import NgramMember
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import build_verifier

SEEDS = int(os.environ.get("OUTRIDER_SEEDS", "20000"))
PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # n-grams have something to say
TOGETHER = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of six tokens, and a draft with other weights."""
    root = tmp_path_factory.mktemp("tiny vocabulary")
    return six_tokens(root / "target", seed=0), six_tokens(root / "draft", seed=1)


@pytest.fixture(scope="module")
def target(folders: tuple[Path, Path]) -> Iterator[Target]:
    with one_thread():
        yield load_target(
            TargetSpec(
                str(folders[0]),
                dtype="float32",
                kv_tokens=32 * TOGETHER,
                threads=1,
                feature_layers=LAYERS,
            )
        )


@pytest.fixture(scope="module")
def law(folders: tuple[Path, Path]) -> TextLaw:
    return text_law(folders[0], PROMPT)


def draft_of(kind: str, folders: tuple[Path, Path]) -> InlineDraft:
    if kind == "ngram":
        return InlineDraft(load_draft(DraftSpec("draft", "ngram"), folders[0]))
    if kind in ("eagle", "hybrid"):
        member = EagleMember(tiny_eagle(folders[0], vocabulary=torch.arange(1, VOCABULARY)))
        ngram = NgramMember(None) if kind == "hybrid" else None
        return InlineDraft(HybridDraft("draft", ngram, member, children=3))
    model = load_model(folders[1], dtype="float32", device=torch.device("cpu"))
    return InlineDraft(
        LMDraft("draft", Runner(model, KV_TOKENS), vocab_size=VOCABULARY, context_length=160)
    )


def spec_of(kind: DraftKind, verification: Verification) -> DraftSpec:
    """As far as the verifier looks at it."""
    folder = None if kind == "ngram" else "its folder"
    return DraftSpec("draft", kind, path=folder, verification=verification)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "verification", "budget"),
    [
        ("none", "invariant", 0),
        ("ngram", "invariant", 5),
        ("lm", "invariant", 6),
        ("eagle", "invariant", 6),
        ("hybrid", "invariant", 6),
        ("ngram", "ratio", 5),
        ("lm", "ratio", 6),
    ],
)
def test_texts_follow_the_target(
    target: Target,
    folders: tuple[Path, Path],
    law: TextLaw,
    kind: DraftKind | Literal["none"],
    verification: Verification,
    budget: int,
) -> None:
    # A tree that has to be asked for in rounds is dear, and verified as any other.
    seeds = SEEDS // 4 if kind in ("eagle", "hybrid") else SEEDS
    drafts = {} if kind == "none" else {"draft": draft_of(kind, folders)}
    verifier = build_verifier(
        target,
        drafts,
        Limits(max_running=TOGETHER, max_queued=TOGETHER, prefill_tokens=TOGETHER * len(PROMPT)),
        [spec_of(kind, verification)] if kind != "none" else [],
    )
    requests = (
        GenerationRequest(
            id=str(seed),
            prompt=PROMPT,
            max_tokens=LENGTH,
            sampling=SamplingParams(seed=seed),
            draft="draft" if drafts else None,
            budget=budget,
        )
        for seed in range(seeds)
    )
    run = run_requests(verifier, requests, together=TOGETHER)
    if drafts:  # both outcomes of verification were really seen
        assert run.total("accepted") > seeds / 10
        assert run.total("recovered") > seeds / 10
    seen = Counter(tuple(completion.tokens) for completion in run.completions)
    if kind == "hybrid":
        credit = Counter[str]()
        for completion in run.completions:
            assert completion.stats is not None
            credit.update(dict(completion.stats.members))
        assert min(credit["suffix"], credit["neural"]) > seeds / 50
        assert credit.total() == run.total("accepted")
    assert p_value(seen, law) > SIGNIFICANCE


def test_the_test_sees_a_small_deviation(law: TextLaw) -> None:
    """One text in fifty swapped for another: a total variation of .02 must be rejected."""
    seen = Counter({text: round(SEEDS * prob) for text, prob in law.items()})
    (likeliest, _), (other, _) = seen.most_common(2)
    seen[likeliest] -= SEEDS // 50
    seen[other] += SEEDS // 50
    assert p_value(seen, law) < SIGNIFICANCE
