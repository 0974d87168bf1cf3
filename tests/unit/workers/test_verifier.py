"""The decode loop, over a target that is a table: any order of events, and its thread."""

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from queue import Queue
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.table_target import EOS, VOCABULARY, Letters, TableTarget, plain_tokens
from workers import scheduler, verifier
from workers.draft import DraftRequest, DraftSpec, DraftUnavailable, DraftUpdate, Features
from workers.engine.pack import Pack
from workers.engine.runner import PassOutput
from workers.engine.sampling import SamplingParams
from workers.pass_costs import PassCosts
from workers.request import Beginning, Delta, GenerationRequest
from workers.scheduler import Limits
from workers.speculation.tree import Proposal, TokenTree
from workers.verifier import EngineDown, EngineError, QueueFull, Spent, Verifier, build_verifier

Mood = str
MOODS = ("well", "away", "dead", "late", "forgetful", "mad", "miscounting")


@pytest.fixture(autouse=True, scope="module")
def little_room_ahead() -> Iterator[None]:
    """Have the pool run full of those who are admitted, and not only of those in line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_AHEAD", 2)
        yield


class Guesser:
    """A draft that knows what comes next nearly always, and behaves as its mood is.

    It reads hidden states: `felt` is what it was told of its sequences, `misled` what was wrong.
    """

    def __init__(self) -> None:
        self.mood: Mood = "well"
        self.known: dict[int, list[int]] = {}
        self.felt: dict[int, list[Features]] = {}
        self.misled: list[Features] = []  # an assertion would be taken for a fault of the draft
        self.right: Callable[[Sequence[int]], Sequence[int]] = lambda tokens: ()
        self._random = random.Random(0)

    def ready(self) -> bool:
        return self.mood != "away"

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Any]]:
        if self.mood == "dead":
            raise DraftUnavailable("dead")
        if self.mood == "forgetful":
            self.known.clear()
        answers = [self._proposal(request) for request in requests]
        return lambda timeout: self._answer(answers)

    def _answer(self, answers: list[Any]) -> list[Any]:
        if self.mood == "late":
            raise DraftUnavailable("late")
        return answers[:-1] if self.mood == "miscounting" else answers

    def _proposal(self, request: DraftRequest) -> Proposal | None:
        known = self.known.get(request.sequence, [])
        if len(known) != request.length:
            return None
        if self.mood == "mad":
            tree = TokenTree.chain([VOCABULARY + 5] * (request.budget + 3))
        else:
            tree = self._tree(self.right(known), request)
        return Proposal(tree, (0.5,) * len(tree))

    def _tree(self, right: Sequence[int], request: DraftRequest) -> TokenTree:
        """The right continuation, wrong somewhere, with wrong siblings all along."""
        tokens: list[int] = []
        parents: list[int] = []
        spine = -1
        for token in right[: request.depth]:
            level = {(token + self._random.randrange(5) // 4) % VOCABULARY}
            level.add(self._random.randrange(VOCABULARY))
            children = self._random.sample(sorted(level), len(level))
            children = children[: request.budget - len(tokens)]
            if not children:
                break
            first = len(tokens)
            tokens.extend(children)
            parents.extend([spine] * len(children))
            spine = first + self._random.randrange(len(children))
        return TokenTree.from_nodes(tokens, parents)

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            if update.start == 0:
                self.known[update.sequence], self.felt[update.sequence] = [], []
            known = self.known.get(update.sequence)
            if known is not None and len(known) == update.start:
                known.extend(update.tokens)
                if update.features is not None:
                    self._feel(known, update.features)
                    self.felt[update.sequence].append(update.features)

    def _feel(self, known: Sequence[int], features: Features) -> None:
        """Every hidden state is that of the token that stands there; the newest token has none."""
        first, last = features.start, features.start + len(features.values)
        expected = [[token, place] for place, token in enumerate(known)][first:last]
        right = first < last < len(known) and features.values[:, 0].tolist() == expected
        # Part of a larger tensor would be sent to another process with all the rest of it.
        own = features.values.untyped_storage().nbytes() == features.values.nbytes
        if not (right and own) or features.layers != TableTarget.feature_layers:
            self.misled.append(features)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self.known.pop(sequence, None)
            self.felt.pop(sequence, None)


def cut_at_stop(request: GenerationRequest, tokens: list[int]) -> list[int]:
    """Up to the token that completes the first stop string; a token is a letter."""
    for size in range(1, len(tokens) + 1):
        text = Letters().decode(tokens[:size], skip_special_tokens=True)
        if any(stop in text for stop in request.stop):
            return tokens[:size]
    return tokens


class World:
    """A verifier, a draft that guesses well, and what everybody has heard."""

    def __init__(self, limits: Limits, **target: int) -> None:
        self.target = TableTarget(**target)
        self.draft = Guesser()
        self.draft.right = self._continuation
        self.verifier: Verifier = build_verifier(
            self.target,  # type: ignore[arg-type]
            {"guesser": self.draft},
            limits,
            [DraftSpec("guesser", "eagle", path="its folder")],
        )
        self.heard: dict[str, list[Delta | BaseException]] = {}
        self.expected: dict[str, tuple[GenerationRequest, list[int]]] = {}

    def submit(self, request: GenerationRequest) -> None:
        heard: list[Delta | BaseException] = []
        self.verifier.submit(request, heard.append)
        self.heard[request.id] = heard
        self.expected[request.id] = request, cut_at_stop(request, plain_tokens(request))

    def _continuation(self, known: Sequence[int]) -> Sequence[int]:
        for request, tokens in self.expected.values():
            whole = [*request.prompt, *tokens]
            if whole[: len(known)] == list(known):
                return whole[len(known) :]
        return ()

    def tokens(self, name: str) -> list[int]:
        deltas = self.heard[name]
        return [token for d in deltas if isinstance(d, Delta) for token in d.tokens]

    def finished(self, name: str) -> bool:
        deltas = self.heard[name]
        return bool(deltas) and isinstance(deltas[-1], Delta) and bool(deltas[-1].finish_reason)

    def check(self, name: str) -> None:
        """The answer is plain decoding's, and its counters add up."""
        request, expected = self.expected[name]
        assert self.tokens(name) == expected
        deltas = [delta for delta in self.heard[name] if isinstance(delta, Delta)]
        text = Letters().decode(expected, skip_special_tokens=True)
        ends = [at for at in map(text.find, request.stop) if at >= 0]
        assert "".join(d.text for d in deltas) == (text[: min(ends)] if ends else text)
        stopped = bool(ends) or expected[-1] == EOS
        assert deltas[-1].finish_reason == ("stop" if stopped else "length")
        assert self.draft.misled == []
        stats = deltas[-1].stats
        assert stats.emitted == len(expected)
        assert stats.accepted <= stats.tested <= stats.drafted
        assert [d.finish_reason is None for d in deltas[:-1]] == [True] * (len(deltas) - 1)


