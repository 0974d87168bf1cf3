"""Whatever is sent, the server answers or says which field is wrong, and goes on serving.

2,000 bodies by default; `OUTRIDER_FUZZ=100000` runs the full size.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.config import ApiConfig, LimitsConfig
from tests.asgi import SCOPE, events
from tests.bodies import ENDPOINTS, Sent, sent
from tests.in_process import Served, served
from tests.tiny import make_target

BODIES = int(os.environ.get("OUTRIDER_FUZZ", "2000"))
TOGETHER = 24

# A deadline, or a grammar that leads nowhere, is found out about in the middle of a stream.
MAY_COME_LATE = ("timeout_error", "invalid_request_error")
TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    503: "overloaded_error",
    504: "timeout_error",
}

pytestmark = pytest.mark.timeout(300 + BODIES // 10)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Served]:
    folder = make_target(tmp_path / "target", max_position_embeddings=128)
    api = ApiConfig(request_log=str(tmp_path / "log"))
    async with served(folder, LimitsConfig(max_running=16, max_queued=500), api=api) as world:
        yield world


async def answered(app: Any, request: Sent) -> tuple[int, bytes]:
    """Status and body of the answer."""
    size = -(-len(request.body) // request.pieces) or 1
    pieces = [request.body[at : at + size] for at in range(0, len(request.body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, start=1)
    ]
    status, heard = 0, b""

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, heard
        status = message.get("status", status)
        heard += message.get("body", b"")

    type_ = [] if request.type_ is None else [(b"content-type", request.type_.encode("latin-1"))]
    await app({**SCOPE, "path": request.path, "headers": type_}, receive, send)
    return status, heard


def names(here: Any, param: str, fields: frozenset[str]) -> bool:
    """Whether it is the path of something in a body, or of a field that is missing there."""
    if not param:
        return True
    parts: Sequence[tuple[str, Any]] = ()
    if isinstance(here, dict):
        parts = [*here.items()]
    elif isinstance(here, list):
        parts = [(str(number), own) for number, own in enumerate(here)]
    deeper = (
        param == name or param.startswith(f"{name}.") and names(own, param[len(name) + 1 :], fields)
        for name, own in parts
    )
    return any(deeper) or (isinstance(here, dict) and param in fields)


def fields_of(schema: Any) -> frozenset[str]:
    """All names of fields in a schema, at any depth."""
    found: set[str] = set()
    if isinstance(schema, dict):
        found |= {*schema.get("properties", {})}
        schema = [*schema.values()]
    for each in schema if isinstance(schema, list) else ():
        found |= fields_of(each)
    return frozenset(found)


FIELDS = {path: fields_of(model.model_json_schema()) for path, model in ENDPOINTS.items()}


def check(request: Sent, status: int, heard: bytes) -> None:
    """It is an answer, or an error that names what is wrong."""
    if status == 200:
        for body in events(heard.decode()) if heard.startswith(b"data:") else [json.loads(heard)]:
            assert "error" not in body or body["error"]["type"] in MAY_COME_LATE, body
        return
    error, said = json.loads(heard)["error"], request.json
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == TYPES[status], error
    if status == 503:
        assert error["message"].startswith("too many requests"), error
        return
    if isinstance(said, dict):
        assert error["param"] is not None, error
        assert names(said, error["param"], FIELDS[request.path]), error
    else:
        assert error["param"] is None, error


async def test_any_body_is_answered_or_named_wrong(world: Served) -> None:
    ask = {"prompt": "the thing and the", "temperature": 0, "max_tokens": 20}
    before = (await world.complete(**ask)).json()["choices"]
    ends: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []

    async def client(first: int) -> None:
        for number in range(first, BODIES, TOGETHER):
            request = sent(number)
            try:
                status, heard = await answered(world.app, request)
                ends[request.path, status] += 1
                check(request, status, heard)
            except Exception as error:
                wrong.append(f"{number}: {error!r:.300}")

    await asyncio.gather(*(client(first) for first in range(TOGETHER)))
    assert not wrong, f"{len(wrong)}, such as " + "\n".join(wrong[:10])
    for path in ENDPOINTS:
        total = sum(count for (own, _), count in ends.items() if own == path)
        assert 0.15 < ends[path, 200] / total < 0.85, ends
        assert ends[path, 503] < total / 50, ends
    assert (await world.complete(**ask)).json()["choices"] == before
    assert world.busy == (0, 0, 0)
    world.target.pool.check_integrity()
