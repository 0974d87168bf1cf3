"""OpenAI's HTTP API. One request, in a straight line:

    body -> checked -> prompt -> draft chosen -> verifier -> deltas -> JSON or SSE -> outcome to
    the router

An error before the first delta is a real HTTP status: a stream is only started once its first
delta is here. A client that leaves closes the generators, and so cancels the request in the
verifier.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from opentelemetry.trace import Tracer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments import errors, openapi, sse
from deployments.admission import ROUTING_PATIENCE_S, Admission, Body, Job, Wanted, check_model
from deployments.answer import Answer, Answers
from deployments.config import ApiConfig
from deployments.deadline import within
from deployments.dialect import CHAT, COMPLETION, Dialect, Said, model_list
from deployments.errors import ApiError, ErrorType
from deployments.gate import REQUEST_ID, AskForKey, LimitBodies, NameRequests
from deployments.links import RouterLink, VerifierAway, VerifierLink
from deployments.logprobs import WordLogprob, Words
from deployments.metrics import IngressMetrics
from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from deployments.request_log import RequestLog, note
from deployments.tool_calls import reader_for
from deployments.tracing import TraceRequests
from router.decision import Outcome
from workers.request import Delta, SpeculationStats, TokenLogprob
from workers.verifier import QueueFull

logger = logging.getLogger("outrider.ingress")

HEALTH_PATIENCE_S = 5.0


class Ingress:
    """The endpoints, as plain methods; `create_app` gives them their paths."""

    def __init__(
        self,
        verifier: VerifierLink,
        router: RouterLink,
        admission: Admission,
        words: Words,
        metrics: IngressMetrics,
    ) -> None:
        self._verifier = verifier
        self._router = router
        self._admission = admission
        self._words = words
        self._metrics = metrics
        self._reports: set[asyncio.Task[None]] = set()

    async def chat(self, body: ChatRequest) -> Response:
        """Answers a chat, whole or as a stream."""
        return await self._respond(body, CHAT)

    async def completion(self, body: CompletionRequest) -> Response:
        """Continues a text, whole or as a stream."""
        return await self._respond(body, COMPLETION)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The ids that the target would read."""
        return await self._admission.tokenize(body)

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The text of ids."""
        return await self._admission.detokenize(body)

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        facts = await self._verifier.facts()
        return model_list(facts.model, facts.created, facts.context_length)

    async def model(self, name: str) -> dict[str, Any]:
        """The card of the model that is served; 404 for any other."""
        check_model(name, await self._verifier.facts())
        card: dict[str, Any] = (await self.models())["data"][0]
        return card

    async def health(self) -> Response:
        """200 while answers can be had, 503 else; and how busy the verifier is."""
        try:
            status = await asyncio.wait_for(self._verifier.status(), HEALTH_PATIENCE_S)
        except TimeoutError as error:
            raise errors.overloaded("the verifier does not answer") from error
        state = "ok" if status.healthy else "unhealthy"
        return JSONResponse(
            {"status": state, "verifier": status.as_dict()}, 200 if status.healthy else 503
        )

    async def _respond(self, body: Body, dialect: Dialect) -> Response:
        arrived = time.perf_counter()
        job = await self._admission.admit(body, dialect)
        answers = Answers(
            [Answer(self._generate(each, job.deadline_s), arrived) for each in job.choices]
        )
        note(**_asked(job, stream=bool(body.stream)))
        await answers.start()
        if body.stream:
            return _Stream(answers, self._events(job, dialect, answers, body.include_usage))
        return JSONResponse(await self._whole(job, dialect, answers))

    def _generate(self, wanted: Wanted, deadline_s: float | None) -> AsyncGenerator[Delta, None]:
        deltas = self._verifier.generate(wanted.request)
        return deltas if deadline_s is None else within(deadline_s, deltas)

    async def _whole(self, job: Job, dialect: Dialect, answers: Answers) -> dict[str, Any]:
        heard: list[list[Delta]] = [[] for _ in job.choices]
        async with aclosing(answers.deltas()) as deltas:
            async for number, delta in deltas:
                heard[number].append(delta)
        self._finish(job, answers)
        choices = [self._said(job, *both) for both in zip(job.choices, heard, strict=True)]
        return dialect.whole(job.envelope, choices, answers.stats)

    def _said(self, job: Job, wanted: Wanted, deltas: Sequence[Delta]) -> Said:
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        text = wanted.echo + "".join(delta.text for delta in deltas)
        spoken = reader_for(job.tools).read(text, last=True)
        return Said(spoken, deltas[-1].finish_reason, self._spelt(wanted, logprobs, 0))

    async def _events(
        self, job: Job, dialect: Dialect, answers: Answers, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._chunks(job, dialect, answers, include_usage)) as chunks:
                async for chunk in chunks:
                    yield sse.event(chunk)
        except (
            Exception
        ) as error:  # the status line is long gone: the client hears it in the stream
            self._metrics.broken()
            yield sse.event(as_api_error(error).body())
        yield sse.DONE

    async def _chunks(
        self, job: Job, dialect: Dialect, answers: Answers, include_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        offsets, called = [0] * len(job.choices), [0] * len(job.choices)
        readers = [reader_for(job.tools) for _ in job.choices]
        for chunk in dialect.opening(job.envelope, [wanted.echo for wanted in job.choices]):
            yield chunk
        async with aclosing(answers.deltas()) as deltas:
            async for number, delta in deltas:
                words = self._spelt(job.choices[number], delta.logprobs, offsets[number])
                offsets[number] += sum(len(each.word.text) for each in words or ())
                spoken = readers[number].read(delta.text, last=delta.finish_reason is not None)
                if spoken.text or spoken.calls or delta.finish_reason or words:
                    said = Said(spoken, delta.finish_reason, words, called[number])
                    called[number] += len(spoken.calls)
                    yield dialect.chunk(job.envelope, number, said, delta.stats)
        self._finish(job, answers)
        if include_usage:
            yield dialect.usage_chunk(job.envelope, answers.stats)

    def _spelt(
        self, wanted: Wanted, logprobs: Sequence[TokenLogprob], offset: int
    ) -> tuple[WordLogprob, ...] | None:
        """Logprobs as words, if the client asked for any."""
        return None if wanted.request.logprobs is None else self._words.spell(logprobs, offset)

    def _finish(self, job: Job, answers: Answers) -> None:
        for wanted, answer in zip(job.choices, answers.answers, strict=True):
            assert answer.stats is not None, "only complete answers come here"
            self._metrics.paced(wanted.request.draft, answer.pace)
            # A restart says nothing of a draft.
            if answer.pace.per_token and not answer.stats.resumed:
                self._report(wanted, answer.stats, answer.pace.per_token)
        note(**_told(answers))

    def _report(self, wanted: Wanted, stats: SpeculationStats, seconds_per_token: float) -> None:
        """Tells the router, off the critical path, whoever chose the draft."""
        task = asyncio.create_task(self._observe(wanted, stats, seconds_per_token))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _fingerprint(self, wanted: Wanted) -> str:
        if wanted.decision and wanted.decision.fingerprint:
            return wanted.decision.fingerprint
        return await asyncio.wait_for(self._router.fingerprint(wanted.route), ROUTING_PATIENCE_S)

    async def _observe(
        self, wanted: Wanted, stats: SpeculationStats, seconds_per_token: float
    ) -> None:
        try:
            fingerprint = await self._fingerprint(wanted)
            await self._router.observe(outcome_of(fingerprint, stats, seconds_per_token))
        except (
            Exception
        ) as error:  # an outcome lost costs the router a lesson, and nobody an answer
            logger.warning("the router did not take an outcome: %r", error)


def _asked(job: Job, *, stream: bool) -> dict[str, Any]:
    """What the log says of a request that is taken on."""
    return {
        "id": job.envelope.id,
        "stream": stream,
        "choices": len(job.choices),
        "prompt_tokens": job.envelope.prompt_tokens,
        "max_tokens": max(each.request.max_tokens for each in job.choices),
        "draft": job.envelope.choice.draft,
        "reason": job.envelope.choice.reason,
    }


def _told(answers: Answers) -> dict[str, Any]:
    """What the log says of its answer."""
    stats, first = answers.stats, answers.answers[0].pace
    return {
        "tokens": stats.emitted,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "tau": round(stats.tau, 4),
        "resumed": stats.resumed,
        "finish_reasons": [answer.finish_reason for answer in answers.answers],
        "first_token_s": round(first.to_first_token, 4),
        "per_token_s": None if first.per_token is None else round(first.per_token, 5),
    }


def outcome_of(fingerprint: str, stats: SpeculationStats, seconds_per_token: float) -> Outcome:
    """What the router learns from an answer: the speed of decoding, without queue and prefill."""
    return Outcome(
        fingerprint=fingerprint,
        draft=stats.draft,
        tokens_per_second=1 / seconds_per_token,
        alpha=stats.alpha if stats.tested else None,
        tau=stats.tau,
        tokens=stats.emitted,
    )


def as_api_error(error: Exception) -> ApiError:
    """How a client hears of it. Overload and restarts say when to come back; ours is logged."""
    told = _in_our_words(error)
    note(error=told.message)
    return told


def _in_our_words(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return errors.overloaded(f"too many requests: {error}")
    if isinstance(error, VerifierAway):
        return errors.overloaded(f"the verifier is restarting: {error}")
    if isinstance(error, ValueError):
        return errors.refused(error)
    logger.error("a request failed", exc_info=error)
    return errors.failed(f"{type(error).__name__}: {error}")


class _Stream(StreamingResponse):
    """Server-sent events. The answers end when the client leaves, even before the first event."""

    def __init__(self, answers: Answers, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=sse.HEADERS, media_type="text/event-stream")
        self._answers = answers
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._answers), aclosing(self._events):
            await super().__call__(scope, receive, send)


class RecordRequests:
    """ASGI middleware: every request is counted and logged once, by how it ended."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics, log: RequestLog) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = end = "cancelled"
        began, notes = time.perf_counter(), self._log.begin()

        async def watch(message: Message) -> None:
            nonlocal status, end
            if message["type"] == "http.response.start":
                status = str(message["status"])
            elif not message.get("more_body", False):
                end = status
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            endpoint = getattr(scope.get("route"), "path", "unknown")
            self._metrics.ended(endpoint, end)
            self._log.end(
                request=scope[REQUEST_ID],
                endpoint=endpoint,
                end=end,
                seconds=round(time.perf_counter() - began, 4),
                **notes,
            )


