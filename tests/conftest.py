"""Models that many tests share, made once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import make_target, one_thread


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Tiny models are fastest so, and loading one sets the count for the whole process."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target. Read only."""
    return make_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def stranger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other random weights over the same vocabulary: a draft that is hardly ever right."""
    return make_target(tmp_path_factory.mktemp("models") / "stranger", seed=1)
