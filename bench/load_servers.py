"""Who answers under load: a verifier in this process, or a server over HTTP."""

import asyncio
import os
from collections.abc import Callable, Mapping
from itertools import count
from time import perf_counter
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from bench.decode import PLAIN, Arm, Settings, request_of
from bench.load import Failed, Question, Refused, Reply, Usage
from cache.kv_pool import KVPool
from deployments.config import API_KEY_VARIABLE
from workers.budget import Budget
from workers.completion import Completion
from workers.request import Delta, GenerationRequest
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal
from workers.verifier import EngineError, QueueFull, Verifier

# -- in this process -------------------------------------------------------------------------------


class MostPages:
    """The most KV pages in use, as a verifier's `on_verdict`: then all of a step's are taken."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._most = 0

    def __call__(self, proposal: Proposal, verdict: Verdict) -> None:
        self._most = max(self._most, self.pool.pages_in_use)

    def collect(self) -> int:
        """Since the last call."""
        most, self._most = self._most, 0
        return most


class InProcess:
    """A verifier whose loop is started, and whose `on_verdict` is `pages`.

    arms: by domain and name; encoded: token ids by prompt, so that no lap pays for the tokenizer.
    """

    forgets = True

    def __init__(
        self,
        verifier: Verifier,
        pages: MostPages,
        arms: Mapping[str, Mapping[str, Arm]],
        encoded: Mapping[str, tuple[int, ...]],
        budget: Budget,
        temperature: float,
    ) -> None:
        self._verifier = verifier
        self._pages = pages
        self._arms = arms
        self._encoded = encoded
        self._budget = budget
        self._temperature = temperature
        self._numbers = count()
        self._before = verifier.spent()

    async def ask(self, arm: str, question: Question) -> Reply:
        request = self._request(arm, question)
        hearing = _Hearing(request, asyncio.get_running_loop())
        try:
            self._verifier.submit(request, hearing.take)
        except (QueueFull, ValueError) as error:
            raise Refused(str(error)) from error
        except EngineError as error:
            raise Failed(str(error)) from error
        try:
            return await hearing.reply
        except EngineError as error:
            raise Failed(str(error)) from error
        except asyncio.CancelledError:
            self._verifier.cancel(request.id)
            raise

    def _request(self, arm: str, question: Question) -> GenerationRequest:
        settings = Settings(question.max_tokens, self._budget, self._temperature)
        ids = self._encoded[question.prompt]
        own = self._arms[question.domain][arm]
        return request_of(f"{next(self._numbers)}", ids, own, settings, question.seed)

    def begin(self) -> None:
        self._verifier.forget_prefixes()
        self._pages.collect()
        self._before = self._verifier.spent()

    def end(self) -> Usage:
        before, after = self._before, self._verifier.spent()
        return Usage(
            kv_pages=self._pages.collect(),
            kv_pool=self._pages.pool.pages,
            draft_s=after.draft_s - before.draft_s,
            pass_s=after.pass_s - before.pass_s,
        )

    async def close(self) -> None:
        self._verifier.stop()


class _Hearing:
    """An answer on its way from the decode loop's thread to a coroutine."""

    def __init__(self, request: GenerationRequest, here: asyncio.AbstractEventLoop) -> None:
        self.reply: asyncio.Future[Reply] = here.create_future()
        self._here = here
        self._completion = Completion(request)
        self._first_at: float | None = None

    def take(self, item: Delta | BaseException) -> None:
        """In the loop's thread: times are those of the words, whoever is busy here."""
        now = perf_counter()
        if isinstance(item, BaseException):
            self._later(self.reply.set_exception, item)
            return
        self._completion.take(item)
        if self._first_at is None and (item.text or item.finish_reason):
            self._first_at = now
        if item.finish_reason:
            assert self._first_at is not None
            tokens, text = len(self._completion.tokens), self._completion.text
            reply = Reply(self._first_at, now, tokens, item.stats.steps, text)
            self._later(self.reply.set_result, reply)

    def _later(self, settle: Callable[[Any], None], value: Reply | BaseException) -> None:
        def unless_cancelled() -> None:
            if not self.reply.done():
                settle(value)

        self._here.call_soon_threadsafe(unless_cancelled)


