"""What similar prompts taught us: measured speed and acceptance of drafts, looked up by cosine.

`LocalSimilarityCache` is one bounded float32 matrix in this process. `RedisSimilarityCache` is the
same matrix kept in step with the other replicas through Redis: every entry is a plain hash with a
TTL, and a stream announces which entry changed. Answers always come from the matrix, so no request
waits for the network and an absent or frozen Redis costs freshness, never time. Only hashes,
streams and key expiry are used: the same commands work on Redis 6, 7, 8, Valkey and managed
services, without a search module.

`redis` is imported here and nowhere else.
"""

import asyncio
import json
import logging
import math
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.typing import EncodableT, FieldT

logger = logging.getLogger("outrider.cache")

Vector = npt.NDArray[np.float32]
"""A unit vector, `[dim]`: the dot product of two of them is their cosine."""

DECAY = 0.8
"""What an older outcome still counts when a new one is folded in: about the last five matter."""

FORMAT = 1
"""Part of every key: a release that stores entries differently must not read these."""

_DRAFT_FIELD = "draft:"
_Messages = list[tuple[bytes, dict[bytes, bytes]]]  # of a stream: id, fields
_Replies = list[tuple[bytes, _Messages]]  # of XREAD: stream, messages
_BATCH = 128  # entries decoded per turn of the event loop: about 5 ms
_BLOCK_S = 0.5  # how long one read of the stream waits for news
_RETRY_S = 0.2  # pause before a lost Redis is tried again


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured with one draft on one prompt: tokens emitted, seconds spent, acceptance.

    `alpha` is None for plain decoding, which tests nothing. Sums rather than a speed, because two
    runs of different length combine to (all tokens) / (all seconds), not to the mean of two speeds.

    Raises:
        ValueError: for a number that no run can have measured.
    """

    tokens: float
    seconds: float
    alpha: float | None

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, not {value}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is a share, between 0 and 1, not {self.alpha}")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def then(self, newer: "Evidence") -> "Evidence":
        """Fold a newer run in; what was known counts `DECAY` of what it did."""
        return combine((Evidence(DECAY * self.tokens, DECAY * self.seconds, self.alpha), newer))


def combine(runs: Sequence[Evidence]) -> Evidence:
    """All runs as one: tokens and seconds add up, alpha is the mean weighted by tokens."""
    tokens = sum(run.tokens for run in runs)
    tested = [(run.tokens, run.alpha) for run in runs if run.alpha is not None]
    weight = sum(count for count, _ in tested)
    alpha = sum(count * alpha for count, alpha in tested) / weight if tested else None
    return Evidence(tokens, sum(run.seconds for run in runs), alpha)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An entry near the vector asked for: its cosine and the evidence it holds, by draft."""

    key: str
    cosine: float
    evidence: Mapping[str, Evidence]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """`dropped_writes`: outcomes other replicas will not learn, because Redis was away."""

    entries: int
    dropped_writes: int
    connected: bool


class SimilarityCache(Protocol):
    """Evidence by fingerprint. Reads never wait; writes wait tens of milliseconds at most."""

    async def start(self) -> None:
        """Begin to follow the other replicas. Idempotent; must run in the event loop."""

    async def close(self) -> None:
        """Stop following and let go of connections."""

    async def record(self, key: str, vector: Vector, draft: str, measured: Evidence) -> None:
        """Fold a run of `draft` into the entry `key`, made if it is new."""

    def nearest(self, vector: Vector, threshold: float, limit: int) -> tuple[Neighbour, ...]:
        """Entries with a cosine above `threshold`, nearest first, at most `limit`."""

    def typical_speed(self, draft: str) -> float | None:
        """Mean tokens per second of `draft` over the entries that know it; None: never measured."""

    def stats(self) -> CacheStats: ...


