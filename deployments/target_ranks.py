"""The target's further ranks, each an actor in the replica's placement group.

They are one: a rank that is gone or hangs leaves the others waiting in a collective, so nothing is
restarted alone. The set notices, the replica's health check fails, and Serve replaces the replica
with all its children.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from deployments.config import OutriderConfig
from deployments.placement import Threads, child_options, rank_bundle, rank_resources
from workers.target import TargetSpec, run_target_rank

HUNG_AFTER_S = 10.0
"""A rank that has not answered for so long hangs: it answers beside its work, whatever that is."""


class TargetRank:
    """What runs in the actor: one rank, until rank 0 ends it; and, beside it, that it is there."""

    def run(self, spec: TargetSpec, rank: int, address: str, port: int) -> None:
        """Serves rank 0's forwards. Returns when rank 0 is done."""
        run_target_rank(spec, rank, address, port)

    def ping(self) -> None:
        """Returns at once."""


class Pulse:
    """How long somebody has not answered who was asked."""

    def __init__(
        self, ping: Callable[[], "Future[Any]"], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ping = ping
        self._clock = clock
        self._asked: tuple[float, Future[Any]] | None = None

    def silent_s(self) -> float:
        """Seconds since the question that is still open; asks one where none is."""
        if self._asked is None or self._asked[1].done():
            self._asked = self._clock(), self._ping()
        return self._clock() - self._asked[0]


def _ask(rank: Any) -> "Future[None]":
    answer: Future[None] = rank.ping.remote().future()
    return answer


class RankSet:
    """Launches ranks 1 and on, and knows when one has stopped or hangs."""

    def __init__(self, config: OutriderConfig, group: PlacementGroup, threads: Threads) -> None:
        self._config = config
        self._group = group
        self._threads = threads
        self._runs: dict[int, Future[None]] = {}
        self._pulses: dict[int, Pulse] = {}
        self._actors: list[Any] = []

    def launch(self, spec: TargetSpec, address: str, port: int) -> None:
        """A `workers.target.RankLauncher`: starts the actors and returns at once."""
        for rank in range(1, spec.tensor_parallel):
            options = child_options(
                self._group,
                rank_bundle(self._config, rank),
                rank_resources(self._config.target),
                self._threads.rank,
            )
            actor: Any = ray.remote(TargetRank).options(max_concurrency=2, **options).remote()
            self._actors.append(actor)
            self._pulses[rank] = Pulse(partial(_ask, actor))
            self._runs[rank] = actor.run.remote(spec, rank, address, port).future()

    def check(self) -> None:
        """Raises RuntimeError when a rank is gone or hangs: the set has to be restarted as one."""
        for rank, run in self._runs.items():
            if run.done():
                raise RuntimeError(
                    f"target rank {rank} stopped, the whole set restarts: {run.exception()!r}"
                )
        for rank, pulse in self._pulses.items():
            if (silent_s := pulse.silent_s()) > HUNG_AFTER_S:
                raise RuntimeError(
                    f"target rank {rank} has not answered for {silent_s:.0f} s, the whole set "
                    "restarts"
                )

    def stop(self) -> None:
        """Ends the actors, whatever they are doing."""
        self._runs.clear()
        self._pulses.clear()
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