def ask(name: str, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> GenerationRequest:
    values: dict[str, Any] = {
        "max_tokens": 8,
        "sampling": SamplingParams(seed=3, temperature=0.9),
        "draft": "guesser",
        "budget": 6,
    }
    return GenerationRequest(id=name, prompt=tuple(prompt), **values | changes)


PROMPTS = st.builds(  # many of them begin alike
    lambda size, rest: (*(1, 2, 3, 4, 5, 6, 7, 1, 2)[:size], *rest),
    st.sampled_from([0, 4, 8, 9]),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
)
REQUESTS = st.builds(
    GenerationRequest,
    id=st.just(""),
    prompt=PROMPTS,
    max_tokens=st.integers(1, 14),
    sampling=st.builds(
        SamplingParams,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0, 0.8, 1.2]),
        frequency_penalty=st.sampled_from([0, 0.7]),
        repetition_penalty=st.sampled_from([1, 1.5]),
    ),
    stop=st.lists(st.sampled_from(["a", "bc", "dd", "gef"]), max_size=2).map(tuple),
    draft=st.sampled_from(["guesser", "guesser", None]),
    budget=st.integers(0, 8),
    adaptive=st.booleans(),
)


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Requests come, leave and are served, drafts and passes fail: the books always balance."""

    HOST_PAGES = 0

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(max_running=3, max_queued=4, prefill_tokens=5)
        self.world = World(limits, pages=11, page_size=4, host_pages=self.HOST_PAGES)
        self.names = 0
        self.cancelled: dict[str, int] = {}

    @rule(request=REQUESTS)
    def submit(self, request: GenerationRequest) -> None:
        request = replace(request, id=f"{self.names}")
        gauges = self.world.verifier.gauges()
        try:
            self.world.submit(request)
        except QueueFull:
            assert gauges.running + gauges.waiting >= 4
        else:
            self.names += 1

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = f"{data.draw(st.integers(0, self.names - 1))}"
        self.world.verifier.cancel(name)
        self.cancelled.setdefault(name, len(self.world.heard[name]))

    @rule(mood=st.sampled_from(MOODS))
    def change_mood(self, mood: Mood) -> None:
        self.world.draft.mood = mood

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.verifier.step()

    @rule()
    def fail_a_pass(self) -> None:
        self.world.target.failing = RuntimeError("out of memory")
        before = {name: len(heard) for name, heard in self.world.heard.items()}
        running = self.world.verifier._scheduler.running
        try:
            self.world.verifier.step()
        except RuntimeError as error:
            in_the_pass = {sequence.request.id for sequence in running.values()}
            self.world.verifier._fail_pass(f"{error}")
            for name, count in before.items():
                failed = [isinstance(item, EngineError) for item in self.world.heard[name][count:]]
                assert failed == ([True] if name in in_the_pass else [])
        self.world.target.failing = None

    def over(self, name: str) -> bool:
        heard = self.world.heard[name]
        return self.world.finished(name) or (bool(heard) and isinstance(heard[-1], EngineError))

    @invariant()
    def the_books_balance(self) -> None:
        pool = self.world.target.pool
        pool.check_integrity()
        gauges = self.world.verifier.gauges()
        assert gauges.running == len(pool.sequences()) <= 3
        assert gauges.kv_pages_in_use == pool.pages_in_use
        if not gauges.running:
            assert pool.pages_in_use == 0

    @invariant()
    def finished_answers_are_plain_decodings(self) -> None:
        for name in self.world.heard:
            if self.world.finished(name):
                self.world.check(name)

    @invariant()
    def every_hidden_state_is_that_of_its_token(self) -> None:
        assert self.world.draft.misled == []

    @invariant()
    def the_cancelled_hear_nothing_more(self) -> None:
        for name, heard in self.cancelled.items():
            assert len(self.world.heard[name]) == heard

    def teardown(self) -> None:
        while self.world.verifier.step():
            pass
        for name in self.world.heard:
            assert self.over(name) or name in self.cancelled
        self.the_books_balance()
        gauges = self.world.verifier.gauges()
        assert (gauges.running, gauges.waiting, gauges.kv_pages_in_use) == (0, 0, 0)
        self.world.draft.mood = "well"
        self.world.submit(
            ask("last")
        )  # the next request is served at once, by a draft that is back
        while self.world.verifier.step():
            pass
        self.world.check("last")
        assert self.world.draft.known == {}


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=40, stateful_step_count=25)


class AnyOrderWithAHost(AnyOrderOfEvents):
    """What makes room for others may come back."""

    HOST_PAGES = 4


TestAnyOrderWithAHost = AnyOrderWithAHost.TestCase
TestAnyOrderWithAHost.settings = settings(max_examples=20, stateful_step_count=25)


# -- single events -------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    return World(Limits(max_running=2, max_queued=2))


def run(world: World) -> None:
    while world.verifier.step():
        pass


def test_a_good_draft_saves_steps(world: World) -> None:
    world.submit(ask("drafted", max_tokens=30, sampling=SamplingParams(seed=9)))
    run(world)
    steps = world.verifier.gauges().steps
    assert steps < len(world.tokens("drafted"))
    world.check("drafted")
    world.submit(ask("plain", max_tokens=30, sampling=SamplingParams(seed=9), budget=0))
    run(world)
    assert world.verifier.gauges().steps - steps == len(world.tokens("plain"))
    assert world.tokens("plain") == world.tokens("drafted")


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("host_pages", [0, 9])
def test_with_a_full_pool_the_youngest_waits_and_all_texts_are_the_same(
    budget: int, host_pages: int
) -> None:
    world = World(Limits(max_running=3), pages=9, host_pages=host_pages)
    verifier = world.verifier
    for number in range(3):
        sampling = SamplingParams(seed=number, temperature=0.9, logit_bias=((EOS, -100.0),))
        world.submit(ask(f"{number}", max_tokens=24, sampling=sampling, budget=budget))
    running = []
    while verifier.step():
        running.append(verifier.gauges().running)
        world.target.pool.check_integrity()
    for number in range(3):
        world.check(f"{number}")
    assert running[0] == 3
    assert any(after < before for before, after in pairwise(running)), "somebody was sent back"
    assert any(after > before for before, after in pairwise(running)), "and came back"
    assert bool(world.target.recalled) == bool(host_pages)


def test_a_prompt_that_was_read_before_is_not_read_again(world: World) -> None:
    prompt = (1, 2, 3, 4, 5, 6) * 3
    world.submit(ask("first", prompt))
    run(world)
    rows = []
    forward = world.target.forward

    def counted(pack: Pack) -> PassOutput:
        rows.append(len(pack.tokens()))
        return forward(pack)

    world.target.forward = counted  # type: ignore[method-assign]
    world.submit(ask("again", prompt, budget=0))
    run(world)
    world.check("first")
    world.check("again")
    assert rows[0] == 2  # of 18 tokens, four pages of four are there


def test_after_a_failed_pass_nothing_that_was_kept_is_trusted() -> None:
    """Whatever it was to copy, to the host or back or into place, may not be there."""
    world, prompt = World(Limits(), host_pages=4), (1, 2, 3, 4, 5, 6) * 3
    world.submit(ask("first", prompt))
    run(world)
    assert world.target.pool.open(99, prompt) == 16
    world.target.pool.close(99)
    world.target.failing = RuntimeError("out of memory")
    world.submit(ask("failing", prompt))
    with pytest.raises(RuntimeError, match="out of memory"):
        world.verifier.step()
    world.verifier._fail_pass("out of memory")
    assert world.target.pool.open(99, prompt) == world.target.pool.recall(99, prompt) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=0, temperature=0),
        SamplingParams(seed=3, temperature=0.9),
        SamplingParams(seed=5, temperature=1.2, repetition_penalty=1.3, frequency_penalty=0.5),
    ],
)
def test_another_verifier_goes_on_wherever_an_answer_was_left(sampling: SamplingParams) -> None:
    whole = World(Limits())
    sampling = replace(sampling, logit_bias=((EOS, -100.0),))
    request = ask("whole", max_tokens=40, sampling=sampling)
    whole.submit(request)
    run(whole)
    whole.check("whole")
    deltas = [delta for delta in whole.heard["whole"] if isinstance(delta, Delta)]
    assert len(deltas) > 3
    for left in range(1, len(deltas)):
        tokens = tuple(token for delta in deltas[:left] for token in delta.tokens)
        other = World(Limits(prefill_tokens=7))
        other.submit(replace(request, beginning=Beginning(tokens, deltas[left - 1].stats)))
        run(other)
        other.heard["whole"][:0] = deltas[:left]
        other.check("whole")
        assert other.heard["whole"][-1].stats.resumed == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_tokens": (2, 5)},
        {"ignore_eos": True},
        {"min_tokens": 12},
        {"min_tokens": 9, "stop_tokens": (1, 2, 3)},
        {"min_tokens": 40, "ignore_eos": True, "stop_tokens": (4,)},
    ],
)
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_what_ends_an_answer_is_the_same_with_guesses(
    fields: dict[str, Any], temperature: float
) -> None:
    for seed in range(8):
        world = World(Limits())
        sampling = SamplingParams(seed=seed, temperature=temperature)
        world.submit(ask("a", prompt=(seed % 7 + 1, 2), max_tokens=40, sampling=sampling, **fields))
        run(world)
        (_, expected), said = world.expected["a"], world.tokens("a")
        assert said == expected
        assert len(said) >= fields.get("min_tokens", 0)
        drafted = world.heard["a"][-1].stats.drafted  # type: ignore[union-attr]
        assert drafted > 0


def test_a_stop_token_that_the_target_does_not_have_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="^stop_token_ids: "):
        world.submit(ask("a", stop_tokens=(VOCABULARY,)))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_logprobs_are_plain_decodings_for_every_token(temperature: float) -> None:
    sampling = SamplingParams(seed=4, temperature=temperature)
    wish = {"max_tokens": 30, "ignore_eos": True, "logprobs": 3}
    told: list[list[Any]] = []
    for budget in (0, 6):
        world = World(Limits())
        world.submit(ask("a", sampling=sampling, budget=budget, **wish))
        run(world)
        deltas = [delta for delta in world.heard["a"] if isinstance(delta, Delta)]
        assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas)
        told.append([each for delta in deltas for each in delta.logprobs])
    assert told[0] == told[1]
    assert [each.token for each in told[0]] == world.tokens("a") == world.expected["a"][1]
    assert temperature or all(each.top[0] == (each.token, each.logprob) for each in told[0])


def test_only_a_traced_request_hears_how_long_its_steps_took(world: World) -> None:
    world.submit(ask("traced", trace="00-1-2-01"))
    world.submit(ask("other"))
    run(world)
    for name, traced in (("traced", True), ("other", False)):
        deltas = [delta for delta in world.heard[name] if isinstance(delta, Delta)]
        assert len(deltas) > 1
        assert all((delta.took is not None) is traced for delta in deltas)
        assert all(d.took is None or 0 <= d.took.draft_s + d.took.verify_s < 60 for d in deltas)
        world.check(name)


def test_the_last_token_needs_no_guess(world: World) -> None:
    depths: list[int] = []
    propose = world.draft.propose

    def noting(requests: Sequence[DraftRequest]) -> Callable[[float], list[Any]]:
        depths.extend(request.depth for request in requests)
        return propose(requests)

    world.draft.propose = noting  # type: ignore[method-assign]
    world.submit(ask("one", max_tokens=1))
    run(world)
    assert depths == []
    world.draft.mood = "mad"  # one token a step
    request = ask("four", max_tokens=4, sampling=SamplingParams(seed=0, logit_bias=((EOS, -100),)))
    world.submit(request)
    run(world)
    world.check("four")
    assert depths == [3, 2, 1]


def spans(features: Sequence[Features]) -> list[tuple[int, int]]:
    return [(own.start, own.start + len(own.values)) for own in features]


def test_hidden_states_reach_the_draft_in_order_and_without_a_gap() -> None:
    """Those of a prompt chunk by chunk, with nothing new said; then those of each step's root and
    of the guesses that were right, wherever they stood in the tree.
    """
    world = World(Limits(prefill_tokens=5), pages=40)
    felt: list[Features] = []
    commit = world.draft.commit

    def noting(updates: Sequence[DraftUpdate]) -> None:
        felt.extend(update.features for update in updates if update.features is not None)
        commit(updates)

    world.draft.commit = noting  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]
    sampling = SamplingParams(seed=9, logit_bias=((EOS, -100),))
    world.submit(ask("r", prompt, max_tokens=20, sampling=sampling))
    run(world)
    world.check("r")
    *chunks, last = spans(felt)[:3]
    assert chunks == [(0, 5), (5, 10)]
    ends = [stop for _, stop in spans(felt)]
    assert [start for start, _ in spans(felt)] == [0, *ends[:-1]]
    assert last[0] == 10
    sizes = {stop - start for start, stop in spans(felt)[3:]}
    assert max(sizes) > 1, "guesses were right"
    steps = world.verifier.gauges().steps
    assert len(felt) == steps - 1, "once the answer is over there is nobody to tell"
    assert world.verifier.gauges().draft_faults == {}


def test_a_draft_that_is_back_hears_all_tokens_and_hidden_states_from_then_on(
    world: World,
) -> None:
    sampling = SamplingParams(seed=9, logit_bias=((EOS, -100),))
    world.submit(ask("r", max_tokens=30, sampling=sampling))
    for mood in ("well", "away", "well"):
        world.draft.mood = mood
        world.verifier.step()
        world.verifier.step()
    (known,), (felt,) = world.draft.known.values(), world.draft.felt.values()
    assert known == [1, 2, 3, *world.tokens("r")]
    (start, _), *_ = spans(felt)
    assert start > 3
    assert spans(felt)[-1][1] == len(known) - 1
    assert world.verifier.gauges().draft_faults == {}


@pytest.mark.parametrize("mood", ["dead", "late", "mad", "miscounting"])
def test_a_bad_draft_is_counted_and_its_sequences_decode_plainly(world: World, mood: str) -> None:
    world.draft.mood = mood
    world.submit(ask("r"))
    run(world)
    world.check("r")
    last = world.heard["r"][-1]
    assert isinstance(last, Delta)
    assert last.stats is not None
    assert last.stats.drafted == 0
    faults = world.verifier.gauges().draft_faults
    assert faults["guesser"] >= 1


def test_a_draft_that_comes_back_in_the_middle_drafts_again(world: World) -> None:
    request = ask("r", max_tokens=30, sampling=SamplingParams(seed=9))
    world.draft.mood = "away"
    world.submit(request)
    world.verifier.step()
    world.verifier.step()
    world.draft.mood = "well"
    run(world)
    world.check("r")
    last = world.heard["r"][-1]
    assert isinstance(last, Delta)
    assert last.stats is not None
    assert last.stats.accepted > 0
    assert world.verifier.gauges().draft_faults == {}


def test_the_line_is_bounded_and_places_in_the_batch_do_not_count(world: World) -> None:
    for number in range(4):  # two run, two wait
        world.submit(ask(f"{number}"))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        world.submit(ask("one too many"))
    world.verifier.step()
    with pytest.raises(QueueFull):
        world.submit(ask("still"))
    world.verifier.cancel("0")
    world.verifier.step()
    world.submit(ask("now"))
    run(world)
    for name in ("1", "2", "3", "now"):
        world.check(name)


def test_with_no_line_at_all_the_batch_is_open() -> None:
    world = World(Limits(max_running=2, max_queued=0))
    world.submit(ask("0"))
    world.submit(ask("1"))
    with pytest.raises(QueueFull):
        world.submit(ask("2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 62}, r"^max_tokens: 62 do not fit: the prompt has 3 tokens and the conte"),
        (
            {"max_tokens": 60, "budget": 30},
            r"^max_tokens: prompt, answer and tree need 93 KV",
        ),
        ({"prompt": (1, VOCABULARY)}, r"^prompt: token ids must be from 0 to 7"),
        ({"prompt": (-1,)}, r"^prompt: token ids must be from 0 to 7"),
        ({"draft": "nobody"}, r"^speculation\.draft: no draft 'nobody'; there is: guesser"),
        ({"sampling": SamplingParams(seed=0, top_k=9)}, r"^top_k: 9 is not at most"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_by_name(
    world: World, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        world.submit(ask("r", **changes))
    world.submit(ask("next"))
    run(world)
    world.check("next")


def test_seconds_are_told_by_what_they_went_into(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that ticks whenever somebody looks: once before the drafts, after them, and last."""
    monkeypatch.setattr("workers.verifier.perf_counter", map(float, count()).__next__)
    world.submit(ask("r"))
    run(world)
    steps = world.verifier.gauges().steps
    assert steps > 1
    assert world.verifier.spent() == Spent(draft_s=steps, pass_s=steps)


