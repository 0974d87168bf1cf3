"""Where the processes of a verifier go, computed without a cluster."""

from typing import Any

import pytest

from deployments.config import DEFAULT, OutriderConfig
from deployments.placement import (
    OVERHEAD_CPUS,
    Threads,
    actor_options,
    bundles,
    draft_bundle,
    rank_bundle,
    rank_resources,
    threads_for,
)

DRAFTS = [
    {"name": "in", "kind": "ngram"},
    {"name": "a", "kind": "ngram", "placement": "actor"},
    {"name": "b", "kind": "lm", "layers": [0]},
    {"name": "c", "kind": "lm", "layers": [1]},
    {"name": "out", "kind": "lm", "layers": [1], "placement": "inline"},
]


def config(drafts: Any = DRAFTS, **target: Any) -> OutriderConfig:
    return OutriderConfig.model_validate({"target": {"model": "m", **target}, "drafts": drafts})


def test_a_bundle_for_the_replica_each_draft_actor_and_each_further_rank() -> None:
    split = config(device="cuda", tensor_parallel=3, threads=4)
    assert bundles(split) == [
        {"CPU": 4, "GPU": 1},
        {"CPU": 0.1},
        {"CPU": 0.2},
        {"CPU": 0.2},
        {"CPU": 4, "GPU": 1},
        {"CPU": 4, "GPU": 1},
    ]


def test_every_process_has_a_bundle_of_its_own() -> None:
    split = config(tensor_parallel=3)
    taken = [rank_bundle(split, rank) for rank in range(3)] + [draft_bundle(i) for i in range(3)]
    assert sorted(taken) == list(range(len(bundles(split))))


def test_the_replica_asks_for_what_its_bundle_has() -> None:
    for one in (config(), config(device="cuda")):
        assert bundles(one)[0] == rank_resources(one.target)
    assert actor_options({"CPU": 2, "GPU": 1}) == {"num_cpus": 2, "num_gpus": 1}


def test_the_default_fits_two_cores_with_the_router_and_the_ingress() -> None:
    assert sum(bundle["CPU"] for bundle in bundles(DEFAULT)) + OVERHEAD_CPUS <= 2


@pytest.mark.parametrize(
    ("target", "cores", "threads"),
    [
        ({}, 2, Threads(rank=2, model=1)),
        ({}, 1, Threads(rank=1, model=1)),
        ({}, 16, Threads(rank=16, model=4)),
        ({"tensor_parallel": 2}, 16, Threads(rank=8, model=4)),
        ({"tensor_parallel": 4}, 2, Threads(rank=1, model=1)),
        ({"threads": 3}, 16, Threads(rank=3, model=4)),
    ],
)
def test_busy_threads_fit_the_cores(target: Any, cores: int, threads: Threads) -> None:
    assert threads_for(config(**target), cores) == threads


def test_a_draft_has_the_threads_of_its_kind_or_of_its_host() -> None:
    pool = config().pool
    assert [Threads(rank=8, model=4).of(draft) for draft in pool] == [8, 1, 4, 4, 8]
