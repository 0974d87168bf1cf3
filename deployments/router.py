"""The router's Serve deployment: `router.Router`, its counters, and a Valkey where needed."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from deployments.config import OutriderConfig
from deployments.embedded_valkey import EmbeddedValkey
from deployments.metrics import RouterMetrics
from router.build import build_router
from router.decision import Candidate, Outcome, RouteDecision, RouteRequest
from router.router import RouterStats


class Chooser(Protocol):
    """The part of `router.router.Router` that is used here."""

    async def decide(self, request: RouteRequest) -> RouteDecision:
        """The draft, and why."""

    async def fingerprint(self, request: RouteRequest) -> str:
        """Of a prompt that it did not decide on."""

    async def observe(self, outcome: Outcome) -> None:
        """How it went."""

    def stats(self) -> RouterStats:
        """Counts since the start."""

    async def close(self) -> None:
        """Stops following other replicas."""


class DraftRouterDeployment:
    """Chooses drafts. A plain class: `app.build` makes it a deployment.

    Without a `redis_url` it starts a Valkey server of its own, so that one path is used and tested.
    """

    def __init__(self, open_router: Callable[[str], Chooser], redis_url: str | None) -> None:
        self._valkey: EmbeddedValkey | None = None
        if redis_url is None:
            self._valkey = EmbeddedValkey()
            redis_url = self._valkey.url
        self._router = open_router(redis_url)
        self._metrics = RouterMetrics()

    async def decide(self, request: RouteRequest) -> RouteDecision:
        """Which draft this prompt should have."""
        decision = await self._router.decide(request)
        self._metrics.counted(self._router.stats())
        return decision

    async def fingerprint(self, request: RouteRequest) -> str:
        """Of a prompt whose draft the client chose."""
        return await self._router.fingerprint(request)

    async def observe(self, outcome: Outcome) -> None:
        """Learns from an answer."""
        await self._router.observe(outcome)
        self._metrics.counted(self._router.stats())

    async def close(self) -> None:
        """Ends what was started, also when the constructor got no further than half."""
        if hasattr(self, "_router"):
            await self._router.close()
        if self._valkey is not None:
            await asyncio.to_thread(self._valkey.close)


def router_opener(config: OutriderConfig) -> Callable[[str], Chooser]:
    """Makes the router of this configuration, once the Redis is known."""
    return partial(_open_router, config)


def _open_router(config: OutriderConfig, redis_url: str) -> Chooser:
    return build_router(
        [Candidate(draft.name, draft.domain, draft.kind) for draft in config.pool],
        redis_url,
        threshold=config.router.threshold,
        ttl_s=config.router.ttl_s,
        max_entries=config.router.max_entries,
        namespace=_namespace(config),
    )


def _namespace(config: OutriderConfig) -> str:
    """Speeds are comparable only where the same target runs in the same way."""
    target = config.target
    return f"{target.served_name}:{target.dtype}:{target.device}:{target.tensor_parallel}"
