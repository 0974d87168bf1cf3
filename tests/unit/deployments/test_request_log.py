"""A line for each request, by how it ended, and nothing of its text."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.config import ApiConfig
from deployments.request_log import RequestLog, note
from workers.verifier import EngineError

SECRET = "what nobody else shall read"


def text_of(world: Any) -> str:
    return Path(world.log).read_text()


@pytest.fixture
def lines(world: Any) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [json.loads(line) for line in text_of(world).splitlines()]


async def test_an_answer(world: Any, lines: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = said("Hel", "lo", draft="lm")
    wish = {"messages": [{"role": "user", "content": SECRET}], "speculation": {"draft": "lm"}}
    for stream in (False, True):
        body = {**wish, "stream": stream}
        post = world.client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "r1"})
        assert (await post).status_code == 200
    whole, streamed = lines()
    assert whole.pop("time") <= streamed.pop("time")
    assert whole.pop("id") != streamed.pop("id")
    for line in (whole, streamed):
        assert 0 < line.pop("first_token_s") <= line.pop("seconds")
        assert line.pop("per_token_s") > 0
    assert (whole.pop("stream"), streamed.pop("stream")) == (False, True)
    assert whole == streamed
    assert whole == {
        "request": "r1",
        "endpoint": "/v1/chat/completions",
        "end": "200",
        "choices": 1,
        "prompt_tokens": len(f"user:{SECRET}\n"),
        "max_tokens": 100 - len(f"user:{SECRET}\n"),
        "draft": "lm",
        "reason": "requested: by name",
        "tokens": 5,
        "steps": 2,
        "drafted": 4,
        "accepted": 3,
        "tau": 2.5,
        "resumed": 0,
        "finish_reasons": ["stop"],
    }


async def test_errors_say_why(world: Any, lines: Any, said: Callable[..., Any]) -> None:
    await world.complete(prompt=SECRET, best_off=1)
    await world.complete(prompt=SECRET, model="gpt-9")
    world.verifier.script = [said("a", "b")[0], EngineError("the forward pass failed")]
    await world.complete(prompt=SECRET, stream=True)
    await world.client.get("/nowhere")
    ends = [(line["end"], line.get("error", "")) for line in lines()]
    assert [end for end, _ in ends] == ["400", "404", "200", "404"]
    for (_, error), part in zip(ends, ("best_off", "gpt-9", "pass failed", ""), strict=True):
        assert part in error
    assert SECRET not in text_of(world)


async def test_a_client_that_left(world: Any, lines: Any, said: Callable[..., Any]) -> None:
    world.verifier.script = [said("a", "b")[0], asyncio.Event()]
    call = asyncio.create_task(world.complete(prompt=SECRET))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (line,) = lines()
    assert (line["end"], "tokens" in line) == ("cancelled", False)


async def test_requests_side_by_side_are_told_apart(
    world: Any, lines: Any, said: Callable[..., Any]
) -> None:
    world.verifier.scripts = [said(*"x" * size, reason="length") for size in (2, 3, 4)]
    await asyncio.gather(*(world.complete() for _ in range(3)))
    assert sorted(line["tokens"] for line in lines()) == [2, 3, 4]
    note(about="nobody")
    assert all("about" not in line for line in lines())


async def test_a_log_that_is_moved_away_is_begun_anew(world: Any, lines: Any) -> None:
    await world.complete()
    os.rename(world.log, f"{world.log}.1")
    await world.complete()
    assert len(lines()) == 1


async def test_a_line_that_cannot_be_written_costs_no_answer(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    os.remove(world.log)
    os.mkdir(world.log)
    assert (await world.complete()).status_code == 200
    assert "log of requests is lost" in caplog.text


def test_a_log_that_cannot_be_begun_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        RequestLog(str(tmp_path / "nowhere" / "requests.jsonl"))


def test_its_path_is_that_of_the_folder_where_the_server_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ApiConfig.model_validate({"request_log": "requests.jsonl"})
    assert config.request_log == str(tmp_path / "requests.jsonl")
