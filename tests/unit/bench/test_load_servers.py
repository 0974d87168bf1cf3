"""Both kinds of server: a real decode loop in its thread, and real HTTP to one that misbehaves."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.decode import Arm
from bench.load import Failed, NotServed, Question, Refused, Reply
from bench.load_servers import InProcess, MostPages, OverHttp, served_model
from tests.serving import listening
from tests.table_target import Letters, TableTarget, plain_tokens
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.verifier import Verifier, build_verifier

QUESTION = Question("letters", "abc", seed=5, max_tokens=12)
IDS = {"abc": (1, 2, 3), "long": tuple([1, 2, 3] * 10)}
ARMS = {"letters": {"plain": Arm("plain", None)}}


def outcome(server: InProcess | OverHttp, question: Question, arm: str = "plain") -> Reply:
    return asyncio.run(server.ask(arm, question))


# -- in this process -------------------------------------------------------------------------------


class World:
    """A table for a target, and a server over it."""

    def __init__(self, limits: Limits) -> None:
        self.target = TableTarget()
        self.pages = MostPages(self.target.pool)
        self.verifier: Verifier = build_verifier(
            self.target,  # type: ignore[arg-type]
            {},
            limits,
            on_verdict=self.pages,
        )
        self.server = InProcess(self.verifier, self.pages, ARMS, IDS, 0, temperature=0.7)


@pytest.fixture
def world() -> Iterator[World]:
    world = World(Limits(max_running=2, max_queued=1))
    world.verifier.start()
    yield world
    world.verifier.stop()


def plainly(question: Question) -> list[int]:
    sampling = SamplingParams(seed=question.seed, temperature=0.7)
    return plain_tokens(GenerationRequest("r", IDS[question.prompt], question.max_tokens, sampling))


def test_an_answer_is_the_targets_and_its_steps_are_counted(world: World) -> None:
    for seed in range(4):
        question = replace(QUESTION, seed=seed)
        found, tokens = outcome(world.server, question), plainly(question)
        assert found.text == Letters().decode(tokens, skip_special_tokens=True)
        assert (found.tokens, found.steps) == (len(tokens), len(tokens))
        assert found.first_at <= found.last_at


def test_what_is_refused_and_what_fails_is_told_apart(world: World) -> None:
    with pytest.raises(Refused, match="^max_tokens: 62 do not fit"):
        outcome(world.server, replace(QUESTION, max_tokens=62))
    world.target.failing = RuntimeError("out of memory")
    with pytest.raises(Failed, match="out of memory"):
        outcome(world.server, QUESTION)
    world.target.failing = None
    assert outcome(world.server, QUESTION).tokens
    asyncio.run(world.server.close())
    assert world.target.closed
    with pytest.raises(Failed, match="the verifier was stopped"):
        outcome(world.server, QUESTION)


def test_those_beyond_the_line_are_refused() -> None:
    world = World(Limits(max_running=2, max_queued=1))  # not started: nobody gets on

    async def five() -> list[Any]:
        asked = [asyncio.create_task(world.server.ask("plain", QUESTION)) for _ in range(5)]
        await asyncio.sleep(0)
        await world.server.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(five())
    assert [type(error) for error in found] == [Failed, Failed, Failed, Refused, Refused]
    assert "1 requests wait already" in str(found[4])


def test_a_question_that_nobody_waits_for_any_more_is_cancelled() -> None:
    world = World(Limits(max_running=2))

    async def ask_and_leave() -> None:
        task = asyncio.create_task(world.server.ask("plain", QUESTION))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(ask_and_leave())
    assert world.verifier.gauges().waiting == 1
    assert not world.verifier.step()
    assert world.verifier.gauges().waiting == 0


def test_usage_is_that_of_the_lap(world: World) -> None:
    laps = []
    for prompt in ("long", "abc"):
        world.server.begin()
        outcome(world.server, Question("letters", prompt, seed=5, max_tokens=1))
        laps.append(world.server.end())
    # Pages of 4 tokens: 30 of the prompt, and 3.
    assert [(own.kv_pages, own.kv_pool) for own in laps] == [(8, 20), (1, 20)]


def test_every_lap_reads_its_prompts_anew(world: World) -> None:
    read: list[int] = []
    forward = world.target.forward
    world.target.forward = lambda pack: (read.append(len(pack.tokens())), forward(pack))[1]  # type: ignore
    for _ in range(2):
        world.server.begin()
        for _ in range(2):
            outcome(world.server, Question("letters", "long", seed=5, max_tokens=1))
    assert read == [30, 2, 30, 2]


# -- over HTTP -------------------------------------------------------------------------------------


def said(content: str = "", finish: str | None = None, **also: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    return {"id": "x", "choices": [choice], **also}


OPENING = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 7}, "speculation": {"steps": 3, "tau": 2.3}}
STREAMS: dict[str, list[dict[str, Any] | str]] = {
    "well": [OPENING, said("on\u2028"), said("ward"), said("", "stop"), USAGE, "[DONE]"],
    "mute": [OPENING, said("", "stop"), USAGE, "[DONE]"],
    "broken": [OPENING, said("on"), {"error": {"message": "a pass failed"}}, "[DONE]"],
    "cut": [OPENING, said("on")],
    "stranger": [OPENING, said("on", "stop"), {"choices": []}, "[DONE]"],
    "babble": ["{"],
}
ERRORS: dict[str, Response] = {
    "full": JSONResponse({"error": {"message": "too many requests"}}, 503),
    "crash": JSONResponse({"error": {"message": "RuntimeError: oh"}}, 500),
    "gateway": PlainTextResponse("<html>", 502),
    "bad": JSONResponse({"error": {"message": "speculation.draft: no draft 'x'"}}, 400),
}


class Stage:
    """A server that behaves as the prompt says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app = Starlette(routes=[chat, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        mood = self.bodies[-1]["messages"][0]["content"]
        if mood in ERRORS:
            return ERRORS[mood]
        events = [e if isinstance(e, str) else json.dumps(e) for e in STREAMS[mood]]
        return StreamingResponse(
            (f"data: {event}\n\n" for event in events), media_type="text/event-stream"
        )


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="module")
def url(stage: Stage) -> Iterator[str]:
    with listening(stage.app) as url:
        yield url


def heard(url: str, mood: str, arm: str = "auto") -> Reply:
    async def once() -> Reply:
        server = OverHttp(url, "auto", temperature=0.5)
        try:
            return await server.ask(arm, replace(QUESTION, prompt=mood))
        finally:
            await server.close()

    return asyncio.run(once())


def test_an_answer_is_read_to_its_end(url: str) -> None:
    found = heard(url, "well")
    assert (found.text, found.tokens, found.steps) == ("on\u2028ward", 7, 3)
    assert found.first_at <= found.last_at
    assert heard(url, "mute").text == ""


def test_a_request_says_all_that_a_lap_depends_on(url: str, stage: Stage) -> None:
    stage.bodies.clear()
    for arm in ("plain", "auto", "code"):
        heard(url, "well", arm)
    assert stage.bodies[1] == {
        "messages": [{"role": "user", "content": "well"}],
        "max_tokens": 12,
        "temperature": 0.5,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": {"draft": "auto", "budget": "auto"},
    }
    assert [body["speculation"] for body in (stage.bodies[0], stage.bodies[2])] == [
        {"draft": "none"},
        {"draft": "code", "budget": "auto"},
    ]


@pytest.mark.parametrize(
    ("mood", "kind", "message"),
    [
        ("full", Refused, "^HTTP 503: too many requests$"),
        ("bad", Refused, "^HTTP 400: speculation.draft: no draft 'x'$"),
        ("crash", Failed, "^HTTP 500: RuntimeError: oh$"),
        ("gateway", Failed, "^HTTP 502: Bad Gateway$"),
        ("broken", Failed, "^a pass failed$"),
        ("cut", Failed, "ended too early"),
        ("stranger", Failed, "is none of an Outrider server"),
        ("babble", Failed, "not as OpenAI's are"),
    ],
)
def test_what_goes_wrong_is_told_apart(
    url: str, mood: str, kind: type[NotServed], message: str
) -> None:
    with pytest.raises(kind, match=message):
        heard(url, mood)


def test_where_nobody_listens_requests_fail() -> None:
    with listening(Starlette()) as url:
        pass
    with pytest.raises(Failed, match="^ConnectError: "):
        heard(url, "well")
    with pytest.raises(ValueError, match=f"^url: no server tells at {url}/v1/models"):
        served_model(url)


def test_the_model_is_the_servers(url: str) -> None:
    assert served_model(url) == served_model(f"{url}/") == "tiny"
