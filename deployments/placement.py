"""Where the processes of one verifier go, and how many threads each may use.

One placement group per replica: bundle 0 is the replica itself (rank 0, the decode loop and inline
drafts), then a bundle per draft actor, then one per further target rank. Without an explicit bundle
index Ray would put a child wherever there is room, which on a machine with GPUs may be the bundle
of another rank.
"""

from dataclasses import dataclass
from typing import Any

from joblib import cpu_count
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.config import DraftConfig, OutriderConfig, TargetConfig

# Shares of a core that Ray sets aside. They count processes that wait most of the time; what
# keeps busy ones from fighting over cores is `Threads`.
REPLICA_CPUS = 1.0
NGRAM_CPUS = 0.1
MODEL_CPUS = 0.2
ROUTER_CPUS = 0.2
INGRESS_CPUS = 0.1
OVERHEAD_CPUS = ROUTER_CPUS + INGRESS_CPUS
"""What is reserved outside of the verifier's placement group."""


@dataclass(frozen=True, slots=True)
class Threads:
    """CPU threads of each kind of process.

    Ranks compute at the same time, so they share the cores. Drafts compute while the ranks wait
    for them; yet OpenMP threads go on spinning for a while after their work, so drafts that run
    a model get no more than half of the cores, together.
    """

    rank: int
    model: int
    ngram: int = 1

    def of(self, draft: DraftConfig) -> int:
        """Threads of one draft; one in the verifier's process computes while the rank waits."""
        if draft.inline:
            return self.rank
        return self.ngram if draft.kind == "ngram" else self.model


def threads_for(config: OutriderConfig, cores: int | None = None) -> Threads:
    """Fits the busy ones onto the cores (unless given: those that affinity and cgroup allow)."""
    cores = cores or cpu_count()
    models = sum(draft.kind != "ngram" for draft in config.draft_actors)
    return Threads(
        rank=config.target.threads or max(1, cores // config.target.tensor_parallel),
        model=max(1, cores // (2 * max(1, models))),
    )


def bundles(config: OutriderConfig) -> list[dict[str, float]]:
    """The replica's placement group: resources of bundle 0, of each draft, of each further rank."""
    rank = rank_resources(config.target)
    drafts = [
        {"CPU": NGRAM_CPUS if draft.kind == "ngram" else MODEL_CPUS}
        for draft in config.draft_actors
    ]
    return [rank, *drafts, *(dict(rank) for _ in range(config.target.tensor_parallel - 1))]


def draft_bundle(draft: int) -> int:
    """The bundle of draft actor number `draft`."""
    return 1 + draft


def rank_bundle(config: OutriderConfig, rank: int) -> int:
    """The bundle of a target rank; rank 0 is the replica."""
    return 0 if rank == 0 else len(config.draft_actors) + rank


def rank_resources(target: TargetConfig) -> dict[str, float]:
    """What one rank reserves: its threads where they are given, and a whole GPU on CUDA."""
    cpus = {"CPU": float(target.threads or REPLICA_CPUS)}
    return cpus | {"GPU": 1.0} if target.device == "cuda" else cpus


def actor_options(resources: dict[str, float]) -> dict[str, Any]:
    """A bundle's resources as Ray's `options()` and `ray_actor_options` name them."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus"}
    return {names[resource]: amount for resource, amount in resources.items()}


def child_options(
    group: PlacementGroup, bundle: int, resources: dict[str, float], threads: int
) -> dict[str, Any]:
    """Ray options of a child actor: its bundle, its reservation and its thread counts."""
    return {
        **actor_options(resources),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
        "runtime_env": {"env_vars": thread_variables(threads)},
    }


def thread_variables(threads: int) -> dict[str, str]:
    """What OpenMP and MKL read when a process starts."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
