"""The whole line over HTTP: real actors, a real router, the official client, a tiny target."""

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import ray

from tests.serving import RESTART_S, SONG, busy, chunks, processes, text_of, wait_until

pytestmark = [pytest.mark.usefixtures("idle")]

# The end of the text is a token like any other to a random model: these texts shall be long.
ENDLESS = {"logit_bias": {"0": -100}}
ASK = {"prompt": "the thing and the other thing and the", "temperature": 0, **ENDLESS}


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={**ASK, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def plain(http: httpx.Client, **fields: Any) -> str:
    return text_of(complete(http, **{**fields, "speculation": {"draft": "none"}}))


def streamed(http: httpx.Client, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The joined text, and the last chunk."""
    body = {**ASK, **fields, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        all_chunks = list(chunks(response))
    return "".join(text_of(chunk) for chunk in all_chunks), all_chunks[-1]


# -- metrics ---------------------------------------------------------------------------------------


def scrape() -> dict[str, float]:
    """Prometheus' view of this server: name and draft, or name alone, to the sum of its series."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found: dict[str, float] = defaultdict(float)
    for line in httpx.get(url, timeout=30).text.splitlines():
        if line.startswith("ray_outrider_") and 'application="tiny"' in line:
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            draft = re.search(r'draft="(\w+)"', labels)
            found[f"{name.removeprefix('ray_outrider_')}/{draft[1] if draft else ''}"] += float(
                value
            )
    return found


def test_metrics_agree_with_the_answers(http: httpx.Client) -> None:
    """The first test of this server: all that it has counted is known here."""
    assert wait_until(lambda: scrape()["kv_pages/"] == 1024)
    assert all(value >= 0 for value in scrape().values()), "an idle server has no NaN"
    wish = {"max_tokens": 37, "speculation": {"draft": "twin"}}
    told = [complete(http, **wish) for _ in range(2)]
    streamed(http, **wish)

    # Three answers, one of them streamed, count alike.
    assert wait_until(lambda: scrape()["emitted_tokens_total/twin"] == 3 * 37)
    speculation = told[0]["speculation"]
    for counter, field in (
        ("steps_total", "steps"),
        ("drafted_tokens_total", "drafted"),
        ("accepted_tokens_total", "accepted"),
    ):
        assert scrape()[f"{counter}/twin"] == 3 * speculation[field], counter
    others = scrape()["recovered_tokens_total/twin"] + scrape()["bonus_tokens_total/twin"]
    assert scrape()["accepted_tokens_total/twin"] + others == 3 * 37
    assert wait_until(lambda: scrape()["time_to_first_token_ms_count/twin"] == 3)
    assert scrape()["time_per_output_token_ms_count/twin"] == 3

    assert wait_until(lambda: scrape()["kv_pages_in_use/"] == 0)
    assert all(value >= 0 for value in scrape().values())  # a NaN is not


@pytest.mark.parametrize("ends", ["at once", "at a stop"])
def test_metrics_of_short_answers_add_up(http: httpx.Client, ends: str) -> None:
    wish: dict[str, Any] = {"speculation": {"draft": "twin", "budget": 8}, "max_tokens": 1}
    if ends == "at a stop":
        wish |= {"max_tokens": 40, "stop": plain(http, max_tokens=20)[9:12]}
    before = scrape()
    told = complete(http, **wish)
    assert told["choices"][0]["finish_reason"] == ("length" if ends == "at once" else "stop")
    used = told["usage"]["completion_tokens"]

    def risen(name: str) -> float:
        return scrape()[f"{name}/twin"] - before[f"{name}/twin"]

    assert wait_until(lambda: risen("emitted_tokens_total") == used)
    names = ("accepted", "recovered", "bonus")
    assert sum(risen(f"{name}_tokens_total") for name in names) == used
    assert risen("accepted_tokens_total") <= risen("drafted_tokens_total")
    assert (risen("drafted_tokens_total") > 0) == (ends == "at a stop")
    assert all(value >= 0 for value in scrape().values())


def test_the_router_says_why_and_is_counted(http: httpx.Client) -> None:
    told = complete(http, max_tokens=8)["speculation"]
    assert told["draft"] in ("self", "inline", "twin")
    assert told["reason"].partition(":")[0] in ("similar", "intent", "default")
    assert wait_until(lambda: scrape()["router_decisions_total/"] == 1)
    assert scrape()["router_cache_hits_total/"] + scrape()["router_cache_misses_total/"] == 1


def test_what_a_client_chose_by_name_decides_for_those_who_do_not(http: httpx.Client) -> None:
    for draft in ("self", "twin"):
        complete(http, prompt="the king of far away", speculation={"draft": draft})

    def reason() -> str:
        told = complete(http, prompt="the king of far away", max_tokens=4)["speculation"]
        return str(told["reason"])

    assert wait_until(lambda: "self at" in reason() and "twin at" in reason())
    assert reason().startswith("similar: ")


# -- the official client ---------------------------------------------------------------------------


def test_chat_with_the_official_client(client: openai.OpenAI) -> None:
    ask: Any = {"messages": [{"role": "user", "content": "Sing!"}], "model": "long", "seed": 5}
    whole = client.chat.completions.create(**ask, max_tokens=40, extra_body=ENDLESS)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 40
    assert whole.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        **ask,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=ENDLESS,
    )
    told = client.chat.completions.create(
        **ask, max_tokens=40, logprobs=True, top_logprobs=2, extra_body=ENDLESS
    )
    assert told.choices[0].logprobs is not None
    assert told.choices[0].logprobs.content is not None
    assert [len(each.top_logprobs) for each in told.choices[0].logprobs.content] == [2] * 40
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == (
        whole.choices[0].message.content
    )
    assert (last.choices, last.usage) == ([], whole.usage)
    extra: Any = parts[-1].model_extra
    assert extra["speculation"].keys() == {
        "draft",
        "reason",
        "steps",
        "drafted",
        "accepted",
        "members",
        "tau",
    }


def test_completions_and_models_with_the_official_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["long"]
    answer = client.completions.create(model="long", prompt="the", max_tokens=5, temperature=0)
    parts = client.completions.create(
        model="long", prompt="the", max_tokens=5, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    ask: Any = {"model": "long", "prompt": "the"}
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(**ask, extra_body={"best_off": 3})
    assert wrong.value.param == "best_off"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="the")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="long", prompt=[5] * 1024)
    assert long.value.code == "context_length_exceeded"
    assert client.completions.create(**ask, max_tokens=1).usage is not None


