"""A verifier and a router that do as they are told, and the HTTP application around them."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from jinja2 import TemplateError
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments.admission import Admission
from deployments.config import ApiConfig, LimitsConfig, SpeculationConfig
from deployments.ingress import Ingress, create_app
from deployments.links import TargetFacts, VerifierStatus
from deployments.logprobs import Words
from deployments.metrics import IngressMetrics
from deployments.prompt import Prompter
from deployments.tracing import tracer_to
from router.decision import Outcome, RouteDecision, RouteRequest
from workers.request import Delta, GenerationRequest, SpeculationStats

FACTS = TargetFacts(
    model="tiny",
    vocab_size=1000,
    context_length=100,
    request_tokens=100,
    drafts=("code", "lm"),
    created=1_700_000_000,
)

LIMITS = LimitsConfig(max_running=8, max_queued=7)


class CharTokenizer:
    """One token per character, its code point; the chat template is as plain as can be."""

    chat_template: str | None = "plain"

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None) -> str:
        assert isinstance(self.chat_template, str)
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        if conversation[0]["content"] == "refuse me":
            raise TemplateError("roles must alternate")
        told = "" if tools is None else f"tools:{json.dumps(tools)}\n"
        return told + "".join(
            f"{turn['role']}:{turn['content']}{json.dumps(turn.get('tool_calls', ''))[1:-1]}\n"
            for turn in conversation
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return chr(ids)


def script(*texts: str, reason: str = "stop", draft: str | None = None) -> list[Delta]:
    """Deltas with these texts, one token per character, one step each; the last one ends."""
    emitted = sum(map(len, texts))
    stats = SpeculationStats(
        draft=draft,
        steps=len(texts),
        drafted=2 * len(texts) if draft else 0,
        tested=emitted if draft else 0,
        accepted=emitted - len(texts),
        recovered=0,
        bonus=len(texts),
    )
    deltas = [Delta(text, tuple(map(ord, text)), stats) for text in texts]
    deltas[-1] = replace(deltas[-1], finish_reason=reason)
    return deltas


class ScriptedVerifier:
    """Says what is in `script`: deltas, exceptions to raise, events to wait for. Where there are
    `scripts`, request number k says the k-th of them instead.
    """

    def __init__(self) -> None:
        self.served = FACTS
        self.script: list[Delta | BaseException | asyncio.Event] = [*script("Hel", "lo")]
        self.scripts: list[list[Delta | BaseException | asyncio.Event]] = []
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.asked = asyncio.Event()
        self.state = VerifierStatus(
            healthy=True,
            running=1,
            waiting=2,
            kv_pages_in_use=3,
            kv_pages=4,
            kv_host_pages_in_use=2,
            steps=5,
            drafts={"code": "ready", "lm": "away"},
            draft_faults={"lm": 1},
        )

    async def facts(self) -> TargetFacts:
        return self.served

    async def status(self) -> VerifierStatus:
        return self.state

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        script = self.scripts[len(self.requests)] if self.scripts else self.script
        self.requests.append(request)
        self.asked.set()
        complete = False
        try:
            for item in list(script):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, BaseException):
                    complete = True
                    raise item
                else:
                    yield item
            complete = True
        finally:
            if not complete:
                self.cancelled.append(request.id)


class ScriptedRouter:
    """Always decides `decision`, what it says of the request, or raises it."""

    def __init__(self) -> None:
        self.decision: RouteDecision | Exception | Callable[[RouteRequest], RouteDecision] = (
            RouteDecision("code", "intent", "looks like code (0.93)", "f1")
        )
        self.requests: list[RouteRequest] = []
        self.outcomes: list[Outcome] = []
        self.refuses_outcomes = False

    async def decide(self, request: RouteRequest) -> RouteDecision:
        self.requests.append(request)
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision(request) if callable(self.decision) else self.decision

    async def fingerprint(self, request: RouteRequest) -> str:
        return f"of {request.query}"

    async def observe(self, outcome: Outcome) -> None:
        if self.refuses_outcomes:
            raise RuntimeError("router away")
        self.outcomes.append(outcome)


class World(SimpleNamespace):
    """The application and everybody in it."""

    app: Any
    client: httpx.AsyncClient
    verifier: ScriptedVerifier
    router: ScriptedRouter
    tokenizer: CharTokenizer
    ends: list[tuple[str, str]]
    log: str
    spans: InMemorySpanExporter

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "Hi", **fields})


@pytest.fixture
def said() -> Callable[..., list[Delta]]:
    """Makes scripts."""
    return script


@pytest.fixture
def roomy_world(world: World) -> World:
    """With a context that holds the description of a tool, letter by letter."""
    world.verifier.served = replace(FACTS, context_length=2000, request_tokens=2000)
    return world


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Parametrised indirectly, with another ApiConfig or LimitsConfig."""
    given = getattr(request, "param", None)
    limits = given if isinstance(given, LimitsConfig) else LIMITS
    verifier, router, tokenizer = ScriptedVerifier(), ScriptedRouter(), CharTokenizer()
    metrics = IngressMetrics()
    ends: list[tuple[str, str]] = []
    count = metrics.ended

    def ended(endpoint: str, end: str) -> None:
        ends.append((endpoint, end))
        count(endpoint, end)

    metrics.ended = ended  # type: ignore[method-assign]
    spans = InMemorySpanExporter()
    tracer = tracer_to(SimpleSpanProcessor(spans), 0.0, "ingress")
    admission = Admission(
        verifier, router, Prompter(tokenizer), SpeculationConfig(), limits, tracer
    )
    ingress = Ingress(verifier, router, admission, Words(tokenizer), metrics)
    api = given if isinstance(given, ApiConfig) else ApiConfig()
    api = api.model_copy(update={"request_log": str(tmp_path / "requests.jsonl")})
    app = create_app(ingress, metrics, api, tracer)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        yield World(
            app=app,
            client=client,
            verifier=verifier,
            router=router,
            tokenizer=tokenizer,
            ends=ends,
            log=api.request_log,
            spans=spans,
        )