def test_what_was_spent_is_known_once_the_step_is_over(world: World) -> None:
    told: list[Spent] = []
    asker = threading.Thread(target=lambda: told.append(world.verifier.spent()))
    settle = world.verifier._settle

    def asked_meanwhile(*arguments: Any) -> Delta | None:
        asker.start()
        asker.join(timeout=0.05)
        assert told == []
        return settle(*arguments)

    world.verifier._settle = asked_meanwhile  # type: ignore[method-assign]
    world.submit(ask("r", max_tokens=1))
    world.verifier.step()
    asker.join()
    assert told == [world.verifier.spent()] != [Spent()]


def test_prefixes_are_forgotten_before_the_next_step_and_only_when_asked(world: World) -> None:
    read: list[int] = []
    forward = world.target.forward

    def watched(pack: Pack) -> PassOutput:
        read.append(len(pack.tokens()))
        return forward(pack)

    world.target.forward = watched  # type: ignore[method-assign]
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    firsts = []
    for name in ("new", "known", "forgotten", "known again"):
        if name == "forgotten":
            world.verifier.forget_prefixes()
        read.clear()
        world.submit(ask(name, prompt, max_tokens=1))
        run(world)
        firsts.append(read[0])
    assert firsts == [9, 1, 9, 1]


def test_cancelling_before_the_first_step_and_for_unknown_ids(world: World) -> None:
    world.submit(ask("r"))
    world.verifier.cancel("r")
    world.verifier.cancel("never heard of")
    assert not world.verifier.step()
    assert world.heard["r"] == []
    assert world.verifier.gauges().waiting == 0


