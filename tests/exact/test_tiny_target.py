"""A tiny float32 target says the same under every draft, budget, temperature and batch.

Plain decoding, one request at a time, is the oracle; its greedy text is checked against
transformers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.eagles import LAYERS, save_hybrid, tiny_eagle
from tests.tiny import CONTEXT, DEVICE, make_target, one_thread
from workers.completion import Completion, run_requests
from workers.draft import DraftSpec, InlineDraft
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.lm_draft import DEEPEST
from workers.load_draft import load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.training.ngram_table import NgramTable
from workers.verifier import Verifier, build_verifier

LENGTH = 20
PROMPTS = (
    "the thing and the other thing",
    "你好，世界",
    "1 1 2 3 5 8 13",
    "def f(x):\n    return f(x)",
    "a",
    "🦜🦜🦜",
    "Sing, and then sing again, and again",
    "on and on and on and on",
)
SETTINGS = (
    SamplingParams(seed=1, temperature=0),
    SamplingParams(seed=2, temperature=0.8),
    SamplingParams(seed=3, temperature=1.2),
    SamplingParams(seed=4, temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=5, temperature=0, logit_bias=((40, -100.0), (90, 4.0))),
    SamplingParams(seed=6, temperature=0.8, top_p=0.7, presence_penalty=0.5),
    SamplingParams(seed=7, temperature=1.2, top_k=5),
    SamplingParams(seed=8, temperature=0.8, min_p=0.2),
)
NO_END = ((0, -100.0),)
DRAFTS = ("table", "own", "shallow", "stranger", "short", "eagle", "hybrid")
BUDGETS = (1, 6, 24)


@dataclass
class World:
    """The target with all drafts on board, and its plain answers as far as they were needed."""

    folder: Path
    target: Target
    verifier: Verifier
    answers: dict[GenerationRequest, Completion]

    def plain(self, request: GenerationRequest) -> Completion:
        """The answer without a draft and without company."""
        alone = replace(request, id="plain", draft=None, budget=0)
        if alone not in self.answers:
            self.answers[alone] = run_requests(self.verifier, [alone]).completions[0]
        return self.answers[alone]

    def batch(self, requests: list[GenerationRequest]) -> list[Completion]:
        """All at once; each must say what it says alone, and all pages must come back."""
        done = run_requests(self.verifier, requests, together=len(requests)).completions
        for completion, request in zip(done, requests, strict=True):
            expected = self.plain(request)
            assert completion.tokens == expected.tokens, request
            assert completion.text == expected.text
            assert completion.finish_reason == expected.finish_reason
            assert completion.stats is not None
            assert completion.stats.emitted == len(completion.tokens)
        self.target.pool.check_integrity()
        assert self.target.pool.pages_in_use == 0
        return done


@pytest.fixture(scope="module")
def world(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("drafts")
    with one_thread():
        target = load_target(
            TargetSpec(
                str(tiny_folder),
                dtype="float32",
                device=DEVICE,
                kv_tokens=8192,
                threads=1,
                feature_layers=LAYERS,
            )
        )
        plain = build_verifier(target, {}, Limits())
        said = run_requests(plain, [ask(target, n, SETTINGS[0]) for n in range(len(PROMPTS))])
        texts = [[*done.request.prompt, *done.tokens] for done in said.completions]
        table = NgramTable.build(texts, vocabulary_of(tiny_folder), {})
        table.save(root / "table")
        save_hybrid(tiny_eagle(tiny_folder), table, root / "hybrid", tiny_folder)
        specs = (
            DraftSpec("table", "ngram", path=str(root / "table")),
            DraftSpec("own", "lm", path=str(tiny_folder)),
            DraftSpec("shallow", "lm", layers=(1,)),
            DraftSpec("stranger", "lm", path=str(make_target(root / "stranger", seed=1))),
            DraftSpec(
                "short",
                "lm",
                path=str(make_target(root / "short", seed=0, max_position_embeddings=32)),
            ),
            DraftSpec("eagle", "eagle", path=str(root / "hybrid" / "eagle")),
            DraftSpec("hybrid", "hybrid", path=str(root / "hybrid")),
        )
        drafts = {
            spec.name: InlineDraft(load_draft(spec, tiny_folder, device=DEVICE)) for spec in specs
        }
        limits = Limits(max_running=16, prefill_tokens=24)
        yield World(tiny_folder, target, build_verifier(target, drafts, limits, specs), {})


def ask(
    target: Target,
    number: int,
    sampling: SamplingParams,
    draft: str | None = None,
    budget: int = 0,
    max_tokens: int = LENGTH,
) -> GenerationRequest:
    ids = tuple(target.tokenizer(PROMPTS[number % len(PROMPTS)])["input_ids"])
    return GenerationRequest(f"{number}", ids, max_tokens, sampling, draft=draft, budget=budget)


def drafted(done: Sequence[Completion]) -> int:
    return sum(completion.stats.drafted for completion in done if completion.stats)


def test_plain_greedy_text_is_that_of_transformers(world: World) -> None:
    model = LlamaForCausalLM.from_pretrained(world.folder, attn_implementation="eager").eval()
    for number in range(4):
        request = ask(world.target, number, SETTINGS[0])
        tokens = list(request.prompt)
        answer = world.plain(request)
        for token in answer.tokens:
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            assert int(logits.argmax()) == token
            tokens.append(token)
        assert len(answer.tokens) == LENGTH or token in world.target.eos_token_ids


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_request_of_a_mixed_batch_says_what_it_says_alone(
    world: World, draft: str, budget: int
) -> None:
    mixed = [
        ask(world.target, number, sampling, draft, budget)
        for number, sampling in enumerate(SETTINGS)
    ]
    mixed[3] = replace(mixed[3], stop=(world.plain(mixed[3]).text[7:9],))
    mixed[5] = replace(mixed[5], max_tokens=7)
    done = world.batch(mixed)
    assert done[3].finish_reason == "stop"
    assert drafted(done) > 0
    # Greedy requests follow what the table has learned and what the target itself would say.
    if draft in ("table", "own", "hybrid") and budget > 1:
        assert done[0].stats is not None
        assert done[0].stats.tau > 1.5


@pytest.mark.parametrize("draft", ["table", "own", "hybrid"])
def test_one_batch_may_mix_drafts_and_plain_decoding(world: World, draft: str) -> None:
    names = (draft, None, "stranger", draft)
    done = world.batch(
        [
            ask(world.target, number, SETTINGS[number % 3], name, 6 if name else 0)
            for number, name in enumerate(names)
        ]
    )
    assert [one.stats and one.stats.draft for one in done] == list(names)


def test_who_makes_room_and_comes_back_from_the_host_says_the_same(
    world: World, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.scheduler._AHEAD", 0)  # so that many are sent back
    spec = TargetSpec(
        str(tiny_folder),
        dtype="float32",
        device=DEVICE,
        kv_tokens=160,
        host_kv_tokens=512,
        threads=1,
    )
    with one_thread():
        target = load_target(spec)
        verifier = build_verifier(target, {"own": own_ngram(tiny_folder)}, Limits(max_running=8))
        requests = [
            ask(target, number, sampling, "own", 6, 3 * LENGTH)
            for number, sampling in enumerate(SETTINGS)
        ]
        done = run_requests(verifier, requests, together=8).completions
    assert target.pool.recalls > 5
    assert target.pool.host_pages_in_use > 0
    for completion, request in zip(done, requests, strict=True):
        assert completion.tokens == world.plain(request).tokens


def own_ngram(folder: Path) -> InlineDraft:
    return InlineDraft(load_draft(DraftSpec("own", "ngram"), folder))


def test_with_budget_0_nothing_is_drafted(world: World) -> None:
    (done,) = world.batch([ask(world.target, 0, SETTINGS[0], "own", budget=0)])
    assert done.stats is not None
    assert (done.stats.draft, done.stats.drafted, done.stats.tau) == (None, 0, 1.0)


@pytest.mark.parametrize("draft", ["table", "own", "stranger", "hybrid"])
@pytest.mark.parametrize("sampling", SETTINGS[:2], ids=["greedy", "seeded"])
def test_every_cap_is_met_exactly(world: World, draft: str, sampling: SamplingParams) -> None:
    caps = range(1, 2 * DEEPEST + 3)
    done = world.batch([ask(world.target, 0, sampling, draft, 24, cap) for cap in caps])
    assert drafted(done) > 0
    for cap, completion in zip(caps, done, strict=True):
        assert len(completion.tokens) == cap or completion.finish_reason == "stop"
    longest = done[-1].tokens
    assert all(completion.tokens == longest[: len(completion.tokens)] for completion in done)


@pytest.mark.parametrize("draft", ["table", "own", "short", "eagle", "hybrid"])
@pytest.mark.parametrize("sampling", SETTINGS[:2], ids=["greedy", "seeded"])
def test_answers_run_to_the_exact_end_of_the_context(
    world: World, draft: str, sampling: SamplingParams
) -> None:
    """Prompts of context - 1 - j tokens; `short` is a draft whose own context is far shorter."""
    sampling = replace(sampling, logit_bias=NO_END)
    letters = tuple(world.target.tokenizer("and again " * CONTEXT)["input_ids"])
    requests = [
        GenerationRequest(
            f"{j}", letters[: CONTEXT - 1 - j], j + 1, sampling, draft=draft, budget=24
        )
        for j in range(DEEPEST + 2)
    ]
    done = world.batch(requests)
    for completion in done:
        assert len(completion.request.prompt) + len(completion.tokens) == CONTEXT
        assert completion.finish_reason == "length"
    assert (drafted(done) > 0) == (draft != "short")


def test_a_random_draft_is_nearly_always_wrong_and_changes_nothing(world: World) -> None:
    (done,) = world.batch([ask(world.target, 4, SETTINGS[0], "stranger", 6, max_tokens=100)])
    assert done.stats is not None
    assert done.stats.alpha is not None
    assert done.stats.alpha < 0.2


def test_the_target_as_its_own_draft_is_always_right_when_greedy(world: World) -> None:
    (done,) = world.batch([ask(world.target, 4, SETTINGS[0], "own", 6, max_tokens=100)])
    assert done.stats is not None
    assert done.stats.alpha == 1.0
    assert done.stats.recovered == 0


def test_another_seed_is_another_text(world: World) -> None:
    sampling = SETTINGS[2]
    texts = {
        tuple(world.plain(ask(world.target, 0, replace(sampling, seed=seed))).tokens)
        for seed in range(5)
    }
    assert len(texts) == 5


def test_a_bias_bans_and_forces_tokens_that_drafts_love(world: World) -> None:
    loved = world.plain(ask(world.target, 0, SETTINGS[0])).tokens
    banned = replace(SETTINGS[0], logit_bias=tuple((token, -100.0) for token in set(loved)))
    forced = replace(SETTINGS[1], logit_bias=((loved[1], 100.0),))
    without, only = world.batch(
        [ask(world.target, 0, sampling, "table", 6) for sampling in (banned, forced)]
    )
    assert drafted([without]) > 0
    assert not set(without.tokens) & set(loved)
    assert set(only.tokens) == {loved[1]}


@pytest.mark.parametrize("draft", ["table", "own", "hybrid"])
@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_count_what_is_said_and_no_guess_that_was_wrong(
    world: World, draft: str, penalty: dict[str, float]
) -> None:
    """On a prompt that repeats itself, so that guesses are made of what is penalised."""
    free = SamplingParams(seed=1, temperature=0, logit_bias=NO_END)
    asked = ask(world.target, 7, replace(free, **penalty), draft, 6, max_tokens=60)
    (done,) = world.batch([asked])
    assert done.tokens != world.plain(replace(asked, sampling=free)).tokens
    assert done.stats is not None
    assert done.stats.drafted > done.stats.accepted > 0
    assert len(done.tokens) == 60


def test_the_best_token_alone_is_the_greedy_one_in_any_company(world: World) -> None:
    best = SamplingParams(seed=9, temperature=1, top_k=1)
    greedy = [world.plain(ask(world.target, number, SETTINGS[0])).tokens for number in range(8)]
    others = [ask(world.target, number, own, "own", 6) for number, own in enumerate(SETTINGS)]
    bests = [
        replace(ask(world.target, number, best, "own", 6), id=f"best {number}")
        for number in range(8)
    ]
    for number, asked in enumerate(bests):
        (alone,) = world.batch([asked])
        assert alone.tokens == greedy[number]
    done = world.batch([*bests, *others])[:8]
    assert [completion.tokens for completion in done] == greedy
    assert drafted(done) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_guess_that_the_target_cannot_run_spoils_no_other(tmp_path: Path, value: float) -> None:
    """A row of its embedding is no number, as those of tokens never trained may be."""
    never = 200
    folder = make_target(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][never] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    prompt = tuple(range(40, 52))
    table = NgramTable.build([(*prompt[-6:], never, 7)], vocabulary_of(folder), {})
    table.save(tmp_path / "table")
    spec = DraftSpec("wrong", "ngram", path=str(tmp_path / "table"))
    with one_thread():
        target = load_target(TargetSpec(str(folder), dtype="float32", kv_tokens=512, threads=1))
        drafts = {"wrong": InlineDraft(load_draft(spec, folder))}
        verifier = build_verifier(target, drafts, Limits(), [spec])
        plain = GenerationRequest("plain", prompt, LENGTH, SETTINGS[0])
        guessed = replace(plain, id="guessed", draft="wrong", budget=8)
        texts = [run_requests(verifier, [request]).completions[0] for request in (plain, guessed)]
    assert texts[0].tokens == texts[1].tokens
    assert never not in texts[0].tokens