class LocalSimilarityCache:
    """The matrix: `[max_entries, dim]` float32, one row an entry.

    When it is full, the entry that went longest without a record leaves. Alone it is the in-process
    twin of `RedisSimilarityCache`; within it, it is what answers.
    """

    def __init__(self, *, dim: int, ttl_s: float, max_entries: int) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is how long evidence lives, in seconds: above 0, not {ttl_s}")
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, not {max_entries}")
        self._ttl_s = ttl_s
        self._vectors: Vector = np.zeros((max_entries, dim), np.float32)
        self._expires = np.full(max_entries, -np.inf)  # [max_entries] monotonic seconds
        self._keys: list[str] = [""] * max_entries  # row -> key
        self._rows: OrderedDict[str, int] = (
            OrderedDict()
        )  # key -> row, least recently recorded first
        self._free = list(range(max_entries - 1, -1, -1))  # lowest row last: it is taken first
        self._used = 0  # rows ever taken: the product stops there
        self._evidence: dict[str, dict[str, Evidence]] = {}
        self._speeds: dict[str, tuple[int, float]] = {}  # draft -> entries, sum of their speeds

    async def start(self) -> None:
        """Nothing to follow: this process is alone."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def record(self, key: str, vector: Vector, draft: str, measured: Evidence) -> None:
        """See `SimilarityCache.record`."""
        self.fold(key, vector, draft, measured)

    def fold(self, key: str, vector: Vector, draft: str, measured: Evidence) -> tuple[str, ...]:
        """`record` without the waiting; returns the keys that had to leave to make room."""
        known = dict(self._evidence.get(key, {}))
        known[draft] = known[draft].then(measured) if draft in known else measured
        return self.put(key, vector, known, self._ttl_s)

    def put(
        self, key: str, vector: Vector, evidence: Mapping[str, Evidence], ttl_s: float
    ) -> tuple[str, ...]:
        """Set the entry as it is elsewhere; returns the keys that had to leave to make room."""
        assert vector.shape == self._vectors.shape[1:], "a vector of another fingerprint"
        left = () if key in self._rows else self._make_room()
        row = self._rows[key] if key in self._rows else self._free.pop()
        self._used = max(self._used, row + 1)
        self._rows[key] = row
        self._rows.move_to_end(key)
        self._keys[row], self._vectors[row] = key, vector
        self._expires[row] = time.monotonic() + ttl_s
        self._count_speeds(self._evidence.get(key, {}), -1)
        self._count_speeds(evidence, +1)
        self._evidence[key] = dict(evidence)
        return left

    def forget(self, key: str) -> None:
        """Remove the entry; unknown keys are fine, another replica may have evicted it first."""
        if (row := self._rows.pop(key, None)) is None:
            return
        self._expires[row] = -np.inf
        self._free.append(row)
        self._count_speeds(self._evidence.pop(key), -1)

    def nearest(self, vector: Vector, threshold: float, limit: int) -> tuple[Neighbour, ...]:
        """See `SimilarityCache.nearest`: one matrix product over the rows in use."""
        cosines = self._vectors[: self._used] @ vector  # [used]
        cosines[self._expires[: self._used] <= time.monotonic()] = -1
        near = np.flatnonzero(cosines > threshold)
        near = near[np.argsort(-cosines[near], kind="stable")][:limit]
        return tuple(self._neighbour(int(row), float(cosines[row])) for row in near)

    def typical_speed(self, draft: str) -> float | None:
        """See `SimilarityCache.typical_speed`."""
        self._drop_expired()
        entries, total = self._speeds.get(draft, (0, 0.0))
        return total / entries if entries else None

    def stats(self) -> CacheStats:
        """Entries alive; nothing is ever dropped or away."""
        self._drop_expired()
        return CacheStats(entries=len(self._rows), dropped_writes=0, connected=True)

    def evidence(self, key: str) -> Mapping[str, Evidence]:
        """What the entry holds, by draft."""
        return self._evidence[key]

    def _neighbour(self, row: int, cosine: float) -> Neighbour:
        key = self._keys[row]
        return Neighbour(key, cosine, self._evidence[key])

    def _make_room(self) -> tuple[str, ...]:
        self._drop_expired()
        if self._free:
            return ()
        oldest = next(iter(self._rows))
        self.forget(oldest)
        return (oldest,)

    def _drop_expired(self) -> None:
        # Least recently recorded first is also first to expire, but for entries whose remaining
        # life came from Redis: those wait for their turn, masked out of every answer meanwhile.
        now = time.monotonic()
        while self._rows and self._expires[self._rows[key := next(iter(self._rows))]] <= now:
            self.forget(key)

    def _count_speeds(self, evidence: Mapping[str, Evidence], sign: int) -> None:
        for draft, run in evidence.items():
            entries, total = self._speeds.get(draft, (0, 0.0))
            self._speeds[draft] = (entries + sign, total + sign * run.tokens_per_second)
            if self._speeds[draft][0] == 0:
                del self._speeds[draft]  # and the rounding left in its sum


class RedisSimilarityCache:
    """The matrix of this replica, kept in step with the others through Redis.

    A record changes the matrix first, then Redis in one transaction: the entry's hash (vector,
    and per draft one field of JSON), its TTL, and an announcement in the stream. A task follows the
    stream and reads the entries that others announced. Start-up, the usual day and catching up
    after an outage are the same loop: read the stream from the last position known.

    Two replicas that record the same draft on the same prompt in the same millisecond overwrite
    each other: one measurement of a running mean is lost, which the next one repairs.

    When a call fails or takes longer than `timeout_s` (and one retry), Redis counts as away: writes
    are dropped and counted at once, without waiting, until the following task reaches it again.

    Args:
        url: `redis://[user:password@]host:port/db`, `rediss://` or `unix://`.
        namespace: speeds are comparable within it only: name the target and the machine kind.
        dim: length of the vectors; part of the key, like the format.
        timeout_s: for connecting and for each answer, in seconds.

    Raises:
        ValueError: for a URL that is none, or limits that make no sense.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        dim: int,
        ttl_s: float,
        max_entries: int,
        timeout_s: float = 0.05,
    ) -> None:
        self._near = LocalSimilarityCache(dim=dim, ttl_s=ttl_s, max_entries=max_entries)
        self._dim = dim
        self._prefix = f"outrider:{FORMAT}:{namespace}:{dim}"
        self._stream = f"{self._prefix}:changes"
        self._stream_length = 4 * max_entries
        self._ttl_ms = max(1, round(1000 * ttl_s))
        self._budget_s = 2 * timeout_s  # a call and its retry, connecting included
        self._redis = _connect(url, timeout_s, timeout_s)
        self._tail = _connect(url, timeout_s, _BLOCK_S + 2 * timeout_s)
        self._origin = uuid.uuid4().hex  # marks our own announcements, which we need not read
        self._position = "0-0"
        self._connected = True  # until a call says otherwise
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """See `SimilarityCache.start`."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name="similarity-cache")
            self._task.add_done_callback(_report)

    async def close(self) -> None:
        """See `SimilarityCache.close`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._redis.aclose()
        await self._tail.aclose()

    def nearest(self, vector: Vector, threshold: float, limit: int) -> tuple[Neighbour, ...]:
        """See `SimilarityCache.nearest`."""
        return self._near.nearest(vector, threshold, limit)

    def typical_speed(self, draft: str) -> float | None:
        """See `SimilarityCache.typical_speed`."""
        return self._near.typical_speed(draft)

    def stats(self) -> CacheStats:
        """Entries in this replica's matrix; writes it had to drop; whether Redis is reachable."""
        return CacheStats(self._near.stats().entries, self._dropped, self._connected)

    async def record(self, key: str, vector: Vector, draft: str, measured: Evidence) -> None:
        """See `SimilarityCache.record`. Never raises for what Redis does."""
        await self.start()
        evicted = self._near.fold(key, vector, draft, measured)
        if not self._connected:
            self._dropped += 1
            return
        try:
            async with asyncio.timeout(self._budget_s):
                await self._write(key, vector, draft, evicted)
        except (RedisError, OSError, TimeoutError) as error:
            self._dropped += 1
            self._lost(error)

    async def _write(self, key: str, vector: Vector, draft: str, evicted: Iterable[str]) -> None:
        entry = self._entry(key)
        fields: dict[FieldT, EncodableT] = {
            "vector": pack(vector),
            f"{_DRAFT_FIELD}{draft}": _to_json(self._near.evidence(key)[draft]),
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(entry, mapping=fields)
            pipe.pexpire(entry, self._ttl_ms)
            pipe.xadd(
                self._stream,
                {"key": key, "origin": self._origin},
                maxlen=self._stream_length,
                approximate=True,
            )
            pipe.pexpire(self._stream, self._ttl_ms)
            for old in evicted:  # every replica would evict this one: the order is the stream's
                pipe.unlink(self._entry(old))
            await pipe.execute()

    async def _follow(self) -> None:
        while not _told_to_stop():
            try:
                await self._check_position()
                while not _told_to_stop():
                    await self._read_changes()
                    self._found()
            except (RedisError, OSError, TimeoutError) as error:
                self._lost(error)
                await asyncio.sleep(_RETRY_S)

    async def _check_position(self) -> None:
        """Begin anew when Redis came back empty or as an older copy: its ids are behind ours."""
        newest = cast(_Messages, await self._tail.xrevrange(self._stream, count=1))
        if not newest or _id_order(newest[0][0].decode()) < _id_order(self._position):
            self._position = "0-0"

    async def _read_changes(self) -> None:
        reply = await self._tail.xread(
            {self._stream: self._position}, count=_BATCH, block=round(1000 * _BLOCK_S)
        )
        for _stream, messages in cast(_Replies, reply or []):
            await self._load(self._changed(messages))
            self._position = messages[-1][0].decode()

    def _changed(self, messages: _Messages) -> list[str]:
        """Keys announced by others, each once, in order."""
        origin = self._origin.encode()
        others = (fields for _, fields in messages if fields.get(b"origin") != origin)
        return list(dict.fromkeys(fields[b"key"].decode() for fields in others if b"key" in fields))

    async def _load(self, keys: Sequence[str]) -> None:
        """Read entries into the matrix; one that is gone from Redis goes here too."""
        async with self._tail.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(self._entry(key))
                pipe.pttl(self._entry(key))
            replies = await pipe.execute()
        for key, fields, ttl_ms in zip(keys, replies[::2], replies[1::2], strict=True):
            if fields:
                self._take(key, fields, ttl_ms / 1000)
            else:
                self._near.forget(key)

    def _take(self, key: str, fields: Mapping[bytes, bytes], ttl_s: float) -> None:
        try:
            vector, evidence = _read_entry(fields, self._dim)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("similarity entry %s is unreadable and left out: %r", key, error)
        else:
            self._near.put(key, vector, evidence, ttl_s)

    def _entry(self, key: str) -> str:
        return f"{self._prefix}:entry:{key}"

    def _lost(self, error: Exception) -> None:
        if self._connected:
            logger.warning("Redis is away, answering from memory meanwhile: %r", error)
        self._connected = False

    def _found(self) -> None:
        if not self._connected:
            logger.info("Redis is back, %d writes were dropped so far", self._dropped)
        self._connected = True


def pack(vector: Vector) -> bytes:
    """A unit vector as int8, one byte a component: the cosine changes by less than 1e-4."""
    scaled = vector * (127 / np.abs(vector).max())
    return bytes(scaled.round().astype(np.int8).data)


def unpack(packed: bytes) -> Vector:
    """The unit vector that `pack` wrote.

    Raises:
        ValueError: for bytes that hold no vector: none, or only zeros.
    """
    vector = np.frombuffer(packed, np.int8).astype(np.float32)
    if not vector.any():
        raise ValueError("a packed vector needs a component other than zero")
    return vector / np.float32(np.linalg.norm(vector))


def _connect(url: str, connect_s: float, answer_s: float) -> Redis:
    return Redis.from_url(
        url,
        protocol=2,
        socket_connect_timeout=connect_s,
        socket_timeout=answer_s,
        retry=Retry(NoBackoff(), 1),
    )


def _to_json(run: Evidence) -> bytes:
    return json.dumps({"tokens": run.tokens, "seconds": run.seconds, "alpha": run.alpha}).encode()


def _read_entry(fields: Mapping[bytes, bytes], dim: int) -> tuple[Vector, dict[str, Evidence]]:
    evidence: dict[str, Evidence] = {}
    for name, value in fields.items():
        if (draft := name.decode()).startswith(_DRAFT_FIELD):
            run = json.loads(value)
            evidence[draft[len(_DRAFT_FIELD) :]] = Evidence(
                run["tokens"], run["seconds"], run["alpha"]
            )
    vector = unpack(fields[b"vector"])
    if vector.shape != (dim,):
        raise ValueError(f"its vector has {vector.size} components, not {dim}")
    return vector, evidence


def _id_order(message: str) -> tuple[int, int]:
    milliseconds, _, sequence = message.partition("-")
    return int(milliseconds), int(sequence)


def _told_to_stop() -> bool:
    """Whether this task was cancelled. redis-py 8.1 loses a cancellation that hits a handshake."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _report(task: asyncio.Task[None]) -> None:
    """The following task ends when told to; anything else is our mistake: say it aloud."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("no longer following other replicas", exc_info=error)
