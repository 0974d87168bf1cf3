"""The target's further ranks, each an actor in the replica's placement group.

They are one: a rank that is gone leaves the others waiting in a collective forever, so nothing is
restarted alone. The set notices, the replica's health check fails, and Serve replaces the replica
with all its children.
"""

from concurrent.futures import Future
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from deployments.config import OutriderConfig
from deployments.placement import Threads, child_options, rank_bundle, rank_resources
from workers.target import TargetSpec, run_target_rank


class TargetRank:
    """What runs in the actor: one rank, until rank 0 ends it."""

    def run(self, spec: TargetSpec, rank: int, address: str, port: int) -> None:
        """Serves rank 0's forwards. Returns when rank 0 is done."""
        run_target_rank(spec, rank, address, port)


class RankSet:
    """Launches ranks 1 and on, and knows when one has stopped."""

    def __init__(self, config: OutriderConfig, group: PlacementGroup, threads: Threads) -> None:
        self._config = config
        self._group = group
        self._threads = threads
        self._runs: dict[int, Future[None]] = {}
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
            actor: Any = ray.remote(TargetRank).options(**options).remote()
            self._actors.append(actor)
            self._runs[rank] = actor.run.remote(spec, rank, address, port).future()

    def check(self) -> None:
        """Raises RuntimeError when a rank is gone: the set has to be restarted as one."""
        for rank, run in self._runs.items():
            if run.done():
                raise RuntimeError(
                    f"target rank {rank} stopped, the whole set restarts: {run.exception()!r}"
                )

    def stop(self) -> None:
        """Ends the actors, whatever they are doing."""
        self._runs.clear()
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
