"""Spans for an OpenTelemetry collector: where a request's time went. No text is in them.

    request          in the ingress, from its first byte to the last of its answer
      route          the router's decision
      prefill        in the verifier, from its arrival there to its first token
      draft, verify  every step after that: proposals, and the pass over them

Steps are those of the whole batch: a request that is not asked for proposals waits for others'.
"""

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.config import TracingConfig
from deployments.gate import REQUEST_ID
from workers.request import Delta, GenerationRequest

TRACEPARENT = "traceparent"

_NANOSECONDS = 1e9
_W3C = TraceContextTextMapPropagator()


def open_tracer(config: TracingConfig, service: str) -> Tracer:
    """Sends spans in batches, from a thread; makes none where no endpoint is configured."""
    if config.endpoint is None:
        return trace.NoOpTracer()
    return tracer_to(BatchSpanProcessor(OTLPSpanExporter(config.endpoint)), config.share, service)


def tracer_to(processor: SpanProcessor, share: float, service: str) -> Tracer:
    """share: how many of the traces that begin here are recorded."""
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(share)),
        resource=Resource.create({SERVICE_NAME: f"outrider-{service}"}),
    )
    provider.add_span_processor(processor)
    return provider.get_tracer("outrider")


def traceparent() -> str:
    """The span that we are in, for another process; empty where it is not recorded."""
    carrier: dict[str, str] = {}
    if trace.get_current_span().is_recording():
        _W3C.inject(carrier)
    return carrier.get(TRACEPARENT, "")


class TraceRequests:
    """ASGI middleware: a span for each request, in the trace that the client names."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """It ends when all of the answer is sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._tracer.start_as_current_span(
            "request", _W3C.extract(dict(Headers(scope=scope))), SpanKind.SERVER
        ) as span:
            span.set_attributes(
                {
                    "http.request.method": scope["method"],
                    "url.path": scope["path"],
                    "outrider.request_id": scope[REQUEST_ID],
                }
            )

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self._app(scope, receive, watched)


class AnswerSpans:
    """Those of one answer in the verifier; none where its request is not traced."""

    def __init__(self, tracer: Tracer, request: GenerationRequest) -> None:
        self._tracer = tracer
        self._parent = _W3C.extract({TRACEPARENT: request.trace}) if request.trace else None
        self._began = time.time_ns()
        self._first = True

    def add(self, delta: Delta) -> None:
        """A delta that came just now."""
        if self._parent is None:
            return
        now = time.time_ns()
        if self._first:
            self._first = False
            self._span("prefill", self._began, now, {"tokens": len(delta.tokens)})
        elif delta.took is not None:
            verified = now - round(delta.took.verify_s * _NANOSECONDS)
            drafted = verified - round(delta.took.draft_s * _NANOSECONDS)
            self._span("draft", drafted, verified, {"draft": delta.stats.draft or ""})
            self._span("verify", verified, now, {"tokens": len(delta.tokens)})

    def _span(self, name: str, start: int, end: int, facts: Mapping[str, str | int]) -> None:
        attributes = {f"outrider.{key}": value for key, value in facts.items()}
        span = self._tracer.start_span(name, self._parent, attributes=attributes, start_time=start)
        span.end(end)
