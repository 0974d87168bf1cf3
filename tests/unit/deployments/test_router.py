"""The router's deployment: which Redis it uses, and that it ends what it started."""

from typing import Any, get_args

import pytest

from deployments.metrics import RouterMetrics
from deployments.router import DraftRouterDeployment
from router.decision import Outcome, Reason, RouteDecision, RouteRequest
from router.router import RouterStats

DECISION = RouteDecision("code", "default", "the first of the pool", "f")
OUTCOME = Outcome("f", "code", 10.0, None, 1.0, 5)


class Chooser:
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.closed = False

    async def decide(self, request: RouteRequest) -> RouteDecision:
        return DECISION

    async def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def stats(self) -> RouterStats:
        return RouterStats(
            {reason: 1 for reason in get_args(Reason)},
            cache_hits=1,
            cache_misses=2,
            cache_entries=3,
            dropped_writes=4,
            cache_connected=True,
        )

    async def close(self) -> None:
        self.closed = True


async def test_it_decides_learns_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[RouterStats] = []
    monkeypatch.setattr(RouterMetrics, "counted", lambda _self, stats: counted.append(stats))
    chooser = Chooser()
    router = DraftRouterDeployment(lambda _url: chooser, "redis://elsewhere")
    assert await router.decide(RouteRequest("q", "c")) == DECISION
    await router.observe(OUTCOME)
    assert chooser.outcomes == [OUTCOME]
    assert counted == [chooser.stats()] * 2


async def test_a_configured_redis_is_used() -> None:
    urls: list[str] = []

    def open_router(url: str) -> Any:
        urls.append(url)
        return Chooser()

    router = DraftRouterDeployment(open_router, "redis://elsewhere")
    await router.close()
    assert urls == ["redis://elsewhere"]


async def test_without_one_it_starts_and_ends_its_own() -> None:
    chooser, urls = Chooser(), []

    def open_router(url: str) -> Any:
        urls.append(url)
        return chooser

    router = DraftRouterDeployment(open_router, None)
    assert urls[0].startswith("unix:///")
    valkey: Any = router._valkey
    await router.close()
    assert chooser.closed
    assert not valkey._socket.exists()


async def test_a_router_that_could_not_start_leaves_no_server_behind() -> None:
    def fail(url: str) -> Any:
        raise ValueError("two drafts are named 'a'")

    router = DraftRouterDeployment.__new__(DraftRouterDeployment)
    with pytest.raises(ValueError, match="two drafts"):
        router.__init__(fail, None)  # type: ignore[misc]
    valkey: Any = router._valkey
    await router.close()
    assert not valkey._socket.exists()
