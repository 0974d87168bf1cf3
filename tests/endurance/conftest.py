"""One server for the short forms of the long runs."""

from collections.abc import Iterator

import pytest

from tests.endurance.service import Service, tiny_settings


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Over the tiny target, and warm when the first test has had it; gone after the last."""
    folder = tmp_path_factory.mktemp("endurance")
    with Service(tiny_settings(folder), folder) as service:
        yield service
