"""One Ray cluster for all end-to-end tests, and one server over a tiny target in it."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from deployments.app import build
from deployments.commands.serve import free_port, set_environment
from deployments.config import OutriderConfig
from tests.serving import RESTART_S, busy, wait_until
from tests.tiny import make_target

QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
CONTEXT = 1024


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """A cluster that declares GPUs it does not have, and the port its servers listen on."""
    port = free_port()
    set_environment()
    ray.init(
        address="local",
        num_cpus=5,
        num_gpus=4,
        object_store_memory=128 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _metrics_export_port=free_port(),
        _system_config={"metrics_report_interval_ms": 500},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=QUIET)
    yield port
    ray.shutdown()


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with room for streams that last a second or two."""
    folder = tmp_path_factory.mktemp("models") / "long"
    return make_target(folder, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def settings(long_folder: Path) -> dict[str, Any]:
    """`twin` is the target itself, so nearly all it drafts is accepted; the others know n-grams."""
    return {
        "target": {"model": str(long_folder), "kv_tokens": 16_384, "threads": 1},
        "drafts": [
            {"name": "self", "kind": "ngram", "placement": "actor"},
            {"name": "inline", "kind": "ngram"},
            {"name": "twin", "kind": "lm", "layers": [0, 1]},
        ],
        "limits": {"max_running": 8, "max_queued": 8, "restart_patience_s": RESTART_S},
        "speculation": {"budget": 8, "draft_timeout_ms": 10_000},
    }


@pytest.fixture(scope="session")
def deploy(cluster: int) -> Callable[..., str]:
    """Starts a server; gives its URL."""

    def deploy(settings: dict[str, Any], name: str) -> str:
        prefix = f"/{name}"
        app = build(OutriderConfig.model_validate(settings))
        serve.run(app, name=name, route_prefix=prefix, logging_config=QUIET)
        return f"http://127.0.0.1:{cluster}{prefix}"

    return deploy


@pytest.fixture(scope="session")
def url(deploy: Callable[..., str], settings: dict[str, Any]) -> str:
    """A server over the tiny target."""
    return deploy(settings, "tiny")


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def idle(http: httpx.Client) -> Iterator[None]:
    """Before and after the test nothing runs, nothing waits, and no page is taken."""
    assert wait_until(lambda: busy(http) == (0, 0, 0))
    yield
    assert wait_until(lambda: busy(http) == (0, 0, 0)), busy(http)