# -- its thread ----------------------------------------------------------------------------------


@pytest.fixture
def running(world: World) -> Iterator[World]:
    world.verifier.start()
    first = ask("first")
    assert wait_for(world, first) is None  # what passes cost is known before anybody is served
    del world.heard[first.id], world.expected[first.id]
    yield world
    if world.verifier._thread is not None:
        world.verifier.stop()


def wait_for(world: World, request: GenerationRequest) -> BaseException | None:
    """Submit and wait for the end; the error, if that is how it ended."""
    ended: Queue[BaseException | None] = Queue()
    heard: list[Delta | BaseException] = []
    world.heard[request.id] = heard
    world.expected[request.id] = request, cut_at_stop(request, plain_tokens(request))

    def sink(item: Delta | BaseException) -> None:
        heard.append(item)
        if isinstance(item, BaseException):
            ended.put(item)
        elif item.finish_reason:
            ended.put(None)

    world.verifier.submit(request, sink)
    return ended.get(timeout=60)


def test_many_threads_are_served_by_one_loop(running: World) -> None:
    """Each asks and sometimes drops out; a full queue is an answer too."""
    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for turn in range(3):
                request = ask(f"{number}.{turn}", sampling=SamplingParams(seed=number))
                try:
                    assert wait_for(running, request) is None
                except QueueFull:
                    running.verifier.cancel(request.id)
                    del running.heard[request.id]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert running.heard
    for name in running.heard:
        running.check(name)
    assert running.verifier.healthy()


