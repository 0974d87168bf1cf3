"""Talking to an ASGI application without a server."""

import asyncio
import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of each `data:` line; `[DONE]` must be the last, and is left out."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "asgi": {"spec_version": "2.3"},
    "client": None,
    "server": None,
}


async def leave(app: Any, path: str, body: dict[str, Any], after: int) -> list[bytes]:
    """A client that goes away after `after` body chunks (0: before the first)."""
    chunks: list[bytes] = []
    gone = asyncio.Event()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            chunks.append(message["body"])
        if len(chunks) >= after:
            gone.set()

    await app({**SCOPE, "path": path}, receive, send)
    return chunks