def create_app(
    ingress: Ingress, metrics: IngressMetrics, api: ApiConfig, tracer: Tracer
) -> FastAPI:
    """The HTTP application around an ingress."""
    app = FastAPI(title="Outrider", version=version("outrider"), redoc_url=None)
    for method, path, endpoint, responses in (
        ("POST", "/v1/chat/completions", ingress.chat, openapi.streams(openapi.ChatCompletion)),
        ("POST", "/v1/completions", ingress.completion, openapi.streams(openapi.Completion)),
        ("POST", "/tokenize", ingress.tokenize, openapi.answers(openapi.Tokenized)),
        ("POST", "/detokenize", ingress.detokenize, openapi.answers(openapi.Detokenized)),
        ("GET", "/v1/models", ingress.models, openapi.answers(openapi.ModelList)),
        ("GET", "/v1/models/{name:path}", ingress.model, openapi.answers(openapi.ModelCard)),
        ("GET", "/health", ingress.health, openapi.HEALTH),
    ):
        # Answers are as they are: the document's models are held against them by the tests.
        app.add_api_route(
            path, endpoint, methods=[method], responses=responses, response_model=None
        )
    _guard(app, metrics, api, tracer)
    for kind in (ApiError, QueueFull, VerifierAway, ValueError, RuntimeError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    return app


def _guard(app: FastAPI, metrics: IngressMetrics, api: ApiConfig, tracer: Tracer) -> None:
    """What requests pass, innermost first: a page of another origin shall see our errors too, and
    all that is refused is counted and has a name.
    """
    app.add_middleware(LimitBodies, most=api.max_body_bytes, respond=_error_response)
    if api.key is not None:
        key = api.key.get_secret_value()
        app.add_middleware(AskForKey, key=key, respond=_error_response)
    if api.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    app.add_middleware(RecordRequests, metrics=metrics, log=RequestLog(api.request_log))
    app.add_middleware(TraceRequests, tracer=tracer)
    app.add_middleware(NameRequests)


async def _on_error(_request: Request, error: Exception) -> Response:
    return _error_response(as_api_error(error))


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _error_response(as_api_error(errors.from_validation(error.errors(), error.body)))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind: ErrorType = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    where = f"{request.method} {request.url.path}"
    return _error_response(ApiError(error.status_code, f"{where}: {error.detail}", kind))


def _error_response(error: ApiError) -> Response:
    # Plain ASCII: the message may quote the client, and half of a surrogate pair has no UTF-8.
    return Response(
        json.dumps(error.body()), error.status, error.headers(), media_type="application/json"
    )
