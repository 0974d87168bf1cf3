"""Every way of asking wrongly is a 400 that names the field, and the next request works."""

import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage as openai_message

from deployments import errors
from deployments.errors import from_validation

USER = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def nested(levels: int) -> dict[str, Any]:
    return {"properties": nested(levels - 1)} if levels else {}


DEEP = json.loads('{"items": ' * 65 + "{" + "}" * 66)

BAD_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 7}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 9_999_999}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"seed": 2**64}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"4" * 5000: 1}}, "logit_bias"),
    ({"top_k": 10**400}, "top_k"),
    ({"seed": 10**400}, "seed"),
    ({"max_tokens": -(10**400)}, "max_tokens"),
    ({"temperature": 10**400}, "temperature"),
    ({"repetition_penalty": 0.001}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": 3}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"speculation": {"draft": "nobody"}}, "speculation.draft"),
    ({"speculation": {"budget": -1}}, "speculation.budget"),
    ({"speculation": {"budget": 33}}, "speculation.budget"),
    ({"speculation": {"budget": "many"}}, "speculation.budget"),
    ({"speculation": {"budget": 1.5}}, "speculation.budget"),
    ({"speculation": {"depth": 3}}, "speculation.depth"),
    ({"speculation": "code"}, "speculation"),
    ({"tools": []}, "tools"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids.1"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 100}, "min_tokens"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "a",
                    "schema": DEEP,
                },
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "regex", "regex": ""}}, "response_format.regex"),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
    ({"temprature": 1}, "temprature"),
]

BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages.0.name"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"messages": [{"role": "tool", "content": "2"}]}, "messages.0.tool_call_id"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.content"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}]},
        "messages.0.tool_calls.0.id",
    ),
    *(
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": said}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        )
        for said in ("x", "[]", "[" * 9999, '{"a": "\\ud800"}', {"a": 1})
    ),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [ADD] * 129}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"a": "\ud800"}}}]},
        "tools.0.function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(99)}}]},
        "tools.0.function.parameters",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": choice("sub"), "tools": [ADD]}, "tool_choice"),
    (
        {
            "tool_choice": choice("add"),
            "tools": [ADD],
            "response_format": {"type": "json_object"},
        },
        "tool_choice",
    ),
    ({"tool_choice": "required", "tools": [ADD], "min_tokens": 2}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"parallel_tool_calls": 1, "tools": [ADD]}, "parallel_tool_calls"),
    ({"n": 16}, "n"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]

BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt.0"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": ["a", "b" * 101]}, "prompt.1"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"] * 16}, "prompt"),
    ({"prompt": ["a"] * 2, "n": 11}, "prompt"),
    ({"prompt": [[1], [1000]]}, "prompt.1"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [1000]}, "prompt"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "logprobs": 0}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 2}, "best_of"),
]

BAD_BODIES = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"seed": ' + b"1" * 5000 + b"}",
]


def post(world: Any, body: bytes, content_type: str = "application/json") -> Any:
    return world.client.post(
        "/v1/chat/completions", content=body, headers={"Content-Type": content_type}
    )


def assert_names(response: Any, param: str | None) -> None:
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert error["code"]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS)
async def test_a_wrong_field_is_named_by_both_endpoints(
    world: Any, fields: dict[str, Any], param: str
) -> None:
    for ask in (world.chat, world.complete):
        assert_names(await ask(**fields), param)
        assert (await ask()).status_code == 200
    assert len(world.verifier.requests) == 2


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS)
async def test_a_wrong_chat_is_refused(world: Any, fields: dict[str, Any], param: str) -> None:
    # As bytes: the client would not encode half a surrogate pair.
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    assert_names(await post(world, json.dumps(body).encode()), param)
    assert (await world.chat()).status_code == 200


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS)
async def test_a_wrong_prompt_is_refused(world: Any, fields: dict[str, Any], param: str) -> None:
    assert_names(await world.complete(**fields), param)
    assert (await world.complete()).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "max_tokens"])
