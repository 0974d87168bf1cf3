"""What a request passes before an endpoint sees it: ASGI middleware, one concern each.

Errors are worded as all others are. A class here only looks at HTTP; everything else goes through.
"""

import hmac
import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.errors import ApiError

REQUEST_ID = "x-request-id"
OPEN_PATHS = frozenset({"/health"})
"""Need no key: probes have none."""

_GOOD_ID = re.compile(r"[!-~]{1,128}")

ErrorResponse = Callable[[ApiError], Response]


class NameRequests:
    """Every answer carries the id that its request came with, or one of ours; so does the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Puts it into the answer's headers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _GOOD_ID.fullmatch(given) else secrets.token_hex(16)
        scope[REQUEST_ID] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        await self._app(scope, receive, named)


class AskForKey:
    """401 for who does not know the key, and no hint how much of it was right."""

    def __init__(self, app: ASGIApp, key: str, respond: ErrorResponse) -> None:
        self._app = app
        self._key = key.encode()
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets through who knows it."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(scope):
            await self._app(scope, receive, send)
            return
        message = "send this server's key as `Authorization: Bearer KEY`"
        await self._respond(ApiError(401, message, code="invalid_api_key"))(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are Latin-1. Compared in constant time: how long it takes says nothing.
        right = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
        return scheme.lower() == "bearer" and right


class LimitBodies:
    """413 for more than fits, as soon as that is known and before anything is parsed."""

    def __init__(self, app: ASGIApp, most: int, respond: ErrorResponse) -> None:
        self._app = app
        self._most = most
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses by the announced length, or while it is read."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._most:
            error = ApiError(413, self._too_large, code="body_too_large")
            await self._respond(error)(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than the {self._most} bytes that this server reads"
