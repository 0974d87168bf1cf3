"""The server keeps to its OpenAPI document, for requests that fit it and for those that do not."""

import asyncio
from collections.abc import Iterator

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from deployments.config import LimitsConfig
from tests.in_process import served
from tests.tiny import make_target

# The document cannot say all that is asked of a body: which ids there are, which fields agree.
# A deadline that was missed is no fault of the server's, and no other 5xx may come.
ELSEWHERE = [positive_data_acceptance, not_a_server_error]
POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    folder = make_target(tmp_path_factory.mktemp("short") / "target", max_position_embeddings=48)
    world = served(folder, LimitsConfig(max_running=16, max_queued=500))
    with asyncio.Runner() as runner:
        yield runner.run(world.__aenter__()).app
        runner.run(world.__aexit__(None, None, None))


@pytest.mark.parametrize("path", [*POSTS, "/v1/models", "/v1/models/{name}", "/health"])
def test_requests_that_fit_the_document_get_answers_that_do(app: FastAPI, path: str) -> None:
    try_out(app, path, GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_do_not_are_refused_as_it_says(app: FastAPI, path: str) -> None:
    try_out(app, path, GenerationMode.NEGATIVE)


def try_out(app: FastAPI, path: str, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = document[path]["post" if path in POSTS else "get"]

    @given(case=operation.as_strategy(generation_mode=mode))
    # Always the same: whether a change is sound is no matter of luck.
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
    )
    def ask(case: Case) -> None:
        response = case.call_and_validate(excluded_checks=ELSEWHERE)
        late = response.status_code == 504 and "deadline_s" in case.body
        assert response.status_code < 500 or late, response.text

    ask()
