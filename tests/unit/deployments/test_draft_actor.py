"""The decode loop's end of a draft actor, with an actor that does as it is told."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments import draft_actor
from deployments.draft_actor import (
    FIRST_REST_S,
    PING_INTERVAL_S,
    RELOAD_INTERVAL_S,
    DraftWorker,
    RayDraft,
)
from workers.draft import DraftRequest, DraftSpec, DraftUnavailable, DraftUpdate
from workers.speculation.tree import Proposal

ROOT = Path(__file__).parents[3]
ASK = [DraftRequest(sequence=1, length=3, budget=4, depth=4)]


class Ref:
    """An object ref whose value is set by the test."""

    def __init__(self) -> None:
        self.value: Future[Any] = Future()

    def future(self) -> "Future[Any]":
        return self.value


class Method:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refs: list[Ref] = []

    def remote(self, *args: Any) -> Ref:
        self.calls.append(args)
        self.refs.append(Ref())
        return self.refs[-1]

    def answer(self, value: Any = None) -> None:
        """Ends the newest call, with a value or an exception."""
        future = self.refs[-1].value
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)


class Actor:
    def __init__(self) -> None:
        self.ping, self.propose, self.forget = Method(), Method(), Method()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("propose", "trace", cause)


@pytest.fixture
def actor() -> Actor:
    return Actor()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def draft(actor: Actor, clock: Clock) -> RayDraft:
    """One that is loaded."""
    draft = RayDraft("code", actor, clock)
    actor.ping.answer()
    assert draft.ready()
    return draft


def test_it_is_ready_once_it_is_loaded(actor: Actor, clock: Clock) -> None:
    draft = RayDraft("code", actor, clock)
    assert not draft.ready()
    actor.ping.answer()
    assert draft.loading.done()
    assert draft.ready()


def test_what_the_target_said_travels_with_the_next_question(draft: RayDraft, actor: Actor) -> None:
    first, second = DraftUpdate(1, 0, (5, 6)), DraftUpdate(1, 2, (7,))
    draft.commit([first])
    draft.commit([second])
    wait = draft.propose(ASK)
    assert actor.propose.calls == [([first, second], ASK)]
    actor.propose.answer([Proposal.empty()])
    assert wait(1.0) == [Proposal.empty()]
    draft.propose(ASK)
    assert actor.propose.calls[1] == ([], ASK)


def test_forgetting_is_told_at_once(draft: RayDraft, actor: Actor) -> None:
    draft.commit([DraftUpdate(1, 0, (5,)), DraftUpdate(2, 0, (6,))])
    draft.forget([1])
    assert actor.forget.calls == [([1],)]
    draft.propose(ASK)
    assert actor.propose.calls == [([DraftUpdate(2, 0, (6,))], ASK)]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda actor: None, "did not answer within 10 ms"),
        (lambda actor: actor.propose.answer(ActorDiedError()), "died"),
        (lambda actor: actor.propose.answer(task_error(KeyError("x"))), "failed: KeyError('x')"),
    ],
)
def test_after_a_fault_it_is_away_until_a_ping_comes_back(
    draft: RayDraft, actor: Actor, clock: Clock, end: Callable[[Actor], None], why: str
) -> None:
    wait = draft.propose(ASK)
    end(actor)
    with pytest.raises(DraftUnavailable, match="draft code") as caught:
        wait(0.01)
    assert why in str(caught.value)
    clock.now += FIRST_REST_S
    assert not draft.ready()
    actor.ping.answer()
    assert draft.ready()


def test_one_that_is_late_again_and_again_rests_longer_and_longer(
    draft: RayDraft, actor: Actor, clock: Clock
) -> None:
    rests = []
    for _ in range(9):
        with pytest.raises(DraftUnavailable):
            draft.propose(ASK)(0)
        actor.ping.answer()
        since = clock.now
        while not draft.ready():
            clock.now += 0.5
        rests.append(clock.now - since)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    wait = draft.propose(ASK)
    actor.propose.answer([Proposal.empty()])
    wait(0)
    with pytest.raises(DraftUnavailable):
        draft.propose(ASK)(0)
    actor.ping.answer()
    clock.now += FIRST_REST_S
    assert draft.ready(), "an answer in time forgives all"


def test_nothing_is_kept_for_a_draft_that_is_away(
    draft: RayDraft, actor: Actor, clock: Clock
) -> None:
    draft.commit([DraftUpdate(1, 0, (5,))])
    wait = draft.propose(ASK)
    draft.commit([DraftUpdate(1, 1, (6,))])
    with pytest.raises(DraftUnavailable):
        wait(0)
    draft.commit([DraftUpdate(1, 2, (7,))])
    draft.forget([1])
    assert actor.forget.calls == []
    actor.ping.answer()
    clock.now += FIRST_REST_S
    assert draft.ready()
    draft.propose(ASK)
    assert actor.propose.calls[-1] == ([], ASK)


def test_a_draft_whose_loading_failed_is_asked_rarely(actor: Actor, clock: Clock) -> None:
    draft = RayDraft("code", actor, clock)
    actor.ping.answer(task_error(MemoryError()))
    clock.now += RELOAD_INTERVAL_S - 0.1
    assert not draft.ready()
    assert len(actor.ping.calls) == 1
    clock.now += 0.1
    assert not draft.ready()
    assert len(actor.ping.calls) == 2


def test_a_dead_draft_is_asked_again_now_and_then(
    draft: RayDraft, actor: Actor, clock: Clock
) -> None:
    with pytest.raises(DraftUnavailable):
        draft.propose(ASK)(0)
    actor.ping.answer(ActorDiedError())
    assert not draft.ready()
    assert len(actor.ping.calls) == 2
    clock.now += PING_INTERVAL_S
    assert not draft.ready()
    assert len(actor.ping.calls) == 3
    actor.ping.answer()
    clock.now += FIRST_REST_S
    assert draft.ready()


class Recorder:
    """A draft that writes down what it hears."""

    name = "code"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def propose(self, requests: Any) -> list[Proposal | None]:
        self.heard.append(("propose", requests))
        return [Proposal.empty()]

    def commit(self, updates: Any) -> None:
        self.heard.append(("commit", updates))

    def forget(self, sequences: Any) -> None:
        self.heard.append(("forget", sequences))


@pytest.fixture
def worker() -> DraftWorker:
    return DraftWorker(DraftSpec("code", "ngram"), Path("/target"), "float32", 1)


def test_the_worker_loads_at_the_first_ping_only(
    worker: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(spec: DraftSpec, target: Path, *, dtype: str, threads: int) -> Recorder:
        loaded.append((spec.name, target, dtype, threads))
        return Recorder()

    monkeypatch.setattr(draft_actor, "load_draft", load)
    worker.ping()
    worker.ping()
    assert loaded == [("code", Path("/target"), "float32", 1)]


def test_the_worker_learns_before_it_guesses(
    worker: DraftWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(draft_actor, "load_draft", lambda *_args, **_options: recorder)
    worker.ping()
    assert worker.propose(["u"], ["r"]) == [Proposal.empty()]  # type: ignore[list-item]
    worker.propose([], ["r"])  # type: ignore[list-item]
    worker.forget([3])
    assert recorder.heard == [
        ("commit", ["u"]),
        ("propose", ["r"]),
        ("propose", ["r"]),
        ("forget", [3]),
    ]


def test_a_worker_that_was_restarted_says_so(worker: DraftWorker) -> None:
    with pytest.raises(DraftUnavailable, match="restarted"):
        worker.propose([], ASK)


def test_the_actor_of_an_ngram_draft_stays_small() -> None:
    code = "import sys, deployments.draft_actor, workers.hybrid_draft;"
    code += "print(*{'torch', 'transformers', 'fastapi', 'ray.serve'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""