# -- over HTTP -------------------------------------------------------------------------------------

# Seconds without a word: a request may have to wait for many others.
_PATIENCE = httpx.Timeout(600.0, connect=10.0)
_AT_ONCE = httpx.Limits(max_connections=None)  # an open loop may have any number of them
_NO_DRAFT = "none"


class _Spoken(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Spoken
    finish_reason: str | None = None


class _Counted(BaseModel):
    completion_tokens: int


class _Speculation(BaseModel):
    steps: int


class _Fault(BaseModel):
    message: str


class _Chunk(BaseModel):
    """The parts of a stream's event that are read here; `error` is there instead of all else."""

    choices: list[_Choice] = []
    usage: _Counted | None = None
    speculation: _Speculation | None = None
    error: _Fault | None = None


class _Problem(BaseModel):
    error: _Fault


class _Card(BaseModel):
    id: str


class _Cards(BaseModel):
    data: list[_Card]


def served_model(url: str) -> str:
    """What the server there serves. Raises ValueError where there is none."""
    try:
        response = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_key(), timeout=_PATIENCE)
        return _Cards.model_validate_json(response.raise_for_status().content).data[0].id
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError, IndexError) as error:
        raise ValueError(
            f"url: no server tells at {url}/v1/models what it serves: {error}"
        ) from error


def _key() -> dict[str, str]:
    """The header that a server with a key asks for."""
    key = os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class OverHttp:
    """An Outrider server; url: before `/v1`. An arm is a draft as a request names it, or plain."""

    forgets = False

    def __init__(self, url: str, budget: Budget, temperature: float) -> None:
        self._http = httpx.AsyncClient(
            base_url=url, headers=_key(), timeout=_PATIENCE, limits=_AT_ONCE
        )
        self._budget = budget
        self._temperature = temperature

    async def ask(self, arm: str, question: Question) -> Reply:
        body = self._body(arm, question)
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                await _check(response)
                return await _read(response)
        except httpx.HTTPError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def _body(self, arm: str, question: Question) -> dict[str, Any]:
        plain = arm == PLAIN
        return {
            "messages": [{"role": "user", "content": question.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": self._temperature,
            "seed": question.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"draft": _NO_DRAFT if plain else arm}
            | ({} if plain else {"budget": self._budget}),
        }

    def begin(self) -> None:
        pass

    def end(self) -> None:
        return None

    async def close(self) -> None:
        await self._http.aclose()


async def _check(response: httpx.Response) -> None:
    """Raises Refused or Failed for an answer that is none."""
    if response.is_success:
        return
    said = await response.aread()
    try:
        message = _Problem.model_validate_json(said).error.message
    except ValidationError:
        message = response.reason_phrase
    kind = Failed if response.is_server_error and not _overloaded(response) else Refused
    raise kind(f"HTTP {response.status_code}: {message}")


def _overloaded(response: httpx.Response) -> bool:
    return response.status_code == httpx.codes.SERVICE_UNAVAILABLE


async def _read(response: httpx.Response) -> Reply:
    """A stream to its end. Raises Failed where it ends otherwise than it should."""
    text, first_at, last_at = "", None, None
    last = _Chunk()
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        now, last = perf_counter(), _chunk(line.removeprefix("data: "))
        for choice in last.choices:
            text += choice.delta.content or ""
            if first_at is None and (text or choice.finish_reason):
                first_at = now
            if choice.finish_reason:
                last_at = now
    if first_at is None or last_at is None or last.usage is None or last.speculation is None:
        raise Failed("the stream ended too early, or is none of an Outrider server")
    return Reply(first_at, last_at, last.usage.completion_tokens, last.speculation.steps, text)


def _chunk(data: str) -> _Chunk:
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise Failed("an event of the stream is not as OpenAI's are") from error
    if chunk.error is not None:
        raise Failed(chunk.error.message)
    return chunk