def test_a_failed_pass_ends_its_requests_and_the_next_are_served(running: World) -> None:
    running.target.failing = RuntimeError("out of memory")
    error = wait_for(running, ask("unlucky"))
    assert isinstance(error, EngineError)
    assert not isinstance(error, EngineDown), "it would fail the next engine as well"
    assert "out of memory" in str(error)
    assert running.verifier.healthy(), "once may have been the request's fault"
    assert running.target.pool.pages_in_use == 0
    running.target.failing = None
    assert wait_for(running, ask("next")) is None
    running.check("next")


def test_failing_again_and_again_is_unhealthy_until_a_pass_succeeds(running: World) -> None:
    running.target.failing = RuntimeError("broken")
    for number in range(3):
        wait_for(running, ask(f"{number}"))
    assert not running.verifier.healthy()
    running.verifier.cancel("wakes the loop")
    assert not running.verifier.healthy(), "idling is no success"
    running.target.failing = None
    assert wait_for(running, ask("next")) is None
    assert running.verifier.healthy()


def test_with_several_ranks_one_failure_is_enough(running: World) -> None:
    running.target.sharded = True
    running.target.failing = RuntimeError("a rank is gone")
    wait_for(running, ask("r"))
    assert not running.verifier.healthy()


def test_after_a_failure_of_several_ranks_nothing_runs_on_them(running: World) -> None:
    running.target.sharded = True
    running.target.failing = RuntimeError("a rank is gone")
    assert isinstance(wait_for(running, ask("r")), EngineDown), "others can go on with it"
    running.target.failing = None
    with pytest.raises(EngineDown, match="stopped"):
        running.submit(ask("next"))


