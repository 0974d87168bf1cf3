"""The whole server in one process: the real application, engine, drafts and router, without Ray."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from cache.similarity import LocalSimilarityCache
from deployments.admission import Admission
from deployments.config import ApiConfig, LimitsConfig, SpeculationConfig, TracingConfig
from deployments.ingress import Ingress, create_app
from deployments.links import RouterLink, TargetFacts
from deployments.logprobs import Words
from deployments.metrics import IngressMetrics
from deployments.prompt import Prompter
from deployments.tracing import open_tracer
from deployments.verifier import Engine, VerifierDeployment
from router.decision import Candidate
from router.fingerprint import DIM
from router.intent import IntentModel
from router.router import Router
from tests.fingerprints import ByCharacters
from tests.tiny import one_thread
from workers.draft import DraftSpec, InlineDraft
from workers.load_draft import load_draft
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import Verifier, build_verifier

# The end of the text is a token like any other to a random model: these texts shall be long.
ENDLESS = {"logit_bias": {"0": -100}}


@dataclass
class Served:
    """The application, and what is behind it."""

    app: FastAPI
    client: httpx.AsyncClient
    target: Target
    loop: Verifier

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "the thing", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Sing!"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    @property
    def busy(self) -> tuple[int, int, int]:
        """Requests running and waiting, and pages taken."""
        gauges = self.loop.gauges()
        return gauges.running, gauges.waiting, gauges.kv_pages_in_use


def drafts_of(folder: Path) -> list[DraftSpec]:
    """One that is always right when greedy, and one that knows what was said before."""
    return [DraftSpec("twin", "lm", path=str(folder)), DraftSpec("self", "ngram")]


def quick_router(drafts: Sequence[DraftSpec]) -> Router:
    """The router, but for MiniLM and Redis."""
    candidates = [Candidate(draft.name, draft.domain, draft.kind) for draft in drafts]
    cache = LocalSimilarityCache(dim=DIM, ttl_s=60, max_entries=64)
    return Router(candidates, ByCharacters(), IntentModel.load(), cache)


@asynccontextmanager
async def served(
    folder: Path,
    limits: LimitsConfig,
    *,
    api: ApiConfig | None = None,
    router: RouterLink | None = None,
    kv_tokens: int = 8192,
) -> AsyncIterator[Served]:
    """A tiny target, served as `tiny`."""
    specs = drafts_of(folder)
    with one_thread():
        target = load_target(TargetSpec(str(folder), "float32", kv_tokens=kv_tokens, threads=1))
        drafts = {spec.name: InlineDraft(load_draft(spec, folder)) for spec in specs}
        bounds = Limits(limits.max_running, limits.max_queued, limits.prefill_tokens)
        loop = build_verifier(target, drafts, bounds, specs)
        loop.start()
        facts = TargetFacts(
            model="tiny",
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            request_tokens=target.context_length,
            drafts=tuple(drafts),
            created=int(time.time()),
        )
        verifier = VerifierDeployment(lambda: Engine(loop, facts, drafts, None), TracingConfig())
        try:
            app = _wire(verifier, router or quick_router(specs), target, limits, api or ApiConfig())
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield Served(app, client, target, loop)
        finally:
            await verifier.close()


def _wire(
    verifier: VerifierDeployment,
    router: RouterLink,
    target: Target,
    limits: LimitsConfig,
    api: ApiConfig,
) -> FastAPI:
    tokenizer: Any = target.tokenizer
    metrics, tracer = IngressMetrics(), open_tracer(TracingConfig(), "ingress")
    speculation = SpeculationConfig(budget=8)
    admission = Admission(verifier, router, Prompter(tokenizer), speculation, limits, tracer)
    ingress = Ingress(verifier, router, admission, Words(tokenizer), metrics)
    return create_app(ingress, metrics, api, tracer)
