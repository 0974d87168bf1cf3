"""The builder: mistakes are named before anything slow is loaded."""

import time

import pytest

from cache.similarity import LocalSimilarityCache, RedisSimilarityCache
from router.build import build_router
from router.decision import Candidate, RouteRequest

POOL = [Candidate("code", "code", "ngram"), Candidate("en", "en", "ngram")]


@pytest.mark.parametrize(
    "pool, url, options, named",
    [
        ([*POOL, POOL[0]], None, {}, "code"),
        (POOL, "localhost:6379", {}, "redis://"),
        (POOL, None, {"ttl_s": 0}, "ttl_s"),
        (POOL, None, {"max_entries": 0}, "max_entries"),
    ],
)
def test_mistakes_are_named_at_once(
    pool: list[Candidate], url: str | None, options: dict[str, int], named: str
) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=named):
        build_router(pool, url, **options)
    assert time.monotonic() - started < 0.3


@pytest.mark.parametrize(
    "url, kind", [(None, LocalSimilarityCache), ("redis://127.0.0.1:1", RedisSimilarityCache)]
)
async def test_it_builds_a_router_that_decides(url: str | None, kind: type) -> None:
    router = build_router(POOL, url)
    assert isinstance(router._cache, kind)
    decision = await router.decide(RouteRequest("Write a Python function that adds.", ""))
    assert (decision.draft, decision.reason) == ("code", "intent")
    await router.close()
