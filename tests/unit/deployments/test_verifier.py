"""The verifier's deployment around a decode loop that does as it is told, called from a thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deployments import verifier as verifier_module
from deployments.config import OutriderConfig, TracingConfig
from deployments.links import TargetFacts
from deployments.verifier import (
    STUCK_AFTER_S,
    Engine,
    VerifierDeployment,
    facts_of,
    wait_for_draft,
)
from workers.engine.sampling import SamplingParams
from workers.grammar import GrammarSpec
from workers.request import Delta, GenerationRequest
from workers.verifier import EngineError, Gauges, QueueFull

REQUEST = GenerationRequest(id="r1", prompt=(1,), max_tokens=4, sampling=SamplingParams(seed=0))
FACTS = TargetFacts("tiny", 10, 20, 20, ("code",), 0)
IDLE = Gauges(
    running=0,
    waiting=0,
    kv_pages_in_use=0,
    kv_pages=8,
    kv_host_pages_in_use=0,
    steps=0,
    draft_faults={"code": 2},
)


class Loop:
    """Says `script` to the sink, from another thread."""

    def __init__(self) -> None:
        self.script: list[Delta | BaseException] = []
        self.full = False
        self.submitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.learnt: list[threading.Thread] = []
        self.learning = threading.Event()
        self.learning.set()
        self.state = IDLE
        self.well = True
        self.stopped = False

    def submit(self, request: GenerationRequest, sink: Callable[[Any], None]) -> None:
        if self.full:
            raise QueueFull("no place")
        self.submitted.append(request)
        self.thread = threading.Thread(target=lambda: [sink(item) for item in self.script])
        self.thread.start()

    def cancel(self, request_id: str) -> None:
        self.thread.join()  # a cancelled request's sink hears nothing more
        self.cancelled.append(request_id)

    def learn(self, grammar: GrammarSpec) -> None:
        self.learning.wait()
        if grammar.text == "none":
            raise ValueError("response_format: this regex is none")
        self.learnt.append(threading.current_thread())

    def gauges(self) -> Gauges:
        return self.state

    def healthy(self) -> bool:
        return self.well

    def stop(self) -> None:
        self.stopped = True


class Ranks:
    gone = False
    stopped = False

    def check(self) -> None:
        if self.gone:
            raise RuntimeError("target rank 1 stopped")

    def stop(self) -> None:
        self.stopped = True


class Member:
    """A draft that counts how often it is asked whether it is ready."""

    def __init__(self, ready: bool) -> None:
        self.is_ready = ready
        self.asked = 0

    def ready(self) -> bool:
        self.asked += 1
        return self.is_ready


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool() -> dict[str, Member]:
    return {"code": Member(True), "lm": Member(False)}


@pytest.fixture
def verifier(loop: Loop, ranks: Ranks, clock: Clock, pool: dict[str, Member]) -> VerifierDeployment:
    return VerifierDeployment(lambda: Engine(loop, FACTS, pool, ranks), TracingConfig(), clock)


async def test_a_grammar_is_compiled_beside_all_else(
    verifier: VerifierDeployment, loop: Loop, said: Callable[..., Any]
) -> None:
    request = replace(REQUEST, grammar=GrammarSpec("regex", "a+"))
    loop.script = said("a", "a")
    assert [delta async for delta in verifier.generate(request)] == loop.script
    assert loop.learnt != [threading.current_thread()]
    with pytest.raises(ValueError, match="^response_format: "):
        await anext(verifier.generate(replace(REQUEST, grammar=GrammarSpec("regex", "none"))))
    assert len(loop.submitted) == 1


async def test_a_client_that_leaves_while_a_grammar_is_compiled_leaves_nothing_behind(
    verifier: VerifierDeployment, loop: Loop
) -> None:
    loop.learning.clear()
    request = replace(REQUEST, grammar=GrammarSpec("regex", "a+"))
    waiting = asyncio.ensure_future(anext(verifier.generate(request)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    loop.learning.set()
    assert loop.submitted == []


async def test_deltas_come_in_order_and_end(
    verifier: VerifierDeployment, loop: Loop, said: Callable[..., Any]
) -> None:
    loop.script = said("a", "b", "c")
    assert [delta async for delta in verifier.generate(REQUEST)] == loop.script
    assert loop.cancelled == []


async def test_an_error_of_the_loop_is_raised(
    verifier: VerifierDeployment, loop: Loop, said: Callable[..., Any]
) -> None:
    loop.script = [said("a", "b")[0], EngineError("the forward pass failed")]
    seen = []
    with pytest.raises(EngineError):
        async for delta in verifier.generate(REQUEST):
            seen.append(delta)
    assert seen == loop.script[:1]
    assert loop.cancelled == []


async def test_a_full_queue_is_told_at_once(verifier: VerifierDeployment, loop: Loop) -> None:
    loop.full = True
    with pytest.raises(QueueFull):
        await anext(verifier.generate(REQUEST))
    assert loop.cancelled == []


async def test_leaving_early_cancels(
    verifier: VerifierDeployment, loop: Loop, said: Callable[..., Any]
) -> None:
    loop.script = said("a", "b")
    answer = verifier.generate(REQUEST)
    await anext(answer)
    await answer.aclose()
    assert loop.cancelled == ["r1"]


async def test_being_cancelled_before_the_first_delta_cancels(
    verifier: VerifierDeployment, loop: Loop
) -> None:
    waiting = asyncio.create_task(anext(verifier.generate(REQUEST)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert loop.cancelled == ["r1"]


async def test_status_says_who_is_away(verifier: VerifierDeployment, loop: Loop) -> None:
    loop.state = replace(IDLE, running=3, waiting=1)
    status = await verifier.status()
    assert (status.running, status.waiting, status.healthy) == (3, 1, True)
    assert status.drafts == {"code": "ready", "lm": "away"}
    assert status.draft_faults == {"code": 2}
    assert await verifier.facts() == FACTS


async def test_health(verifier: VerifierDeployment, loop: Loop, ranks: Ranks) -> None:
    await verifier.check_health()
    loop.well = False
    with pytest.raises(RuntimeError, match="decode loop"):
        await verifier.check_health()
    loop.well, ranks.gone = True, True
    with pytest.raises(RuntimeError, match="rank 1"):
        await verifier.check_health()


async def test_an_idle_server_looks_after_its_drafts(
    verifier: VerifierDeployment, pool: dict[str, Member]
) -> None:
    await verifier.check_health()
    assert [member.asked for member in pool.values()] == [1, 1]


async def test_a_loop_that_hangs_is_noticed(
    verifier: VerifierDeployment, loop: Loop, clock: Clock
) -> None:
    loop.state = replace(IDLE, running=1, steps=5)
    await verifier.check_health()
    clock.now += STUCK_AFTER_S + 1
    with pytest.raises(RuntimeError, match="no step"):
        await verifier.check_health()
    loop.state = replace(loop.state, steps=6)
    await verifier.check_health()


async def test_an_idle_loop_does_not_hang(
    verifier: VerifierDeployment, loop: Loop, clock: Clock
) -> None:
    await verifier.check_health()
    clock.now += STUCK_AFTER_S + 1
    await verifier.check_health()
    loop.state = replace(IDLE, running=1)
    await verifier.check_health()


async def test_stopping_ends_loop_and_ranks(
    verifier: VerifierDeployment, loop: Loop, ranks: Ranks
) -> None:
    await verifier.close()
    assert (loop.stopped, ranks.stopped) == (True, True)


async def test_ranks_end_also_when_the_loop_cannot_say_goodbye(
    verifier: VerifierDeployment, loop: Loop, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError("a rank is gone")

    monkeypatch.setattr(loop, "stop", fail)
    with pytest.raises(ConnectionError):
        await verifier.close()
    assert ranks.stopped


async def test_a_pass_that_waits_for_a_rank_that_hangs_ends_with_the_rank(
    verifier: VerifierDeployment, loop: Loop, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_module, "GOODBYE_S", 0.01)
    killed = threading.Event()
    monkeypatch.setattr(loop, "stop", killed.wait)
    monkeypatch.setattr(ranks, "stop", killed.set)
    await verifier.close()
    assert killed.is_set()


async def test_a_replica_that_could_not_start_can_stop() -> None:
    def fail() -> Engine:
        raise ValueError("no such model")

    broken = VerifierDeployment.__new__(VerifierDeployment)
    with pytest.raises(ValueError, match="no such model"):
        broken.__init__(fail, TracingConfig())  # type: ignore[misc]
    await broken.close()


@pytest.mark.parametrize(
    ("settings", "room"),
    [
        ({}, 100),
        ({"limits": {"max_request_tokens": 50}}, 50),
        ({"speculation": {"budget": 1, "max_budget": 80}}, 80),
    ],
)
def test_the_smallest_limit_counts(settings: dict[str, Any], room: int) -> None:
    config = OutriderConfig.model_validate({"target": {"model": "tiny"}, **settings})
    target: Any = SimpleNamespace(
        vocab_size=7, context_length=100, pool=SimpleNamespace(pages=10, page_size=16)
    )
    assert facts_of(config, target).request_tokens == room


def test_a_pool_without_room_for_a_request_is_refused_at_the_start() -> None:
    config = OutriderConfig.model_validate({"target": {"model": "tiny"}})
    target: Any = SimpleNamespace(
        vocab_size=7, context_length=100, pool=SimpleNamespace(pages=2, page_size=16)
    )
    with pytest.raises(ValueError, match=r"^target\.kv_tokens: 32 slots cannot hold"):
        facts_of(config, target)


def loading(end: Exception | None) -> "Future[None]":
    future: Future[None] = Future()
    if end is not None:
        future.set_exception(end)
    return future


def test_a_draft_that_does_not_fit_stops_the_start() -> None:
    foreign = RayTaskError("ping", "trace", ValueError("its vocabulary is not the target's"))
    with pytest.raises(ValueError, match="its vocabulary is not the target's"):
        wait_for_draft("code", loading(foreign))


@pytest.mark.parametrize(
    "end", [None, ActorDiedError(), RayTaskError("ping", "trace", MemoryError("no room"))]
)
def test_a_draft_that_is_late_dead_or_failed_does_not(
    end: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    wait_for_draft("code", loading(end), patience_s=0.01)
    assert "starting without draft code" in caplog.text
