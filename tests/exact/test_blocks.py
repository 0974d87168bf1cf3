"""What ends, or is asked for, in the middle of an accepted block: as plain decoding has it.

The draft here knows what the target will say, and is right as many times in a row as a test wants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tiny import DEVICE, one_thread
from workers.draft import DraftRequest, DraftUpdate, InlineDraft
from workers.engine.sampling import SamplingParams
from workers.request import Delta, GenerationRequest, TokenLogprob
from workers.scheduler import Limits
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal, TokenTree
from workers.target import Target, TargetSpec, load_target
from workers.verifier import Verifier, build_verifier

GAMMA = 6
NO_END = ((0, -100.0),)
GREEDY = SamplingParams(seed=1, temperature=0, logit_bias=NO_END)
SEEDED = SamplingParams(seed=2, temperature=0.9, logit_bias=NO_END)


class Knows:
    """Chains of right guesses, then a wrong one. `texts`: prompt and answer, and how many of each
    chain are right.
    """

    name = "knows"

    def __init__(self) -> None:
        self.texts: list[tuple[list[int], int]] = []
        self._known: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        return [self._proposal(request) for request in requests]

    def _proposal(self, request: DraftRequest) -> Proposal | None:
        known = self._known.get(request.sequence, [])
        for text, right in self.texts:
            if len(known) == request.length and text[: len(known)] == known:
                rest = text[len(known) :]
                guesses = [*rest[:right], *((token + 1) % 256 for token in rest[right:])]
                guesses = guesses[: min(request.budget, request.depth)]
                return Proposal(TokenTree.chain(guesses), (0.5,) * len(guesses))
        return None

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            self._known[update.sequence] = [
                *self._known.get(update.sequence, [])[: update.start],
                *update.tokens,
            ]

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._known.pop(sequence, None)


@dataclass
class Heard:
    """An answer, delta by delta."""

    deltas: list[Delta] = field(default_factory=list)

    def take(self, delta: Delta | BaseException) -> None:
        if isinstance(delta, BaseException):
            raise delta
        self.deltas.append(delta)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [each for delta in self.deltas for each in delta.logprobs]

    @property
    def last(self) -> Delta:
        return self.deltas[-1]

    @property
    def ended_inside(self) -> bool:
        """Whether its last token was a guess, so that it ended before its block did."""
        before = self.deltas[-2].stats.accepted if len(self.deltas) > 1 else 0
        return self.last.stats.accepted - before == len(self.last.tokens)


@dataclass
class World:
    folder: Path
    target: Target
    draft: Knows = field(default_factory=Knows)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier: Verifier = build_verifier(
            self.target,
            {"knows": InlineDraft(self.draft)},
            Limits(max_running=32),
            on_verdict=lambda _proposal, verdict: self.verdicts.append(verdict),
        )

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.target.tokenizer(text)["input_ids"])

    def run(self, requests: Sequence[GenerationRequest]) -> list[Heard]:
        """All of them at once."""
        heard = [Heard() for _ in requests]
        for number, (request, own) in enumerate(zip(requests, heard, strict=True)):
            self.verifier.submit(replace(request, id=f"{number}"), own.take)
        while self.verifier.step():
            pass
        self.target.pool.check_integrity()
        assert self.target.pool.pages_in_use == 0
        return heard

    def plain(self, request: GenerationRequest) -> Heard:
        (heard,) = self.run([replace(request, draft=None, budget=0)])
        assert heard.last.stats.drafted == 0
        return heard

    def learn(self, request: GenerationRequest, right: int = 99) -> Heard:
        """What it says plainly, which the draft knows from now on, and junk behind it."""
        heard = self.plain(request)
        self.draft.texts.append(([*request.prompt, *heard.tokens, 40, 41, 42, 43], right))
        return heard


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Iterator[Target]:
    with one_thread():
        spec = TargetSpec(str(tiny_folder), "float32", device=DEVICE, kv_tokens=8192, threads=1)
        yield load_target(spec)


@pytest.fixture
def world(tiny_folder: Path, target: Target) -> World:
    return World(tiny_folder, target)


def ask(prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> GenerationRequest:
    return GenerationRequest("", tuple(prompt), 30, sampling, draft="knows", budget=GAMMA)


def same(one: Heard, other: Heard) -> None:
    """All but how fast it came."""
    assert one.tokens == other.tokens
    assert one.text == other.text
    assert one.last.finish_reason == other.last.finish_reason
    assert one.last.stats.emitted == other.last.stats.emitted == len(one.tokens)
    logprobs = [
        [each for delta in heard.deltas for each in delta.logprobs] for heard in (one, other)
    ]
    assert logprobs[0] == logprobs[1]
    assert len(logprobs[0]) in (0, len(one.tokens))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stop_that_any_token_of_a_block_completes(world: World, sampling: SamplingParams) -> None:
    """Alone, with the cap at the same token and one token before it; with all that is told of."""
    request = replace(ask(world.ids("the thing and the other"), sampling), logprobs=2)
    whole = world.learn(request)
    inside = 0
    for size in range(1, 2 * GAMMA + 1):
        until = world.target.tokenizer.decode(whole.tokens[:size])
        stopped = replace(request, stop=(until[-2:],))
        expected = world.plain(stopped)
        assert expected.last.finish_reason == "stop"
        assert expected.text == whole.text[: whole.text.index(until[-2:])]
        at = len(expected.tokens)
        caps = [cap for cap in (at, at - 1) if cap]
        guessed, *capped = world.run([stopped, *(replace(stopped, max_tokens=cap) for cap in caps)])
        same(guessed, expected)
        for cap, heard in zip(caps, capped, strict=True):
            same(heard, world.plain(replace(stopped, max_tokens=cap)))
        assert capped[0].last.finish_reason == "stop"
        assert guessed.last.stats.drafted > 0
        inside += guessed.ended_inside
    assert inside >= GAMMA, "most of them ended in the middle of a block"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_may_become_a_stop_is_held_back_and_comes_if_it_does_not(
    world: World, sampling: SamplingParams
) -> None:
    request = ask(world.ids("sing, and sing again"), sampling)
    whole = world.learn(request)
    held = 0
    for at in range(len(whole.text) - 3):
        (heard,) = world.run([replace(request, stop=(whole.text[at : at + 3] + "\N{SNOWMAN}",))])
        same(heard, whole)
        assert heard.last.stats.drafted > 0
        held += [delta.text for delta in heard.deltas] != [
            delta.text for delta in world.run([request])[0].deltas
        ]
    assert held > 0


def test_an_end_that_was_guessed_ends_the_answer(world: World) -> None:
    """Whatever was guessed behind it, and accepted or not."""
    inside = 0
    for seed in range(60):
        sampling = SamplingParams(seed=seed, temperature=1, logit_bias=((0, 4.0),))
        request = ask(world.ids(f"a {seed}"), sampling)
        plain = world.learn(request)
        (heard,) = world.run([request])
        same(heard, plain)
        if plain.tokens[-1] == 0 and heard.ended_inside and len(heard.last.tokens) > 1:
            assert heard.last.finish_reason == "stop"
            assert heard.last.stats.recovered + heard.last.stats.bonus < len(heard.deltas)
            inside += 1
    assert inside > 5


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_no_request_of_a_batch_moves_what_another_has_accepted(
    world: World, sampling: SamplingParams
) -> None:
    """0, 1, 3 and 5 guesses are accepted in one and the same pass."""
    rights = (0, 1, 3, 5)
    requests = [
        replace(ask(world.ids(f"the {word} and the"), sampling), logprobs=1)
        for word in ("king", "ring", "song", "wing")
    ]
    plain = [world.learn(own, right) for own, right in zip(requests, rights, strict=True)]
    world.verdicts.clear()
    for heard, expected in zip(world.run(requests), plain, strict=True):
        same(heard, expected)
    passes = zip(*(world.verdicts[at:] for at in range(4)), strict=False)
    lengths = [tuple(len(verdict.path) for verdict in four) for four in passes]
    assert lengths[:13:4] == [rights] * 4


def test_logprobs_are_the_targets_whatever_was_accepted(world: World) -> None:
    """By transformers: of the raw scores, so bias and temperature change nothing of them."""
    rights = (0, 3, 5)
    prompts = [world.ids(f"{word} is") for word in ("the thing", "the sea", "the song")]
    for sampling in (GREEDY, SEEDED, replace(SEEDED, temperature=1.5, top_k=40)):
        world.draft.texts.clear()
        requests = [replace(ask(prompt, sampling), logprobs=3) for prompt in prompts]
        plain = [world.learn(own, right) for own, right in zip(requests, rights, strict=True)]
        done = world.run(requests)
        accepted = [heard.last.stats.accepted for heard in done]
        assert accepted[0] == 0 < accepted[1] < accepted[2]
        for request, heard, expected in zip(requests, done, plain, strict=True):
            same(heard, expected)
            laws = laws_of(world, [*request.prompt, *heard.tokens])[len(request.prompt) - 1 :]
            told = heard.logprobs
            assert [each.token for each in told] == heard.tokens
            for law, each in zip(laws, told, strict=False):
                assert each.logprob == pytest.approx(float(law[each.token]), abs=1e-3)
                values, _ = law.topk(3)
                assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-3)
                if sampling.greedy and each.top[0][0] != 0:
                    assert each.top[0] == (each.token, each.logprob)


def laws_of(world: World, tokens: Sequence[int]) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(world.folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        laws: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return laws