async def test_a_number_that_is_none_is_refused(world: Any, number: str, field: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "{field}": {number}}}'
    assert_names(await post(world, body.encode()), field)
    assert (await world.chat()).status_code == 200


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:12]))
async def test_a_body_that_is_no_json_object_is_refused(world: Any, body: bytes) -> None:
    response = await post(world, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await world.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [-1] * 200_000}, "prompt.0"),
        ({"prompt": [[-1]] * 100_000}, "prompt.0"),
        ({"prompt": [None] * 200_000}, "prompt.0"),
    ],
)
async def test_a_list_of_faults_is_one_fault(
    world: Any, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one small body would hold everybody up for seconds."""
    seen = []

    def counted(faults: Any, body: object) -> Any:
        seen.append(len(faults))
        return from_validation(faults, body)

    monkeypatch.setattr(errors, "from_validation", counted)
    response = await world.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
    assert seen[0] < 10


async def test_json_must_be_called_json(world: Any) -> None:
    response = await post(world, b'{"messages": []}', "text/plain")
    assert_names(response, None)
    assert "application/json" in response.json()["error"]["message"]


async def test_a_field_may_have_a_name_that_is_no_text(world: Any) -> None:
    message = b'{"role": "user", "content": "Hi"'
    for body, param in (
        (b'{"messages": [%b}], "\\ud800": 1}', "\ud800"),
        (b'{"messages": [%b, "\\ud800": 1}]}', "messages.0.\ud800"),
    ):
        assert_names(await post(world, body % message), param)
    assert (await world.chat()).status_code == 200


async def test_a_union_reports_the_branch_that_was_meant(world: Any) -> None:
    message = (await world.complete(stop=["a", ""])).json()["error"]["message"]
    assert message.startswith("stop.1: ")
    assert "valid string" not in message


async def test_a_value_that_asks_for_nothing_is_accepted(world: Any) -> None:
    chat = {"n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}}
    completion = {"n": 1, "best_of": 1, "echo": False, "logprobs": 0, "suffix": ""}
    nothing = {
        "temperature": None,
        "stop": None,
        "max_tokens": None,
        "speculation": None,
        "stream_options": None,
        "stream": None,
        "stop_token_ids": None,
        "min_tokens": None,
        "ignore_eos": None,
        "deadline_s": None,
        "user": "somebody",
        "safety_identifier": "a1",
        "prompt_cache_key": "b2",
        "service_tier": "auto",
        "store": False,
    }
    assert (await world.chat(**chat, **nothing)).status_code == 200
    assert (await world.complete(**completion, **nothing)).status_code == 200


async def test_an_answer_can_be_sent_back_as_the_official_client_holds_it(world: Any) -> None:
    answer = openai_message(role="assistant", content="Hello.").model_dump()
    question = {"role": "user", "content": "And now?"}
    assert (await world.chat(messages=[answer, question])).status_code == 200


async def test_no_draft_named_is_auto(world: Any) -> None:
    assert (await world.chat(speculation={"draft": None})).status_code == 200
    assert len(world.router.requests) == 1


async def test_white_space_is_a_prompt(world: Any) -> None:
    assert (await world.complete(prompt=" \n")).status_code == 200
    assert (await world.chat(messages=[{"role": "user", "content": ""}])).status_code == 200


async def test_another_model_is_not_found(world: Any) -> None:
    response = await world.chat(model="gpt-9")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "model: 'gpt-9' is not served here; this is 'tiny'",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert (await world.chat(model="tiny")).status_code == 200


async def test_sampling_reaches_the_verifier(world: Any) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "seed": 2**64 - 1,
    }
    await world.complete(**given, logit_bias={"5": -100, "7": 3.5}, stop=["a", "b"], max_tokens=9)
    (request,) = world.verifier.requests
    assert {name: getattr(request.sampling, name) for name in given} == given
    assert request.sampling.logit_bias == ((5, -100), (7, 3.5))
    assert request.stop == ("a", "b")
    assert request.max_tokens == 9


async def test_what_ends_an_answer_reaches_the_verifier(world: Any) -> None:
    ends = {"stop_token_ids": [3, 5], "min_tokens": 4, "ignore_eos": True}
    await world.chat(**ends, max_tokens=9)
    await world.chat()
    told, untold = world.verifier.requests
    assert (told.stop_tokens, told.min_tokens, told.ignore_eos) == ((3, 5), 4, True)
    assert (untold.stop_tokens, untold.min_tokens, untold.ignore_eos) == ((), 0, False)


@pytest.mark.parametrize(
    ("format_", "kind", "text"),
    [
        ({"type": "json_object"}, "json_schema", '{"type": "object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}},
            "json_schema",
            '{"enum": [1]}',
        ),
        ({"type": "regex", "regex": "a|b"}, "regex", "a|b"),
        ({"type": "grammar", "grammar": 'root ::= "x"'}, "ebnf", 'root ::= "x"'),
    ],
)
async def test_what_an_answer_keeps_to_reaches_the_verifier(
    world: Any, format_: dict[str, Any], kind: str, text: str
) -> None:
    for ask in (world.chat, world.complete):
        assert (await ask(response_format=format_)).status_code == 200
    for request in world.verifier.requests:
        assert (request.grammar.kind, request.grammar.text) == (kind, text)
    await world.chat(response_format={"type": "text"})
    assert world.verifier.requests[-1].grammar is None


async def test_what_must_be_called_reaches_the_verifier(roomy_world: Any) -> None:
    look = {"type": "function", "function": {"name": "look"}}
    for wish in (None, "auto", "none", "required", choice("look")):
        await roomy_world.chat(tools=[ADD, look], tool_choice=wish)
    *free, any_of_both, named = [request.grammar for request in roomy_world.verifier.requests]
    assert free == [None] * 3
    assert [branch["properties"]["name"] for branch in json.loads(any_of_both.text)["anyOf"]] == [
        {"const": "add"},
        {"const": "look"},
    ]
    assert json.loads(named.text)["properties"]["name"] == {"const": "look"}
    assert named.field == "tools"
    for parallel in (True, False):
        for wish in ("required", choice("add"), "auto"):
            await roomy_world.chat(
                tools=[ADD, look], tool_choice=wish, parallel_tool_calls=parallel
            )
    several, one, no, *rest = [each.grammar for each in roomy_world.verifier.requests[5:]]
    assert json.loads(several.text)["items"].keys() == {"anyOf"}
    assert json.loads(one.text)["properties"]["name"] == {"const": "add"}
    assert no is None
    assert rest == [any_of_both, one, None]
    del roomy_world.verifier.requests[5:]
    told = [
        "<tools>" in roomy_world.tokenizer.decode(r.prompt) for r in roomy_world.verifier.requests
    ]
    assert told == [True, True, False, True, True]


async def test_a_template_that_knows_tools_is_given_them(roomy_world: Any) -> None:
    roomy_world.tokenizer.chat_template = "{{ tools }}<tool_call>"
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}]
    assert (await roomy_world.chat(tools=[ADD], messages=messages)).status_code == 200
    read = roomy_world.tokenizer.decode(roomy_world.verifier.requests[0].prompt)
    assert read == (
        f"tools:{json.dumps([ADD])}\nuser:Hi\nassistant:"
        '{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
        "\ntool:2\n"
    )


async def test_how_many_logprobs_reaches_the_verifier(world: Any) -> None:
    for asks in ({}, {"logprobs": False, "top_logprobs": 0}):
        await world.chat(**asks)
    await world.complete()
    for asks in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 20}):
        await world.chat(**asks)
    for top in (0, 5):
        await world.complete(logprobs=top)
    wanted = [request.logprobs for request in world.verifier.requests]
    assert wanted == [None, None, None, 0, 20, 0, 5]


async def test_choices_differ_by_their_seeds_and_names_alone(world: Any) -> None:
    await world.complete(seed=2**64 - 2, stop="x", max_tokens=9)
    await world.complete(seed=2**64 - 2, stop="x", max_tokens=9, n=3)
    alone, *choices = world.verifier.requests
    assert [choice.sampling.seed for choice in choices] == [2**64 - 2, 2**64 - 1, 0]
    assert len({request.id for request in (alone, *choices)}) == 4
    for choice in choices:
        as_alone = replace(choice, id=alone.id, group=alone.group, sampling=alone.sampling)
        assert as_alone == alone


async def test_each_prompt_of_a_list_is_asked_as_if_it_were_alone(world: Any) -> None:
    for prompt in ("ab", "c"):
        await world.complete(seed=3, n=2, prompt=prompt)
    alone, world.verifier.requests = world.verifier.requests, []
    await world.complete(seed=3, n=2, prompt=["ab", "c"])
    together = world.verifier.requests
    assert len({request.id for request in together}) == 4
    assert len({request.group for request in together}) == 1
    assert [replace(each, id="", group="") for each in together] == [
        replace(each, id="", group="") for each in alone
    ]


async def test_without_a_seed_each_request_draws_its_own(world: Any) -> None:
    for _ in range(3):
        await world.complete()
    assert len({request.sampling.seed for request in world.verifier.requests}) == 3


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_token_limit_work(world: Any, field: str) -> None:
    await world.chat(**{field: 3})
    assert world.verifier.requests[0].max_tokens == 3
