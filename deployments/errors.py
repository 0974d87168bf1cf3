"""What a client is told when something goes wrong, in OpenAI's shape.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`param` is the path of the field at fault (`messages.0.content`), so that a program can point at
it. Before a stream starts an error is an HTTP status with this body; after that it is one `data:`
event.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ErrorType = Literal[
    "invalid_request_error", "not_found_error", "overloaded_error", "timeout_error", "server_error"
]

_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*(?=: )")

RETRY_AFTER_S = 1
"""Seconds a refused client should wait: about the time in which a place becomes free."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is not the one asked for: the HTTP status and the error body."""

    status: int
    message: str
    type: ErrorType = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    again: bool = True

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON body, also what a mid-stream `data:` event holds."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` when trying again makes sense, OpenAI's header when it does not though the
        status says so.
        """
        if not self.again:
            return {"X-Should-Retry": "false"}
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad_request(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def refused(error: ValueError) -> ApiError:
    """The 400 for what only a look at the target could tell: messages begin with the field's name
    where it is about one.
    """
    field = _FIELD.match(str(error))
    return bad_request(field and field[0], str(error))


def overloaded(message: str) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(
        503, message, "overloaded_error", code="overloaded", retry_after_s=RETRY_AFTER_S
    )


def late(seconds: float) -> ApiError:
    """A 504. The official client would ask again at once, which is seldom what is wanted."""
    message = (
        f"the answer was not complete within {seconds:g} s; ask for fewer tokens, or give it more"
    )
    return ApiError(504, message, "timeout_error", "deadline_s", "deadline_exceeded", again=False)


def failed(message: str) -> ApiError:
    """A 500: our fault, not the client's."""
    return ApiError(500, message, "server_error", code="internal_error")


def from_validation(faults: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The 400 for a body that does not fit its schema.

    `faults` are pydantic's, with FastAPI's leading "body". A union reports faults for each of its
    branches; those deepest in the body are about the branch that was meant. What is left after that
    is joined with "or".
    """
    first = faults[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return bad_request(None, f"the body is not JSON: {reason}", "invalid_json")
    here = [fault for fault in faults if fault["loc"][:2] == first["loc"][:2]]
    deepest = max(here, key=lambda fault: len(field_path(fault, body)))
    path = field_path(deepest, body)
    if not path:
        return bad_request(
            None, "the body must be a JSON object, sent with Content-Type: application/json"
        )
    reasons = {_reason(fault): None for fault in here if field_path(fault, body) == path}
    param = ".".join(path)
    return bad_request(param, f"{param}: {' or '.join(reasons)}", _code(deepest))


def field_path(fault: Mapping[str, Any], body: object) -> tuple[str, ...]:
    """Where in `body` the fault is: the names of union branches in pydantic's path are left out.

    `("body", "stop", "list[str]", 0)` in `{"stop": [3]}` is `("stop", "0")`; () is the body itself.
    """
    path: list[str] = []
    here: Any = body
    parts = fault["loc"][1:]
    for number, part in enumerate(parts, start=1):
        if _has(here, part):
            path.append(str(part))
            here = here[part]
        elif fault["type"] == "missing" and number == len(parts):
            path.append(str(part))
    if fault["type"] == "string_unicode" and _has(here, fault["input"]):
        path.append(fault["input"])  # not what is there but its name is no text
    return tuple(path)


def _has(here: object, part: object) -> bool:
    if isinstance(here, dict):
        return part in here
    return isinstance(here, list) and isinstance(part, int) and part < len(here)


def _reason(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "unknown field, and no field is ignored here; take it out of the request"
    if fault["type"] == "missing" and fault["msg"] == "Field required":
        return "this field is required"
    reason = str(fault["msg"]).removeprefix("Value error, ")
    return reason[:1].lower() + reason[1:]


def _code(fault: Mapping[str, Any]) -> str:
    return "unknown_field" if fault["type"] == "extra_forbidden" else "invalid_value"
