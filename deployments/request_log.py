"""One line of JSON for each request, in a file: what it was, how it went, and nothing of its text.

What an endpoint finds out it notes; the middleware that sees the request end writes it all down.
Each line is appended in one piece to whatever file has the name then: several processes may write
to it, and it may be moved away.
"""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger("outrider.ingress")

_noted: ContextVar[dict[str, Any] | None] = ContextVar("noted", default=None)


def note(**fields: Any) -> None:
    """Something about the request that is being answered."""
    notes = _noted.get()
    if notes is not None:
        notes.update(fields)


class RequestLog:
    """path: the file, None for no log at all. Raises OSError when it cannot be written to."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._append("")

    def begin(self) -> dict[str, Any]:
        """From here on `note` is about this request: its notes."""
        notes: dict[str, Any] = {}
        _noted.set(notes)
        return notes

    def end(self, **fields: Any) -> None:
        """Writes it down. A full disk costs the line, not the answer."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        try:
            self._append(json.dumps(line) + "\n")
        except OSError as error:
            logger.error("a line of the log of requests is lost: %s", error)

    def _append(self, text: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
