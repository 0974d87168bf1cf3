"""The default target: its text under speculation is its own, token for token.

In float32 transformers is the oracle at temperature 0, else plain decoding is. By default a few
prompts and seeds; `OUTRIDER_PROMPTS=50 OUTRIDER_SEEDS_PER_TEXT=50` runs the full size.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, product
from pathlib import Path

import pytest
import torch
from joblib import cpu_count
from transformers import AutoModelForCausalLM

from deployments.pool import find_draft
from deployments.prompt_file import chat_ids, read_prompts
from workers.budget import AUTO, Budget, spending
from workers.completion import run_requests
from workers.draft import DraftSpec, InlineDraft
from workers.engine.model_store import DEFAULT_TARGET, resolve
from workers.engine.sampling import SamplingParams
from workers.load_draft import feature_layers_of, load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import Verifier, build_verifier

EVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"
PROMPTS = int(os.environ.get("OUTRIDER_PROMPTS", "4"))
SEEDS = int(os.environ.get("OUTRIDER_SEEDS_PER_TEXT", "2"))
LENGTH = int(os.environ.get("OUTRIDER_LENGTH", "24"))
BATCH = 8
# Drafts and budgets are tried alone and in batches by turns, which one parameter begins with the
# one and another with the other: there is an odd number of drafts, so both come to each of them.

pytestmark = [
    pytest.mark.skipif(not EVAL.is_dir(), reason="needs the evaluation prompts, ../shared/data"),
    pytest.mark.timeout(7200),
]

# The shipped lm is a tenth of the target's layers and nearly always wrong, which is the harder half
# of the test. The deep one has most of its layers, so that some of its paths are accepted.
KINDS = ("hybrid", "chain", "ngram", "eagle", "lm")
DRAFTS = {kind: replace(find_draft(kind, target=DEFAULT_TARGET), name=kind) for kind in KINDS} | {
    "deep": DraftSpec("deep", "lm", layers=(*range(26), 29))
}
BUDGETS: tuple[Budget, ...] = (1, 6, 24, AUTO)


def load(dtype: str) -> Target:
    layers = feature_layers_of(list(DRAFTS.values()))
    return load_target(TargetSpec(DEFAULT_TARGET, dtype=dtype, feature_layers=layers))


@pytest.fixture(scope="module")
def target() -> Target:
    return load("float32")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[tuple[int, ...]]:
    """Prompts of all four domains in turn."""
    per_file = -(-PROMPTS // 4)
    files = [
        read_prompts(EVAL / f"{domain}.jsonl", per_file) for domain in ("code", "math", "en", "zh")
    ]
    mixed = chain.from_iterable(zip(*(file.prompts for file in files), strict=True))
    return [chat_ids(target.tokenizer, prompt) for prompt in mixed][:PROMPTS]


def verifier_of(target: Target, names: Collection[str]) -> Verifier:
    folder, threads = resolve(DEFAULT_TARGET), cpu_count()
    specs = [DRAFTS[name] for name in names]
    drafts = {
        spec.name: InlineDraft(load_draft(spec, folder, dtype="float32", threads=threads))
        for spec in specs
    }
    return build_verifier(target, drafts, Limits(max_running=BATCH), specs)


@pytest.fixture(scope="module")
def verifier(target: Target) -> Verifier:
    return verifier_of(target, DRAFTS)


def answers(
    verifier: Verifier,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    *,
    draft: str | None = None,
    budget: Budget = 0,
    together: int = BATCH,
) -> list[list[int]]:
    nodes, adaptive = spending(budget)
    requests: Iterator[GenerationRequest] = (
        GenerationRequest(
            str(number), ids, LENGTH, own, draft=draft, budget=nodes, adaptive=adaptive
        )
        for number, (ids, own) in enumerate(zip(prompts, params, strict=True))
    )
    run = run_requests(verifier, requests, together=together)
    if nodes and not (adaptive and draft == "lm"):  # which the controller may find hopeless
        assert run.total("drafted") > 0
    return [completion.tokens for completion in run.completions]


@pytest.fixture(scope="module")
def greedy_by_transformers(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(resolve(DEFAULT_TARGET), dtype=torch.float32)
    found = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=LENGTH,
            do_sample=False,
        )
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize(
    ("draft", "budget"),
    [(None, 0), ("deep", 6), *((kind, budget) for kind in KINDS for budget in BUDGETS)],
)
def test_greedy_text_is_that_of_transformers(
    verifier: Verifier,
    prompts: list[tuple[int, ...]],
    greedy_by_transformers: list[list[int]],
    draft: str | None,
    budget: Budget,
) -> None:
    greedy = [SamplingParams(seed=0, temperature=0.0)] * len(prompts)
    assert answers(verifier, prompts, greedy, draft=draft, budget=budget) == greedy_by_transformers


@pytest.mark.parametrize(("temperature", "turns"), [(0.8, (1, BATCH)), (1.2, (BATCH, 1))])
def test_a_seed_is_one_text(
    verifier: Verifier, prompts: list[tuple[int, ...]], temperature: float, turns: tuple[int, int]
) -> None:
    seeds = [prompts[seed % len(prompts)] for seed in range(SEEDS)]
    params = [
        SamplingParams(seed=seed, temperature=temperature, top_p=0.95) for seed in range(SEEDS)
    ]
    plain = answers(verifier, seeds, params, together=1)
    for (budget, draft), together in zip(product(BUDGETS, KINDS), cycle(turns), strict=False):
        found = answers(verifier, seeds, params, draft=draft, budget=budget, together=together)
        assert found == plain, (draft, budget, together)


@pytest.mark.parametrize(("dtype", "turns"), [("bfloat16", (1, BATCH)), ("int8", (BATCH, 1))])
def test_a_text_is_plain_decodings_in_every_dtype(
    prompts: list[tuple[int, ...]], dtype: str, turns: tuple[int, int]
) -> None:
    verifier = verifier_of(load(dtype), ("hybrid", "chain", "ngram", "eagle"))
    params = [
        SamplingParams(seed=number, temperature=0.8 * (number % 2))
        for number in range(len(prompts))
    ]
    plain = answers(verifier, prompts, params, together=1)
    cases = product((1, 8, 31, AUTO), ("hybrid", "chain", "ngram"))
    for (budget, draft), together in zip(cases, cycle(turns), strict=False):
        verifier.forget_prefixes()
        found = answers(verifier, prompts, params, draft=draft, budget=budget, together=together)
        assert found == plain, (draft, budget, together)
    kept = answers(verifier, prompts, params, draft="eagle", budget=31)
    assert kept == plain, "with prompts kept"
