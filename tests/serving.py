"""Talking to a server under test, and looking at its processes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

RESTART_S = 240
"""Much longer than a verifier takes to come back, also on a machine that is busy otherwise."""


SONG: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"enum": ["the king", "你好"]},
        "sings": {"type": "boolean"},
        "times": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
    },
    "required": ["who", "sings", "times"],
    "additionalProperties": False,
}
"""A JSON schema that n-gram drafts keep breaking."""


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """An ASGI application behind a real server, in a thread of its own; its URL."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def busy(http: httpx.Client) -> tuple[int, int, int]:
    """Requests running and waiting, and pages taken."""
    status = http.get("/health").json()["verifier"]
    return status["running"], status["waiting"], status["kv_pages_in_use"]


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream up to `[DONE]`, which must come."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def text_of(body: dict[str, Any]) -> str:
    """Of a completion, or of one chunk of it."""
    text: str = body["choices"][0]["text"]
    return text


def processes(title: str) -> list[int]:
    """Ids of processes whose title starts so. Ray gives its actors `ray::` and their class."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if command.startswith(title.encode()):
                found.append(int(entry.name))
    return found
