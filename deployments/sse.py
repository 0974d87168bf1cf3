"""Server-sent events as OpenAI's clients read them: `data: JSON`, a blank line, `[DONE]` last."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Asks proxies on the way not to hold chunks back."""


def event(content: dict[str, Any]) -> bytes:
    """One event. All but ASCII is escaped: some clients take every line break of Unicode for one,
    and only the blank line shall end an event.
    """
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()