# -- the text is the target's ----------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["self", "inline", "twin", "auto"])
@pytest.mark.parametrize("budget", [6, "auto"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 3}])
def test_a_draft_changes_the_speed_and_not_the_text(
    http: httpx.Client, draft: str, budget: int | str, sampling: dict[str, Any]
) -> None:
    wish = {"draft": draft, "budget": budget}
    said = complete(http, max_tokens=120, **sampling, speculation=wish)
    assert text_of(said) == plain(http, max_tokens=120, **sampling)
    assert said["usage"]["completion_tokens"] == 120
    assert 0 <= said["speculation"]["accepted"] <= said["speculation"]["drafted"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 3}])
def test_a_draft_does_not_change_what_the_target_thought(
    http: httpx.Client, sampling: dict[str, Any]
) -> None:
    wish = {"max_tokens": 40, "logprobs": 3, **sampling}
    said, *others = [
        complete(http, **wish, speculation={"draft": draft}) for draft in ("none", "self", "twin")
    ]
    told = said["choices"][0]["logprobs"]
    assert [other["choices"][0]["logprobs"] for other in others] == [told, told]
    assert all(other["speculation"]["drafted"] > 0 for other in others)
    assert len(told["token_logprobs"]) == said["usage"]["completion_tokens"] == 40
    assert all(logprob < 0 for logprob in told["token_logprobs"])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_draft_does_not_change_where_an_answer_ends(
    http: httpx.Client, sampling: dict[str, Any]
) -> None:
    wish: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": [*range(16)], **sampling}
    for least in (0, 20, 60):
        said, *others = [
            complete(http, **wish, min_tokens=least, speculation={"draft": draft})
            for draft in ("none", "self", "twin")
        ]
        assert {text_of(other) for other in others} == {text_of(said)}
        counts = {answer["usage"]["completion_tokens"] for answer in (said, *others)}
        assert len(counts) == 1
        assert counts.pop() >= max(1, least)