def test_passes_that_cannot_be_timed_are_served_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_target: object) -> PassCosts:
        raise RuntimeError("no memory")

    monkeypatch.setattr(verifier, "measure_pass_costs", fail)
    world.submit(ask("a", adaptive=True))
    while world.verifier.step():
        pass
    world.check("a")
    other = World(Limits())
    other.target.sharded = True
    other.submit(ask("b", adaptive=True))
    with pytest.raises(RuntimeError, match="no memory"):
        other.verifier.step()  # its ranks are out of step


def test_one_in_line_outlives_the_failed_pass_of_another(world: World) -> None:
    names = ["first", "second", "in line"]
    for name in names:
        world.submit(ask(name))
    world.target.failing = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        world.verifier.step()
    world.verifier._fail_pass("out of memory")
    world.target.failing = None
    assert all(isinstance(world.heard[name][-1], EngineError) for name in names[:-1])
    while world.verifier.step():
        pass
    world.check(names[-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_end_their_own_request_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, temperature: float, bad: float
) -> None:
    world.submit(ask("bad", sampling=SamplingParams(seed=0, temperature=temperature)))
    world.submit(ask("good"))
    forward = world.target.forward

    def overflowing(pack: Pack) -> PassOutput:
        output = forward(pack)
        if len(pack.segments) == 2:
            output.logits[0, 3] = bad
        return output

    monkeypatch.setattr(world.target, "forward", overflowing)
    while world.verifier.step():
        pass
    assert "not finite" in str(world.heard["bad"][-1])
    world.check("good")
    assert world.target.pool.pages_in_use == 0


def test_stopping_ends_what_is_unfinished_and_takes_nothing_new(world: World) -> None:
    world.submit(ask("running"))
    world.verifier.step()
    world.submit(ask("waiting"))
    world.verifier.stop()
    assert isinstance(world.heard["running"][-1], EngineDown)
    assert isinstance(world.heard["waiting"][-1], EngineDown)
    assert world.target.closed
    assert world.target.pool.pages_in_use == 0
    assert not world.verifier.healthy()
    with pytest.raises(EngineDown, match="stopped"):
        world.submit(ask("too late"))


def test_it_is_healthy_while_its_thread_lives(world: World) -> None:
    assert not world.verifier.healthy()
    world.verifier.start()
    assert world.verifier.healthy()
    world.verifier.stop()
    assert not world.verifier.healthy()
