"""Long greedy texts of many prompts: plain decoding's, with chains of any length.

By default some of the 50 prompts, others for each length; `OUTRIDER_PROMPTS=50` has all for each.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.tiny import DEVICE, make_target, one_thread
from workers.completion import Completion, run_requests
from workers.draft import DraftSpec, InlineDraft
from workers.engine.sampling import SamplingParams
from workers.load_draft import load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import Verifier, build_verifier

CONTEXT = 320
TOGETHER = 16
GREEDY = SamplingParams(seed=0, temperature=0, logit_bias=((0, -100.0),))
OPENINGS = (
    "the king",
    "def f(x):",
    "1 + 1 =",
    "你好",
    "🦜 and",
    "sing",
    "Q: why",
    "{",
    "\n",
    "a the",
)
ENDINGS = ("", " is", " the thing and", "，世界", " 2 3 5 8")
PROMPTS = [opening + ending for ending in ENDINGS for opening in OPENINGS]
TRIED = min(int(os.environ.get("OUTRIDER_PROMPTS", "8")), len(PROMPTS))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("long") / "target"
    with one_thread():
        make_target(folder, max_position_embeddings=CONTEXT)
        yield load_target(
            TargetSpec(str(folder), "float32", device=DEVICE, kv_tokens=8192, threads=1)
        )


@pytest.fixture(scope="module")
def verifier(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    folder = Path(target.tokenizer.name_or_path)
    stranger = tmp_path_factory.mktemp("stranger") / "draft"
    make_target(stranger, seed=1, max_position_embeddings=CONTEXT)
    specs = [
        DraftSpec("suffix", "ngram", children=1),
        DraftSpec("twin", "lm", path=str(folder)),
        DraftSpec("stranger", "lm", path=str(stranger)),
    ]
    drafts = {spec.name: InlineDraft(load_draft(spec, folder, device=DEVICE)) for spec in specs}
    return build_verifier(target, drafts, Limits(max_running=TOGETHER), specs)


def said(
    verifier: Verifier,
    target: Target,
    prompts: Sequence[str],
    length: int,
    draft: str | None = None,
    budget: int = 0,
) -> list[Completion]:
    ids = [tuple(target.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    requests = (
        GenerationRequest(f"{number}", own, length, GREEDY, draft=draft, budget=budget)
        for number, own in enumerate(ids)
    )
    done = run_requests(verifier, requests, together=TOGETHER)
    assert (done.total("drafted") > 0) == bool(budget)
    return done.completions


@pytest.fixture(scope="module")
def plain(verifier: Verifier, target: Target) -> list[list[int]]:
    texts = [one.tokens for one in said(verifier, target, PROMPTS, 128)]
    assert {len(text) for text in texts} == {128}
    assert len({tuple(text) for text in texts}) > len(PROMPTS) / 2
    return texts


@pytest.mark.parametrize("gamma", range(1, 9))
def test_all_prompts_say_the_same_under_guesses_of_any_length(
    verifier: Verifier, target: Target, plain: list[list[int]], gamma: int
) -> None:
    tried = [number % len(PROMPTS) for number in range(8 * gamma, 8 * gamma + TRIED)]
    done = said(verifier, target, [PROMPTS[number] for number in tried], 128, "suffix", gamma)
    assert [one.tokens for one in done] == [plain[number] for number in tried]
    assert sum(one.stats.accepted for one in done if one.stats) > TRIED


@pytest.mark.parametrize("draft", ["stranger", "twin"])
def test_two_hundred_tokens_with_hardly_a_right_guess_and_with_none_that_is_wrong(
    verifier: Verifier, target: Target, draft: str
) -> None:
    prompts = PROMPTS[::13]
    expected = [one.tokens for one in said(verifier, target, prompts, 200)]
    done = said(verifier, target, prompts, 200, draft, 6)
    assert [one.tokens for one in done] == expected
    for completion in done:
        assert completion.stats is not None
        assert completion.stats.alpha is not None
        if draft == "twin":
            assert completion.stats.alpha == 1.0
        else:
            assert completion.stats.alpha < 0.2
