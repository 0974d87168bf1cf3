"""What the ingress knows of the verifier and the router: two small protocols, and their Serve form.

The unit tests give the ingress plain objects instead. A Serve handle wraps and renames the errors
of the other side; `ServeVerifier` turns them back into the three kinds the ingress tells apart:
`QueueFull`, `VerifierAway`, `ValueError`.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from router.decision import Outcome, RouteDecision, RouteRequest
from workers.request import Delta, GenerationRequest
from workers.verifier import EngineDown, QueueFull

_AWAY = (RayActorError, DeploymentUnavailableError, BackPressureError)


class VerifierAway(RuntimeError):
    """The verifier's replica is dead or restarting; a new attempt makes sense soon."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a request is checked against. `request_tokens` bounds prompt and answer together."""

    model: str
    vocab_size: int
    context_length: int
    request_tokens: int
    drafts: tuple[str, ...]
    created: int


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """How busy the verifier is: what `/health` shows."""

    healthy: bool
    running: int
    waiting: int
    kv_pages_in_use: int
    kv_pages: int
    kv_host_pages_in_use: int
    steps: int
    drafts: dict[str, Literal["ready", "away"]]
    draft_faults: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class VerifierLink(Protocol):
    """The verifier, seen from the ingress."""

    async def facts(self) -> TargetFacts:
        """What is served. Raises VerifierAway."""

    async def status(self) -> VerifierStatus:
        """How it is doing now. Raises VerifierAway."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer as it grows; closing the generator cancels the request.

        Raises QueueFull, VerifierAway, or ValueError for what only the verifier can check.
        """


class RouterLink(Protocol):
    """The router, seen from the ingress."""

    async def decide(self, request: RouteRequest) -> RouteDecision:
        """Which draft this prompt should have."""

    async def fingerprint(self, request: RouteRequest) -> str:
        """Under what an outcome is recorded that no decision of the router led to."""

    async def observe(self, outcome: Outcome) -> None:
        """How a request went."""


class ServeVerifier:
    """The verifier behind a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._stream = handle.options(method_name="generate", stream=True)
        self._facts: TargetFacts | None = None

    async def facts(self) -> TargetFacts:
        """Asked once: a restarted replica serves the same target."""
        if self._facts is None:
            try:
                self._facts = await self._handle.facts.remote()
            except _AWAY as error:
                raise VerifierAway(str(error)) from error
        return self._facts

    async def status(self) -> VerifierStatus:
        """Asked each time."""
        try:
            status: VerifierStatus = await self._handle.status.remote()
        except _AWAY as error:
            raise VerifierAway(str(error)) from error
        return status

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Streams over the handle; ending this generator early cancels the other side's as well."""
        response = self._stream.remote(request)
        assert isinstance(response, DeploymentResponseGenerator)
        try:
            async for delta in response:
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except RayTaskError as error:
            if isinstance(error.cause, EngineDown):
                raise VerifierAway(str(error.cause)) from error
            # As it was raised there: Ray's own message is the other side's whole traceback.
            raise error.cause from error
        except BackPressureError as error:
            raise QueueFull(str(error)) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise VerifierAway("it stopped while it was answering") from error


class ServeRouter:
    """The router behind a Serve handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def decide(self, request: RouteRequest) -> RouteDecision:
        """One round trip, 1.6 ms."""
        decision: RouteDecision = await self._handle.decide.remote(request)
        return decision

    async def fingerprint(self, request: RouteRequest) -> str:
        """One round trip and one embedding."""
        fingerprint: str = await self._handle.fingerprint.remote(request)
        return fingerprint

    async def observe(self, outcome: Outcome) -> None:
        """One round trip; the caller does not wait for it."""
        await self._handle.observe.remote(outcome)
