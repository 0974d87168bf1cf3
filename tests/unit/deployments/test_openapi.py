"""The OpenAPI document says what is answered."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from workers.request import TokenLogprob
from workers.verifier import QueueFull

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


async def document_of(world: Any) -> dict[str, Any]:
    document: dict[str, Any] = (await world.client.get("/openapi.json")).json()
    return document


def assert_fits(document: dict[str, Any], path: str, response: httpx.Response) -> None:
    """The answer has a status, a type and a body that the document knows."""
    operation = document["paths"][path][response.request.method.lower()]
    known = (
        operation["responses"].get(str(response.status_code)) or operation["responses"]["default"]
    )
    type_ = response.headers["content-type"].partition(";")[0]
    described = known["content"][type_]
    if type_ == "text/event-stream":
        *events, end = response.text.split("\n\n")
        assert (events[-1], end) == ("data: [DONE]", "")
        schema, bodies = described["itemSchema"], [dict([each.split(": ", 1)]) for each in events]
    else:
        schema, bodies = described["schema"], [response.json()]
    for body in bodies:
        Draft202012Validator({**schema, "components": document["components"]}).validate(body)


@pytest.mark.parametrize("path", POSTS)
async def test_errors_are_described_as_they_are(world: Any, path: str) -> None:
    document = await document_of(world)
    responses = document["paths"][path]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "503", "default"} <= responses.keys()
    assert "422" not in responses, "a body that is wrong is a 400 here"
    wrong = await world.client.post(path, json={"nonsense": 1})
    assert wrong.status_code == 400
    assert_fits(document, path, wrong)
    other = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "tokens": [1]}
    for field in ("prompt", "messages", "tokens"):
        response = await world.client.post(path, json={field: other[field], "model": "other"})
        assert_fits(document, path, response)
        if response.status_code == 404:
            break
    assert response.status_code == 404


async def test_answers_are_described_as_they_are(world: Any, said: Callable[..., Any]) -> None:
    document = await document_of(world)
    wishes: list[dict[str, Any]] = [{}, {"n": 2}, {"speculation": {"draft": "lm"}}]
    for stream in (False, True):
        for wish in wishes:
            assert_fits(document, POSTS[0], await world.chat(**wish, stream=stream))
            assert_fits(document, POSTS[1], await world.complete(**wish, stream=stream))
    world.verifier.script = [
        replace(delta, logprobs=tuple(TokenLogprob(t, -2.0, ((101, -0.1),)) for t in delta.tokens))
        for delta in said("Hel", "\u0147", reason="length", draft="lm")
    ]
    assert_fits(document, POSTS[0], await world.chat(logprobs=True, top_logprobs=1))
    assert_fits(document, POSTS[1], await world.complete(logprobs=1))
    post, get = world.client.post, world.client.get
    assert_fits(document, "/tokenize", await post("/tokenize", json={"prompt": "Hi"}))
    assert_fits(document, "/detokenize", await post("/detokenize", json={"tokens": [72]}))
    assert_fits(document, "/v1/models", await get("/v1/models"))
    assert_fits(document, "/v1/models/{name}", await get("/v1/models/tiny"))
    assert_fits(document, "/v1/models/{name}", await get("/v1/models/other"))


async def test_calls_are_described_as_they_are(roomy_world: Any, said: Callable[..., Any]) -> None:
    world = roomy_world
    world.verifier.script = said('<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    answer = await world.chat(tools=[{"type": "function", "function": {"name": "add"}}])
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert_fits(await document_of(world), POSTS[0], answer)


async def test_what_is_busy_or_unwell_is_described_as_it_is(world: Any) -> None:
    document = await document_of(world)
    assert_fits(document, "/health", await world.client.get("/health"))
    world.verifier.state = replace(world.verifier.state, healthy=False)
    unwell = await world.client.get("/health")
    assert unwell.status_code == 503
    assert_fits(document, "/health", unwell)
    world.verifier.script = [QueueFull("64 requests wait already")]
    busy = await world.chat()
    assert busy.status_code == 503
    assert_fits(document, POSTS[0], busy)


async def test_an_answer_that_is_not_described_is_noticed(world: Any) -> None:
    document, answer = await document_of(world), await world.chat()
    body = answer.json()
    body["choices"][0]["message"]["sung"] = True
    other = httpx.Response(200, json=body, request=answer.request)
    with pytest.raises(Exception, match="sung"):
        assert_fits(document, POSTS[0], other)


async def test_the_page_is_there(world: Any) -> None:
    page = await world.client.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text
