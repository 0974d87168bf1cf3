"""A client that notes how each of its requests ended."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from tests.endurance.requests import Ask
from tests.serving import chunks

How = Literal["text", "left", "refused", "busy", "late", "failed", "broken"]
"""A whole answer; the client left; a 4xx; a 503; a deadline's error; another error of the server's;
a connection that broke or was not had."""


@dataclass(slots=True)
class Heard:
    """The choices of an answer, as far as they have come: of a whole one or of chunks."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    words: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    finishes: dict[int, str] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    completion_tokens: int | None = None

    def add(self, body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            number = choice["index"]
            piece = choice.get("text")
            if piece is None:
                piece = choice.get("delta", choice.get("message"))["content"]
            self.texts[number] += piece or ""
            logprobs = choice.get("logprobs") or {}
            self.words[number] += len(logprobs.get("content", logprobs.get("tokens", ())))
            if choice["finish_reason"]:
                self.finishes[number] = choice["finish_reason"]
        self.speculation = body.get("speculation") or self.speculation
        if body.get("usage"):
            self.completion_tokens = body["usage"]["completion_tokens"]

    def said(self) -> "Said":
        return Said(
            {at: (self.texts[at], self.finishes.get(at), self.words[at]) for at in self.texts},
            self.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class Said:
    """What must be the same, whatever happened: by choice its text, how it ended, and how many
    tokens were told of with logprobs; and the tokens of all, where they were told."""

    choices: dict[int, tuple[str, str | None, int]]
    tokens: int | None

    def same(self, other: "Said") -> bool:
        """Whether both are one answer."""
        counted = None not in (self.tokens, other.tokens)
        return self.choices == other.choices and (not counted or self.tokens == other.tokens)

    def begins(self, whole: "Said") -> bool:
        """Whether it is a beginning of that answer."""
        return all(
            at in whole.choices and whole.choices[at][0].startswith(text)
            for at, (text, _, _) in self.choices.items()
        )


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended."""

    how: How
    seconds: float
    heard: Heard
    status: int | None = None
    error: dict[str, Any] = field(default_factory=dict)
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """When a client leaves: after so many events of a stream, or of so much silence."""

    events: int | None = None
    silence_s: float | None = None


STAYING = Leaving()


def send(http: httpx.Client, ask: Ask, leaving: Leaving = STAYING) -> End:
    """The request's end. It has one, and nothing is raised."""
    began, heard = time.monotonic(), Heard()

    def end(how: How, **told: Any) -> End:
        return End(how, time.monotonic() - began, heard, **told)

    content = json.dumps(ask.body).encode()  # half a surrogate pair travels as an escape
    timeout = httpx.Timeout(http.timeout.connect, read=leaving.silence_s or http.timeout.read)
    try:
        with http.stream(
            "POST",
            ask.path,
            content=content,
            headers={"Content-Type": "application/json"},
            timeout=timeout,
        ) as response:
            if response.status_code != 200:
                return end(**_refusal(response))
            for number, body in enumerate(_bodies(ask, response)):
                if "error" in body:
                    how: How = "late" if body["error"]["code"] == "deadline_exceeded" else "failed"
                    return end(how, error=body["error"], status=200)
                heard.add(body)
                if leaving.events is not None and number >= leaving.events:
                    return end("left")
            return end("text", status=200)
    except httpx.ReadTimeout as error:
        if leaving.silence_s is not None:
            return end("left")
        return end("broken", error={"message": f"silence: {error!r}"})
    except httpx.TransportError as error:
        return end("broken", error={"message": repr(error)})


def _bodies(ask: Ask, response: httpx.Response) -> Iterator[dict[str, Any]]:
    if ask.body.get("stream"):
        yield from chunks(response)
    else:
        yield json.loads(response.read())


def _refusal(response: httpx.Response) -> dict[str, Any]:
    text = response.read().decode()
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": text[:200], "param": None, "code": None}  # not of our making
    how: How = "failed"
    if response.status_code == 503:
        how = "busy"
    elif response.status_code == 504:
        how = "late"
    elif response.status_code < 500:
        how = "refused"
    return {
        "how": how,
        "status": response.status_code,
        "error": error,
        "retry_after": response.headers.get("retry-after"),
    }


def oracle(http: httpx.Client, asks: tuple[Ask, ...]) -> list[Said]:
    """What each of them says alone and without a draft.

    Raises:
        RuntimeError: one was not answered.
    """
    said = []
    for ask in asks:
        end = send(http, ask.drafted("none"))
        if end.how != "text":
            raise RuntimeError(f"{ask.kind} {ask.body}: {end.how} {end.error}")
        said.append(end.heard.said())
    return said


def drafts_of(http: httpx.Client) -> tuple[str, ...]:
    """Names of the pool, as the server tells them."""
    return tuple(http.get("/health").json()["verifier"]["drafts"])
