"""Answers that outlive their verifier.

Every token is a function of the target, the context, the seed and the position. So nobody has to
remember more of an answer than its tokens: whichever verifier is there next reads them behind the
prompt, and goes on as if nothing had happened.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from deployments.links import TargetFacts, VerifierAway, VerifierLink, VerifierStatus
from workers.request import Beginning, Delta, GenerationRequest
from workers.verifier import QueueFull

logger = logging.getLogger("outrider.ingress")

AGAIN_AFTER_S = 0.25
"""Between attempts: a verifier that is about to be replaced refuses at once."""


@dataclass(frozen=True, slots=True)
class ResumingVerifier:
    """A verifier for whose answers another one is asked when it is lost.

    patience_s: how long an answer waits for that one before it ends with VerifierAway.
    """

    verifier: VerifierLink
    patience_s: float
    clock: Callable[[], float] = time.monotonic

    async def facts(self) -> TargetFacts:
        """As the verifier says."""
        return await self.verifier.facts()

    async def status(self) -> VerifierStatus:
        """As the verifier says."""
        return await self.verifier.status()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer as it grows: no token is lost or comes twice.

        Raises what the verifier does. QueueFull only before the first token: who has begun keeps
        their claim to a place.
        """
        said: list[int] = []
        last: Delta | None = None
        lost_at: float | None = None
        while True:
            try:
                async with aclosing(self.verifier.generate(request)) as deltas:
                    async for last in deltas:
                        said += last.tokens
                        lost_at = None
                        yield last
                return
            except (VerifierAway, QueueFull) as error:
                if last is not None and last.finish_reason:
                    return
                if last is None and isinstance(error, QueueFull):
                    raise
                if lost_at is None:
                    lost_at = self.clock()
                    logger.warning("%s waits for a verifier: %s", request.id, error)
                if self.clock() - lost_at >= self.patience_s:
                    raise
            if last is not None:
                request = replace(request, beginning=Beginning(tuple(said), last.stats))
            await asyncio.sleep(AGAIN_AFTER_S)
