"""Where Ray really puts the processes, and what a server says that cannot start."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from deployments.commands.serve import failure
from deployments.config import OutriderConfig
from deployments.placement import bundles, child_options, draft_bundle, rank_bundle
from tests.serving import wait_until
from tests.tiny import make_target

CUDA = OutriderConfig.model_validate(
    {
        "target": {"model": "large", "device": "cuda", "tensor_parallel": 3, "threads": 1},
        "drafts": [{"name": "small", "kind": "lm", "path": "small"}],
    }
)


@pytest.fixture
def group(cluster: int) -> Iterator[PlacementGroup]:
    """What Serve makes for a verifier on three GPUs."""
    group = placement_group(bundles(CUDA), strategy="PACK")
    assert group.wait(30)
    yield group
    remove_placement_group(group)


def child(group: PlacementGroup, bundle: int, threads: int) -> Any:
    """An actor placed like a draft or a rank, without its model."""

    class Probe:
        def look(self) -> tuple[str, list[int], str]:
            import os

            import ray

            context = ray.get_runtime_context()
            gpus = [int(i) for i in context.get_accelerator_ids()["GPU"]]
            return str(context.get_placement_group_id()), gpus, os.environ["OMP_NUM_THREADS"]

    options = child_options(group, bundle, bundles(CUDA)[bundle], threads)
    return ray.remote(Probe).options(**options).remote()


def test_each_rank_has_a_gpu_of_its_own_and_a_draft_none(group: PlacementGroup) -> None:
    places = [*(rank_bundle(CUDA, rank) for rank in range(3)), draft_bundle(0)]
    children = [child(group, bundle, threads=3) for bundle in places]
    seen = ray.get([probe.look.remote() for probe in children], timeout=150)
    assert {where for where, _, _ in seen} == {group.id.hex()}
    *ranks, draft = [gpus for _, gpus, _ in seen]
    assert [len(gpus) for gpus in ranks] == [1, 1, 1]
    assert len({gpus[0] for gpus in ranks}) == 3
    assert draft == []
    assert {threads for _, _, threads in seen} == {"3"}


def test_a_bundle_holds_one_child(group: PlacementGroup) -> None:
    """A child that asks for another's place waits, instead of taking a second share of a GPU."""
    bundle = rank_bundle(CUDA, 1)
    first, second = (child(group, bundle, threads=1) for _ in range(2))
    ray.get(first.look.remote(), timeout=150)
    done, _ = ray.wait([second.look.remote()], timeout=1)
    assert done == []


def test_a_draft_with_a_foreign_vocabulary_stops_the_start_and_leaves_nothing_behind(
    deploy: Callable[..., str], settings: dict[str, Any], tmp_path: Path
) -> None:
    free = ray.available_resources()["CPU"]
    foreign = make_target(tmp_path / "foreign", extra=["foreign"])
    drafts = [*settings["drafts"], {"name": "f", "kind": "lm", "path": str(foreign)}]
    with pytest.raises(RuntimeError):
        deploy({**settings, "drafts": drafts}, "broken")
    why = failure(serve.status().applications["broken"])
    serve.delete("broken")
    assert why.startswith("drafts.f: its vocabulary"), why
    assert "\n" not in why
    # More than before, where what an earlier test has ended was still on its way out.
    assert wait_until(lambda: ray.available_resources()["CPU"] > free - 0.01)
