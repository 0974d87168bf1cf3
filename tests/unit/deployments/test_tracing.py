"""Spans of a request, from the client's own trace to the steps of the verifier."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from deployments.config import TracingConfig
from deployments.tracing import AnswerSpans, open_tracer, tracer_to
from workers.engine.sampling import SamplingParams
from workers.request import Delta, GenerationRequest, SpeculationStats, StepTime
from workers.verifier import EngineError

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
UNRECORDED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
BODY = {"messages": [{"role": "user", "content": "a secret"}]}


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


async def ask(world: Any, headers: dict[str, str]) -> Any:
    return await world.client.post("/v1/chat/completions", json=BODY, headers=headers)


async def test_a_clients_trace_goes_on_into_the_verifier(world: Any) -> None:
    response = await ask(world, {**RECORDED, "x-request-id": "mine"})
    found = by_name(world.spans)
    request, route = found["request"], found["route"]
    assert f"{request.context.trace_id:032x}" == f"{route.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == SPAN
    assert route.parent.span_id == request.context.span_id
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "outrider.request_id": "mine",
        "http.response.status_code": 200,
    }
    assert request.status.is_unset
    (asked,) = world.verifier.requests
    assert asked.trace == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert response.status_code == 200
    assert "secret" not in request.to_json() + route.to_json()


@pytest.mark.parametrize("headers", [{}, UNRECORDED, {"traceparent": "nonsense"}])
async def test_who_is_not_traced_costs_the_verifier_nothing(
    world: Any, headers: dict[str, str]
) -> None:
    assert (await ask(world, headers)).status_code == 200
    assert world.spans.get_finished_spans() == ()
    assert world.verifier.requests[0].trace == ""


async def test_an_error_of_ours_is_one_in_its_span(world: Any) -> None:
    world.verifier.script = [EngineError("the forward pass failed")]
    await ask(world, RECORDED)
    assert not by_name(world.spans)["request"].status.is_ok
    assert not by_name(world.spans)["request"].status.is_unset


def delta(tokens: int, took: StepTime | None) -> Delta:
    return Delta("", (7,) * tokens, SpeculationStats("code"), took=took)


def traced(headers: dict[str, str]) -> GenerationRequest:
    trace = headers.get("traceparent", "")
    return GenerationRequest("r", (1,), 9, SamplingParams(seed=0), trace=trace)


def test_every_step_of_an_answer_has_its_drafting_and_its_pass() -> None:
    spans = InMemorySpanExporter()
    answer = AnswerSpans(tracer_to(SimpleSpanProcessor(spans), 0.0, "verifier"), traced(RECORDED))
    began = time.time_ns()
    answer.add(delta(1, StepTime(0.5, 0.25)))
    for _ in range(2):
        answer.add(delta(3, StepTime(0.002, 0.01)))
    prefill, *steps = spans.get_finished_spans()
    assert [span.name for span in steps] == ["draft", "verify"] * 2
    for span in (prefill, *steps):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == SPAN
    assert (prefill.name, prefill.start_time <= began) == ("prefill", True)
    draft, verify = steps[:2]
    assert draft.end_time == verify.start_time
    assert (draft.end_time - draft.start_time, verify.end_time - verify.start_time) == (2e6, 1e7)
    assert dict(draft.attributes) == {"outrider.draft": "code"}
    assert dict(verify.attributes) == {"outrider.tokens": 3}


def test_an_answer_that_is_not_traced_has_no_spans() -> None:
    spans = InMemorySpanExporter()
    answer = AnswerSpans(tracer_to(SimpleSpanProcessor(spans), 1.0, "verifier"), traced({}))
    answer.add(delta(1, None))
    assert spans.get_finished_spans() == ()


@contextmanager
def collector() -> Iterator[tuple[str, Callable[[], ExportTraceServiceRequest]]]:
    """A real one, as far as it takes what it is sent: its address, and what it got next."""
    got: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            got.put(ExportTraceServiceRequest.FromString(body))

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", lambda: got.get(timeout=10)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with collector() as (endpoint, received):
        tracer = open_tracer(TracingConfig(endpoint=endpoint), "verifier")
        AnswerSpans(tracer, traced(RECORDED)).add(delta(1, None))
        (resource,) = received().resource_spans
    names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert names["service.name"] == "outrider-verifier"
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("prefill", TRACE)


def test_without_an_endpoint_nothing_is_recorded() -> None:
    with open_tracer(TracingConfig(), "ingress").start_as_current_span("request") as span:
        assert not span.is_recording()


@pytest.mark.parametrize("given", [{"endpoint": "collector:4318"}, {"share": 1.1}])
def test_a_wrong_setting_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given))):
        TracingConfig(**given)
