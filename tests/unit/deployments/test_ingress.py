"""One request through the HTTP layer, with a verifier and a router that do as they are told."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from deployments.config import LimitsConfig
from deployments.links import VerifierAway
from router.decision import RouteDecision, RouteRequest
from tests.asgi import SCOPE, events, leave
from workers.request import Delta, TokenLogprob
from workers.verifier import EngineError, QueueFull

# -- answers -------------------------------------------------------------------------------------


async def test_a_chat_answer(world: Any) -> None:
    body = (await world.chat(speculation={"draft": "lm"})).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13},
        "speculation": {
            "draft": "lm",
            "reason": "requested: by name",
            "steps": 2,
            "drafted": 0,
            "accepted": 3,
            "members": {},
            "tau": 2.5,
        },
    }


async def test_a_completion_answer(world: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = said("one", reason="length")
    body = (await world.complete()).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "one", "logprobs": None, "finish_reason": "length"}
    ]


async def test_a_chat_stream_has_a_chunk_per_delta(world: Any) -> None:
    response = await world.chat(stream=True)
    opening, first, last = events(response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0] == {
        "index": 0,
        "delta": {"content": "Hel"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert last["choices"][0]["delta"] == {"content": "lo"}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["speculation"]["tau"] == 2.5
    assert "speculation" not in first
    assert {chunk["object"] for chunk in (opening, first, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (opening, first, last)}) == 1


async def test_a_completion_stream_has_no_opening(world: Any) -> None:
    first, last = events((await world.complete(stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in (first, last)] == ["Hel", "lo"]
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_usage_in_a_stream_is_the_usage_of_the_whole_answer(world: Any, ask: str) -> None:
    whole = (await getattr(world, ask)()).json()
    stream = await getattr(world, ask)(stream=True, stream_options={"include_usage": True})
    *others, last = events(stream.text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert last["speculation"] == whole["speculation"]
    assert all("usage" not in chunk for chunk in others)


async def test_a_delta_without_text_is_not_sent(world: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = said("a", "", "b", "")
    chunks = events((await world.complete(stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]


def told(*deltas: Delta) -> list[Delta]:
    """With the logprobs of their tokens; the likeliest is always an "e"."""
    return [
        replace(delta, logprobs=tuple(TokenLogprob(t, -2.0, ((101, -0.1),)) for t in delta.tokens))
        for delta in deltas
    ]


async def test_logprobs_are_those_of_every_token_streamed_or_not(
    world: Any, said: Callable[..., Any]
) -> None:
    hel, nothing, lo = said("Hel", "?", "lo")
    world.verifier.script = told(hel, replace(nothing, text=""), lo)  # a "?" is held back
    wish = {"logprobs": True, "top_logprobs": 1}
    whole = (await world.chat(**wish)).json()["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in whole] == ["H", "e", "l", "?", "l", "o"]
    assert whole[0] == {
        "token": "H",
        "logprob": -2.0,
        "bytes": [72],
        "top_logprobs": [{"token": "e", "logprob": -0.1, "bytes": [101]}],
    }
    opening, *chunks = events((await world.chat(**wish, stream=True)).text)
    assert opening["choices"][0]["logprobs"] is None
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [len(part) for part in parts] == [3, 1, 2]
    assert sum(parts, []) == whole


async def test_a_completions_logprobs_go_on_where_the_last_chunk_ended(
    world: Any, said: Callable[..., Any]
) -> None:
    world.verifier.script = told(*said("Hel", "lo"))
    whole = (await world.complete(logprobs=1)).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["H", "e", "l", "l", "o"],
        "token_logprobs": [-2.0] * 5,
        "top_logprobs": [{"e": -0.1, "H": -2.0}, {"e": -2.0}]
        + [{"e": -0.1, letter: -2.0} for letter in "llo"],
        "text_offset": [0, 1, 2, 3, 4],
    }
    chunks = events((await world.complete(logprobs=1, stream=True)).text)
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0, 1, 2], [3, 4]]


async def test_text_that_looks_like_the_protocol_stays_one_event(
    world: Any, said: Callable[..., Any]
) -> None:
    text = "\n\ndata: [DONE]\n\n你好 🙂 \u2028"
    world.verifier.script = said(text)
    (chunk,) = events((await world.complete(stream=True)).text)
    assert chunk["choices"][0]["text"] == text


async def test_every_choice_is_answered_and_all_are_counted(
    world: Any, said: Callable[..., Any]
) -> None:
    texts = [("Hel", "lo"), ("Bye",), ("a", "b", "c")]
    world.verifier.scripts = [said(*pieces, draft="lm") for pieces in texts]
    body = (await world.chat(n=3, speculation={"draft": "lm"})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Hello", "Bye", "abc"]
    assert body["usage"] == {"prompt_tokens": 8, "completion_tokens": 11, "total_tokens": 19}
    assert (body["speculation"]["steps"], body["speculation"]["drafted"]) == (6, 12)
    await asyncio.sleep(0.01)
    assert len(world.router.outcomes) == 2, "one came all at once, which says nothing of its speed"


async def test_choices_are_streamed_side_by_side(world: Any, said: Callable[..., Any]) -> None:
    first, last = said("slow", "er")
    slow, fast = asyncio.Event(), said("fa", "st", reason="length")

    world.verifier.scripts = [[first, slow, last], [*fast[:1], fast[1]]] * 2
    asyncio.get_running_loop().call_later(0.05, slow.set)
    wish = {"n": 2, "logprobs": 0, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events((await world.complete(**wish)).text)
    told = [
        (choice["index"], choice["text"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert [each for each in told if each[0] == 0] == [(0, "slow", None), (0, "er", "stop")]
    assert [each for each in told if each[0] == 1] == [(1, "fa", None), (1, "st", "length")]
    assert told[-1] == (0, "er", "stop"), "the fast one did not wait for it"
    assert usage["usage"]["completion_tokens"] == 10
    assert usage["choices"] == []
    openings = events((await world.chat(n=2, stream=True)).text)[:2]
    assert [opening["choices"][0]["index"] for opening in openings] == [0, 1]


ADD = {"type": "function", "function": {"name": "add"}}
SAID = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_calls_are_told_apart_from_text_streamed_or_not(
    roomy_world: Any, said: Callable[..., Any], reason: str
) -> None:
    roomy_world.verifier.script = said(SAID[:9], SAID[9:30], SAID[30:], reason=reason)
    body = (await roomy_world.chat(tools=[ADD])).json()
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["content"] == "So:"
    (call,) = message["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert choice["finish_reason"] == {"stop": "tool_calls", "length": "length"}[reason]
    assert body["usage"]["completion_tokens"] == len(SAID)
    _, *chunks = events((await roomy_world.chat(tools=[ADD], stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["content"] for delta in deltas] == ["So:", ""]
    (streamed,) = deltas[-1]["tool_calls"]
    assert streamed.pop("id").startswith("call_")
    assert streamed == {"index": 0, **call}
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_a_later_call_of_a_stream_has_a_later_place(
    roomy_world: Any, said: Callable[..., Any]
) -> None:
    roomy_world.verifier.script = said(SAID, SAID, ".")
    _, *chunks = events((await roomy_world.chat(tools=[ADD], stream=True)).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 1]
    assert "".join(delta["content"] for delta in deltas) == "So: So: ."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_most_where_they_may_not_be_parallel(
    roomy_world: Any, said: Callable[..., Any], stream: bool
) -> None:
    roomy_world.verifier.script = said(SAID, SAID, ".")
    ask = {"tools": [ADD], "parallel_tool_calls": False, "stream": stream}
    answer = await roomy_world.chat(**ask)
    if stream:
        parts = [chunk["choices"][0]["delta"] for chunk in events(answer.text)]
    else:
        parts = [answer.json()["choices"][0]["message"]]
    assert "".join(part["content"] for part in parts) == "So: So: ."
    (call,) = [call for part in parts for call in part.get("tool_calls", ())]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("fields", [{}, {"tools": [ADD], "tool_choice": "none"}])
async def test_without_tools_a_call_is_text(
    world: Any, said: Callable[..., Any], fields: dict[str, Any]
) -> None:
    world.verifier.script = said(SAID)
    (choice,) = (await world.chat(**fields)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": SAID}
    assert choice["finish_reason"] == "stop"


async def test_prompts_are_answered_in_their_order_each_with_its_own_draft(
    world: Any, said: Callable[..., Any]
) -> None:
    def drafted_by(request: RouteRequest) -> RouteDecision:
        return RouteDecision(
            "lm" if request.query == "b" else "code", "intent", "so", request.query
        )

    world.router.decision = drafted_by
    world.verifier.scripts = [said(f"{n}", f"{n}") for n in range(4)] * 2
    body = (await world.complete(prompt=["a", "b"], n=2)).json()
    assert [choice["text"] for choice in body["choices"]] == ["00", "11", "22", "33"]
    assert [request.draft for request in world.verifier.requests] == ["code", "code", "lm", "lm"]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert body["speculation"]["draft"] == "code, lm"
    await asyncio.sleep(0.01)
    assert [outcome.fingerprint for outcome in world.router.outcomes] == ["a", "a", "b", "b"]
    world.verifier.requests.clear()
    chunks = events((await world.complete(prompt=["a", "b"], n=2, stream=True)).text)
    ends = {
        chunk["choices"][0]["index"]: chunk["speculation"]["draft"]
        for chunk in chunks
        if "speculation" in chunk
    }
    assert ends == {0: "code", 1: "code", 2: "lm", 3: "lm"}


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_an_answer_may_begin_with_its_prompt(world: Any, prompt: str | list[int]) -> None:
    body = (await world.complete(prompt=prompt, echo=True)).json()
    assert body["choices"][0]["text"] == "abHello"
    assert body["usage"]["completion_tokens"] == 5
    chunks = events((await world.complete(prompt=prompt, echo=True, stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["ab", "Hel", "lo"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_does_not_begin_in_time_is_an_error_and_is_given_up(
    world: Any, stream: bool
) -> None:
    world.verifier.script = [asyncio.Event()]
    response = await world.chat(deadline_s=0.01, stream=stream)
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("deadline_s", "deadline_exceeded")
    assert world.verifier.cancelled == [world.verifier.requests[0].id]


async def test_an_answer_that_is_late_in_the_middle_ends_with_an_error(
    world: Any, said: Callable[..., Any]
) -> None:
    first, _ = said("a", "b")
    world.verifier.script = [first, asyncio.Event()]
    begun, error = events((await world.complete(deadline_s=0.05, stream=True)).text)
    assert begun["choices"][0]["text"] == "a"
    assert error["error"]["code"] == "deadline_exceeded"
    assert world.verifier.cancelled == [world.verifier.requests[0].id]


@pytest.mark.parametrize("world", [LimitsConfig(deadline_s=0.01)], indirect=True)
async def test_the_servers_own_deadline_is_for_all(world: Any) -> None:
    world.verifier.script = [asyncio.Event()]
    for wish in ({}, {"deadline_s": 60}):
        assert (await world.chat(**wish)).status_code == 504


async def test_an_answer_in_time_is_not_disturbed_by_its_deadline(
    world: Any, said: Callable[..., Any]
) -> None:
    first, last = said("a", "b")
    pause = asyncio.Event()
    world.verifier.script = [first, pause, last]
    asyncio.get_running_loop().call_later(0.02, pause.set)
    assert (await world.complete(deadline_s=60)).json()["choices"][0]["text"] == "ab"
    assert world.verifier.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_is_refused_ends_the_others(
    world: Any, said: Callable[..., Any], stream: bool
) -> None:
    begun = [said("a", "b")[0], asyncio.Event()]
    world.verifier.scripts = [begun, begun, [QueueFull("64 requests wait already")]]
    response = await world.chat(n=3, stream=stream)
    assert response.status_code == 503
    assert world.verifier.cancelled == [request.id for request in world.verifier.requests[:2]]


async def test_a_choice_that_fails_in_the_middle_ends_the_others(
    world: Any, said: Callable[..., Any]
) -> None:
    first = said("a", "b")[0]
    broken = [first, EngineError("the forward pass failed")]
    world.verifier.scripts = [[first, asyncio.Event()], broken] * 2
    assert (await world.complete(n=2)).status_code == 500
    *_, error = events((await world.complete(n=2, stream=True)).text)
    assert error["error"]["type"] == "server_error"
    assert world.verifier.cancelled == [world.verifier.requests[at].id for at in (0, 2)]


async def test_a_text_and_its_ids(world: Any) -> None:
    post = world.client.post
    body = (await post("/tokenize", json={"prompt": "Hi"})).json()
    assert body == {"tokens": [72, 105], "count": 2, "max_model_len": 100}
    assert (await post("/tokenize", json={"prompt": ""})).json()["count"] == 0
    assert (await post("/detokenize", json={"tokens": [72, 105]})).json() == {"prompt": "Hi"}
    assert (await post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_is_tokenized_as_it_is_read(world: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = (await world.client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await world.chat(messages=messages)
    assert world.verifier.requests[0].prompt == tuple(ids)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "messages"),
        ("/tokenize", {"prompt": "Hi", "messages": [{"role": "user", "content": ""}]}, "messages"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ("/tokenize", {"prompt": "Hi", "add": 1}, "add"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1000]}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1"),
    ],
)
async def test_what_cannot_be_tokenized_is_named(
    world: Any, path: str, body: dict[str, Any], param: str
) -> None:
    content, headers = json.dumps(body), {"Content-Type": "application/json"}
    response = await world.client.post(path, content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_models(world: Any) -> None:
    models = (await world.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["tiny"]
    assert models["data"][0] == (await world.client.get("/v1/models/tiny")).json()
    assert (await world.client.get("/v1/models/other")).status_code == 404


async def test_health_says_how_busy_the_verifier_is(world: Any) -> None:
    response = await world.client.get("/health")
    assert response.status_code == 200
    assert response.json()["verifier"]["drafts"] == {"code": "ready", "lm": "away"}
    world.verifier.state = replace(world.verifier.state, healthy=False)
    assert (await world.client.get("/health")).status_code == 503


async def test_other_paths_and_methods_are_errors_in_the_same_shape(world: Any) -> None:
    lost = await world.client.get("/v1/engines")
    wrong = await world.client.get("/v1/completions")
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


# -- how much room there is ----------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [(None, 95), (10, 10), (95, 95), (96, 95)])
async def test_an_answer_may_fill_the_context_and_no_more(
    world: Any, asked: int | None, given: int
) -> None:
    await world.complete(prompt="x" * 5, max_tokens=asked)
    assert world.verifier.requests[0].max_tokens == given


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", ["chat", "complete"])
async def test_a_prompt_without_room_for_an_answer_is_refused(
    world: Any, ask: str, stream: bool
) -> None:
    fields = {"messages": [{"role": "user", "content": "x" * 94}]}  # "user:" and "\n" make 100
    if ask == "complete":
        fields = {"prompt": "x" * 100}  # type: ignore[dict-item]
    response = await getattr(world, ask)(**fields, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == ("prompt" if ask == "complete" else "messages")
    assert world.verifier.requests == []


async def test_the_last_place_of_the_context_can_be_used(world: Any) -> None:
    assert (await world.complete(prompt="x" * 99)).status_code == 200
    assert world.verifier.requests[0].max_tokens == 1


# -- the draft -----------------------------------------------------------------------------------


async def test_the_router_chooses_from_the_last_question_and_what_was_before_it(world: Any) -> None:
    await world.chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Sort "}] * 2},
            {"role": "assistant", "content": "How?"},
            {"role": "user", "content": "Quickly"},
        ]
    )
    assert world.router.requests == [RouteRequest("Quickly", "Be brief.\nSort Sort \nHow?")]
    assert world.verifier.requests[0].draft == "code"
    assert (world.verifier.requests[0].budget, world.verifier.requests[0].adaptive) == (32, True)


async def test_token_ids_are_routed_by_their_text(world: Any) -> None:
    await world.complete(prompt=[72, 105])
    assert world.router.requests == [RouteRequest("Hi", "")]
    assert world.verifier.requests[0].prompt == (72, 105)


@pytest.mark.parametrize(
    ("wish", "draft", "budget", "adaptive"),
    [
        ({"draft": "lm"}, "lm", 32, True),
        ({"draft": "lm", "budget": None}, "lm", 32, True),
        ({"draft": "lm", "budget": "auto"}, "lm", 32, True),
        ({"draft": "lm", "budget": 3}, "lm", 3, False),
        ({"draft": "none"}, None, 0, False),
        ({"draft": "none", "budget": 3}, None, 0, False),
        ({"budget": 0}, None, 0, False),
    ],
)
async def test_a_wish_is_not_routed(
    world: Any, wish: dict[str, Any], draft: str | None, budget: int, adaptive: bool
) -> None:
    response = await world.chat(speculation=wish)
    (request,) = world.verifier.requests
    assert (request.draft, request.budget, request.adaptive) == (draft, budget, adaptive)
    assert response.json()["speculation"]["draft"] == draft
    assert response.json()["speculation"]["reason"].startswith("requested")
    assert world.router.requests == world.router.outcomes == []


async def test_an_empty_pool_decodes_plainly(world: Any) -> None:
    world.verifier.served = replace(world.verifier.served, drafts=())
    assert (await world.chat()).json()["speculation"]["reason"] == "default: the pool is empty"


async def test_a_router_that_fails_costs_the_draft_and_not_the_answer(world: Any) -> None:
    world.router.decision = ConnectionError("away")
    body = (await world.chat()).json()
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["speculation"]["draft"] is None
    assert body["speculation"]["reason"] == "default: the router did not answer"


async def test_a_router_that_hangs_is_not_waited_for(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.admission.ROUTING_PATIENCE_S", 0.05)

    async def hang(_request: RouteRequest) -> None:
        await asyncio.sleep(60)

    world.router.decide = hang
    assert (await world.chat()).json()["speculation"]["draft"] is None


async def test_the_router_hears_how_it_went(world: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = said("Hel", "lo you", draft="code")
    await world.chat()
    await asyncio.sleep(0)
    (outcome,) = world.router.outcomes
    assert (outcome.fingerprint, outcome.draft, outcome.tokens) == ("f1", "code", 9)
    assert outcome.tau == 4.5
    assert outcome.alpha == pytest.approx(7 / 9)
    assert outcome.tokens_per_second > 0


@pytest.mark.parametrize("draft", ["code", "none"])
async def test_it_hears_also_of_drafts_that_the_client_chose(
    world: Any, said: Callable[..., Any], draft: str
) -> None:
    world.verifier.script = said("Hel", "lo", draft=None if draft == "none" else draft)
    await world.chat(speculation={"draft": draft})
    await asyncio.sleep(0.01)
    (outcome,) = world.router.outcomes
    assert outcome.fingerprint == "of Hi"
    assert outcome.draft == (None if draft == "none" else draft)


async def test_an_answer_in_one_delta_teaches_nothing_about_speed(
    world: Any, said: Callable[..., Any]
) -> None:
    world.verifier.script = said("Hello")
    await world.chat()
    await asyncio.sleep(0)
    assert world.router.outcomes == []


async def test_a_lost_outcome_disturbs_nobody(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world.router.refuses_outcomes = True
    assert (await world.chat()).status_code == 200
    await asyncio.sleep(0.01)
    assert "did not take an outcome" in caplog.text


async def test_no_line_break_of_unicode_ends_an_event(world: Any, said: Callable[..., Any]) -> None:
    text = "a\u2028b\u2029c\x85d 你好"
    world.verifier.script = said(text, ".")
    response = await world.complete(stream=True)
    events = [line for line in response.text.splitlines() if line]
    assert events[-1] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["text"] == text


# -- when things fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("64 requests wait already"), 503, "overloaded_error"),
        (VerifierAway("replica died"), 503, "overloaded_error"),
        (ValueError("max_tokens: too many"), 400, "invalid_request_error"),
        (EngineError("the forward pass failed"), 500, "server_error"),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(
    world: Any, error: Exception, status: int, kind: str, stream: bool
) -> None:
    world.verifier.script = [error]
    response = await world.chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert str(error) in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == ("max_tokens" if status == 400 else None)
    assert ("retry-after" in response.headers) == (status == 503)


async def test_an_error_in_the_middle_is_an_event_and_an_orderly_end(
    world: Any, said: Callable[..., Any]
) -> None:
    world.verifier.script = [said("Hel", "lo")[0], EngineError("the forward pass failed")]
    _opening, first, error = events((await world.chat(stream=True)).text)
    assert first["choices"][0]["delta"]["content"] == "Hel"
    assert error["error"]["type"] == "server_error"
    assert "the forward pass failed" in error["error"]["message"]


async def test_an_answer_that_just_stops_is_an_error(world: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = said("Hel", "lo")[:1]
    assert (await world.chat()).status_code == 500
    assert "error" in events((await world.chat(stream=True)).text)[-1]
    world.verifier.script = []
    assert (await world.chat(stream=True)).status_code == 500


# -- clients that leave --------------------------------------------------------------------------


async def test_a_client_that_is_gone_when_the_stream_starts_cancels_the_request(
    world: Any, said: Callable[..., Any]
) -> None:
    world.verifier.script = [said("a", "b")[0], asyncio.Event()]

    async def broken_pipe(message: dict[str, Any]) -> None:
        raise OSError("connection lost")

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "Hi", "stream": true}'}

    scope = {**SCOPE, "path": "/v1/completions", "asgi": {"spec_version": "2.4"}}
    with pytest.raises(ClientDisconnect):
        await world.app(scope, receive, broken_pipe)
    assert world.verifier.cancelled == [world.verifier.requests[0].id]


@pytest.mark.parametrize("chunks", [1, 2, 3])
async def test_leaving_a_stream_cancels_the_request(
    world: Any, said: Callable[..., Any], chunks: int
) -> None:
    world.verifier.script = [*said("a", "b", "c", "d")[:3], asyncio.Event()]
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    seen = await leave(world.app, "/v1/chat/completions", body, after=chunks)
    assert len(seen) >= chunks
    assert world.verifier.cancelled == [request.id for request in world.verifier.requests]
    assert world.ends == [("/v1/chat/completions", "cancelled")]


@pytest.mark.parametrize("chunks", [1, 2, 4, 6])
async def test_leaving_a_stream_cancels_every_choice(
    world: Any, said: Callable[..., Any], chunks: int
) -> None:
    world.verifier.scripts = [[*said("a", "b", "c", "d")[:3], asyncio.Event()] for _ in range(3)]
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 3}
    seen = await leave(world.app, "/v1/chat/completions", body, after=chunks)
    assert len(seen) >= chunks
    assert {*world.verifier.cancelled} == {request.id for request in world.verifier.requests}
    assert len(world.verifier.cancelled) == 3


@pytest.mark.parametrize("begun", [False, True])
async def test_leaving_cancels_every_choice(
    world: Any, said: Callable[..., Any], begun: bool
) -> None:
    forever, first = asyncio.Event(), said("a", "b")[0]
    world.verifier.scripts = [[first, forever], [first, forever] if begun else [forever]]
    call = asyncio.create_task(world.complete(n=2))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    asked = {request.id for request in world.verifier.requests}
    assert len(asked) == 2
    assert set(world.verifier.cancelled) == asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_call_cancels_the_request(world: Any, stream: bool) -> None:
    """What Serve does when a client leaves before the first token: it cancels our task."""
    world.verifier.script = [asyncio.Event()]
    call = asyncio.create_task(
        leave(world.app, "/v1/completions", {"prompt": "Hi", "stream": stream}, after=99)
    )
    await world.verifier.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert world.verifier.cancelled == [world.verifier.requests[0].id]
    assert world.ends == [("/v1/completions", "cancelled")]


async def test_every_request_is_counted_once_by_its_end(world: Any) -> None:
    await world.chat()
    await world.chat(stream=True)
    await world.chat(nonsense=1)
    await world.client.get("/nowhere")
    assert world.ends == [
        ("/v1/chat/completions", "200"),
        ("/v1/chat/completions", "200"),
        ("/v1/chat/completions", "400"),
        ("unknown", "404"),
    ]


async def test_a_target_without_a_chat_template_says_so(world: Any) -> None:
    world.tokenizer.chat_template = None
    response = await world.chat()
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]