def test_drafts_that_break_a_schema_change_nothing(http: httpx.Client) -> None:
    """These know nothing of schemas: most of what they guess is none of it."""
    wish = {"type": "json_schema", "json_schema": {"name": "song", "schema": SONG}}
    asks = [
        {
            "prompt": prompt,
            "temperature": temperature,
            "seed": 3,
            "max_tokens": 200,
            "logit_bias": {},
            "response_format": wish,
        }
        for prompt, temperature in product(("the king", "sing", "你好", "{"), (0, 1.5))
    ]
    alone = [plain(http, **ask) for ask in asks]
    for text in alone:
        jsonschema.validate(json.loads(text), SONG)
    for draft in ("self", "inline", "twin"):
        guessed = [{**ask, "speculation": {"draft": draft}} for ask in asks]
        with ThreadPoolExecutor(len(asks)) as pool:
            told = list(pool.map(lambda ask: complete(http, **ask), guessed))
        assert [text_of(each) for each in told] == alone
        assert sum(each["speculation"]["drafted"] for each in told) > 0
        assert {each["choices"][0]["finish_reason"] for each in told} == {"stop"}


def test_a_call_goes_to_the_official_client_and_its_result_comes_back(
    client: openai.OpenAI,
) -> None:
    function = {"name": "sing", "parameters": SONG}
    messages: list[Any] = [{"role": "user", "content": "sing for the king"}]
    ask: Any = {
        "model": "long",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "sing"}},
        "temperature": 0,
        "max_tokens": 200,
    }
    told = {}
    for draft in ("none", "self", "twin"):
        answer = client.chat.completions.create(
            **ask, messages=messages, extra_body={"speculation": {"draft": draft}}
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SONG)
        told[draft] = (call.function.name, call.function.arguments)
        speculation: Any = (answer.model_extra or {})["speculation"]
        assert (speculation["drafted"] > 0) is (draft != "none")
    assert told["self"] == told["twin"] == told["none"]
    streamed = [
        part
        for chunk in client.chat.completions.create(**ask, messages=messages, stream=True)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [
        (part.function.name, part.function.arguments) for part in streamed if part.function
    ] == [told["none"]]
    result = {"role": "tool", "tool_call_id": call.id, "content": "la la la"}
    messages += [choice.message.to_dict(), result]
    answer = client.chat.completions.create(
        model="long", messages=messages, tools=ask["tools"], tool_choice="none", max_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


HUM = {"type": "object", "properties": {"what": {"enum": ["la", "na"]}}, "required": ["what"]}
SINGERS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": HUM}} for name in ("sing", "hum")
]


def heard(message: Any) -> tuple[str, list[tuple[str, str]]]:
    """A choice's text and calls, put together by the client."""
    calls = [call.function for call in message.tool_calls or ()]
    return message.content or "", [(call.name, call.arguments) for call in calls]


def test_calls_are_read_out_of_text_and_a_stream_is_the_same(client: openai.OpenAI) -> None:
    """A random target says none by itself: it is held to texts that have one in their middle."""
    said = '(the |thing ){1,3}<tool_call>\\{"name": "hum", "arguments": \\{"what": "[a-e]+"\\}\\}'
    ask: Any = {
        "model": "long",
        "messages": [{"role": "user", "content": "sing for the king"}],
        "tools": SINGERS,
        "temperature": 1.2,
        "seed": 5,
        "n": 2,
        "max_tokens": 120,
    }
    told = []
    for draft in ("none", "self", "twin"):
        ours = {
            "response_format": {"type": "regex", "regex": f"{said}</tool_call> (and|so)"},
            "speculation": {"draft": draft},
        }
        answer = client.chat.completions.create(**ask, extra_body=ours)
        for choice in answer.choices:
            text, ((name, arguments),) = heard(choice.message)
            assert re.fullmatch("(the |thing ){1,3}(and|so)", text)
            assert name == "hum"
            assert json.loads(arguments)["what"]
            assert choice.finish_reason == "tool_calls"
        with client.chat.completions.stream(
            **ask, extra_body=ours, stream_options={"include_usage": True}
        ) as events:
            whole = events.get_final_completion()
        told += [[heard(choice.message) for choice in each.choices] for each in (answer, whole)]
        assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * 2
        assert answer.usage is not None
        assert whole.usage == answer.usage
        speculation: Any = (answer.model_extra or {})["speculation"]
        assert (speculation["drafted"] > 0) is (draft != "none")
    assert told[0][0] != told[0][1]
    assert told == told[:1] * 6


def test_where_calls_are_required_there_may_be_several(client: openai.OpenAI) -> None:
    counts = []
    for seed in range(6):
        told = []
        for draft in ("none", "twin"):
            answer = client.chat.completions.create(
                model="long",
                messages=[{"role": "user", "content": "sing and hum"}],
                tools=SINGERS,
                tool_choice="required",
                parallel_tool_calls=True,
                temperature=1.2,
                seed=seed,
                max_tokens=600,
                extra_body={"speculation": {"draft": draft}},
            )
            told.append(heard(answer.choices[0].message))
        assert told[0] == told[1]
        text, calls = told[0]
        counts.append(len(calls))
        assert (text == "") is (answer.choices[0].finish_reason == "tool_calls")
        for _, arguments in calls:
            jsonschema.validate(json.loads(arguments), HUM)
    assert max(counts) > 1


def test_a_schema_of_arguments_that_is_none_is_told_of_the_tools(http: httpx.Client) -> None:
    unread = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for properties, why in ((3, "properties must be an object"), ({"a": unread}, "uniqueItems")):
        function = {"name": "sing", "parameters": {"type": "object", "properties": properties}}
        body = {
            "messages": [{"role": "user", "content": "sing"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert why in response.json()["error"]["message"]


def test_a_grammar_that_is_none_is_told_before_anything_is_said(http: httpx.Client) -> None:
    wish = {"type": "regex", "regex": "(unclosed"}
    body = {**ASK, "response_format": wish, "stream": True}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("response_format: this regex is none")


def test_choices_are_what_their_seeds_give_alone(client: openai.OpenAI) -> None:
    ask: Any = {"model": "long", "prompt": "the king", "max_tokens": 30, "extra_body": ENDLESS}
    answer = client.completions.create(**ask, seed=5, n=3)
    alone = [client.completions.create(**ask, seed=5 + number) for number in range(3)]
    texts = [one.choices[0].text for one in alone]
    assert [choice.text for choice in answer.choices] == texts
    assert len({*texts}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 90
    streamed = ["", "", ""]
    for chunk in client.completions.create(**ask, seed=5, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_a_good_draft_saves_steps(http: httpx.Client) -> None:
    told = complete(http, max_tokens=120, speculation={"draft": "twin"})["speculation"]
    assert told["tau"] > 1.8
    assert told["steps"] * told["tau"] == pytest.approx(120, abs=0.1)
    assert told["draft"] == "twin"


def test_eight_streams_at_once_each_say_what_they_say_alone(http: httpx.Client) -> None:
    asks = [
        {"prompt": f"{word} and", "max_tokens": 60 + number, "speculation": {"draft": draft}}
        for number, (word, draft) in enumerate(
            (word, draft) for word in ("the", "king", "sing", "你好") for draft in ("self", "twin")
        )
    ]
    alone = [plain(http, prompt=ask["prompt"], max_tokens=ask["max_tokens"]) for ask in asks]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ask: streamed(http, **ask)[0], asks))
    assert together == alone


def test_a_stop_string_ends_stream_and_answer_alike(http: httpx.Client) -> None:
    text = plain(http, max_tokens=60)
    stop = text[25:29]
    cut = text[: text.index(stop)]
    for draft in ("none", "self", "inline", "twin"):
        wish = {"stop": [stop], "max_tokens": 60, "speculation": {"draft": draft}}
        whole = complete(http, **wish)
        assert (text_of(whole), whole["choices"][0]["finish_reason"]) == (cut, "stop")
        joined, last = streamed(http, **wish)
        assert (joined, last["choices"][0]["finish_reason"]) == (cut, "stop")


def test_without_a_limit_the_answer_fills_the_context(http: httpx.Client) -> None:
    said = complete(http, prompt=[5] * 900, speculation={"draft": "twin"})
    assert said["usage"] == {
        "prompt_tokens": 900,
        "completion_tokens": 124,
        "total_tokens": 1024,
    }
    assert said["choices"][0]["finish_reason"] == "length"


# -- clients that leave, crowds, faults ------------------------------------------------------------


@pytest.mark.parametrize("draft", ["none", "twin"])
def test_clients_that_leave_give_everything_back(http: httpx.Client, draft: str) -> None:
    """Three times as many as run together, some of them gone before the first token came."""

    def leave(number: int) -> int:
        body = {**ASK, "stream": True, "speculation": {"draft": draft}}
        patience = httpx.Timeout(60, read=0.05 if number % 4 == 0 else 60)
        try:
            with http.stream("POST", "/v1/completions", json=body, timeout=patience) as response:
                if response.status_code == 200:
                    for _line, _ in zip(response.iter_lines(), range(number % 5), strict=False):
                        pass
                return response.status_code
        except httpx.ReadTimeout:
            return 0

    with ThreadPoolExecutor(24) as pool:
        ends = list(pool.map(leave, range(24)))
    assert {*ends} <= {0, 200, 503}
    assert ends.count(200) >= 8
    assert wait_until(lambda: busy(http) == (0, 0, 0), 5), "at once"
    complete(http, max_tokens=1)


def test_a_crowd_is_served_or_told_to_come_back(http: httpx.Client) -> None:
    def ask(_number: int) -> httpx.Response:
        return http.post("/v1/completions", json={**ASK, "max_tokens": 150})

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    refused = [answer for answer in answers if answer.status_code == 503]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 40
    assert len(served) >= 8
    assert refused
    for answer in refused:
        assert answer.json()["error"]["type"] == "overloaded_error"
        assert "Traceback" not in answer.text
        assert int(answer.headers["retry-after"]) >= 1
    assert len({text_of(answer.json()) for answer in served}) == 1


def kill_drafts() -> None:
    victims = processes("ray::DraftWorker")
    assert len(victims) == 2
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def drafts(http: httpx.Client) -> tuple[set[str], dict[str, int]]:
    status = http.get("/health").json()["verifier"]
    return set(status["drafts"].values()), status["draft_faults"]


def test_killing_the_drafts_in_the_middle_of_a_stream_changes_nothing(http: httpx.Client) -> None:
    expected = plain(http, max_tokens=400)
    body = {**ASK, "max_tokens": 400, "stream": True, "speculation": {"draft": "twin"}}
    _, faults_before = drafts(http)
    with http.stream("POST", "/v1/completions", json=body) as response:
        stream = chunks(response)
        text = "".join(text_of(next(stream)) for _ in range(3))
        kill_drafts()
        text += "".join(text_of(chunk) for chunk in stream)
    assert text == expected
    _, faults = drafts(http)
    assert faults["twin"] > faults_before.get("twin", 0)
    assert wait_until(lambda: scrape()["draft_faults_total/twin"] == faults["twin"])
    # Whoever asks while they are away is answered too, ...
    away = complete(http, max_tokens=50, speculation={"draft": "twin"})
    assert expected.startswith(text_of(away).rstrip("\ufffd"))
    # ... and they come back by themselves.
    assert wait_until(lambda: drafts(http)[0] == {"ready"}, 60)
    assert complete(http, max_tokens=50, speculation={"draft": "twin"})["speculation"]["tau"] > 1.8


@pytest.mark.timeout(2 * RESTART_S)
def test_a_killed_verifier_costs_its_answers_time_and_nothing_else(url: str) -> None:
    """Those that are streaming, and the one that comes while it is away."""
    sampled = {"temperature": 1.0, "top_p": 0.9, "seed": 7, "frequency_penalty": 0.2}
    with (
        httpx.Client(base_url=url, timeout=RESTART_S) as http,
        ThreadPoolExecutor(6) as pool,
    ):
        asks: list[dict[str, Any]] = [
            {"max_tokens": 900, "speculation": {"draft": draft}, **sampling}
            for draft, sampling in product(("none", "twin", "self"), ({}, sampled))
        ]
        alone = [plain(http, **ask) for ask in asks[:2]] * 3
        first, *others = asks
        answers = [pool.submit(streamed, http, **ask) for ask in others]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        with http.stream("POST", "/v1/completions", json={**ASK, **first, **usage}) as response:
            stream = chunks(response)
            text = text_of(next(stream))
            (victim,) = processes("ray::ServeReplica:tiny:Verifier")
            os.kill(victim, signal.SIGKILL)
            late = complete(http, **first)
            *pieces, last = stream
        text += "".join(text_of(piece) for piece in pieces)
        assert [text, *(answer.result()[0] for answer in answers)] == alone
    assert text_of(late) == text
    assert last["usage"] == late["usage"]
    assert last["usage"]["completion_tokens"] == 900
    assert wait_until(lambda: sum(resumptions().values()) >= 1)


def resumptions() -> dict[str, float]:
    return {key: value for key, value in scrape().items() if key.startswith("resumptions_total/")}
