"""What a request passes before an endpoint sees it: name, key, origin, size."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments.config import ApiConfig

LOCKED = ApiConfig.model_validate({"key": "s\u00e9same", "cors_origins": ["https://page.example"]})
TIGHT = ApiConfig(max_body_bytes=60)

locked = pytest.mark.parametrize("world", [LOCKED], indirect=True)
tight = pytest.mark.parametrize("world", [TIGHT], indirect=True)


async def test_an_answer_has_the_name_of_its_request(world: Any) -> None:
    async def name_of(given: str | bytes | None) -> str:
        headers = {} if given is None else {"X-Request-Id": given}
        response = await world.client.get("/v1/models", headers=headers)
        name: str = response.headers["x-request-id"]
        return name

    assert await name_of("trace-7/a") == "trace-7/a"
    ours = [await name_of(given) for given in (None, "", "x" * 129, b"caf\xe9", "two words")]
    assert all(len(name) == 32 for name in ours)
    assert len(set(ours)) == len(ours)
    assert (await world.complete(best_off=1)).headers["x-request-id"], "errors have one as well"


@locked
async def test_without_the_key_nothing_is_answered_but_how_it_is(world: Any) -> None:
    ask = {"prompt": "Hi"}
    for header in (
        None,
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic s\u00e9same",
        "s\u00e9same",
        "Bearer s\u00e9same1",
    ):
        headers = {} if header is None else {"Authorization": header.encode()}
        response = await world.client.post("/v1/completions", json=ask, headers=headers)
        assert response.status_code == 401, header
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert world.verifier.requests == []
    assert (await world.client.get("/health")).status_code == 200
    assert ("unknown", "401") in world.ends


@locked
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_with_the_key_everything_is(world: Any, scheme: str) -> None:
    headers = {"Authorization": f"{scheme} s\u00e9same".encode()}
    response = await world.client.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 200, response.text


@locked
async def test_a_page_of_an_allowed_origin_may_ask_and_sees_our_errors(world: Any) -> None:
    origin = {"Origin": "https://page.example"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-any"}
    asked = await world.client.options("/v1/completions", headers=origin | asks)
    assert asked.status_code == 200, "a browser sends no key with this"
    response = await world.client.post("/v1/completions", json={"prompt": "Hi"}, headers=origin)
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    other = {"Origin": "https://other.example"}
    response = await world.client.get("/health", headers=other)
    assert "access-control-allow-origin" not in response.headers


async def test_no_origin_may_ask_unless_the_configuration_says_so(world: Any) -> None:
    response = await world.client.get("/health", headers={"Origin": "https://page.example"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@tight
async def test_a_body_that_says_it_is_too_long_is_not_even_read(world: Any) -> None:
    response = await world.complete(prompt="x" * 200)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "60 bytes" in response.json()["error"]["message"]
    assert (await world.complete()).status_code == 200


@tight
async def test_a_body_that_does_not_say_how_long_it_is_is_read_as_far_as_allowed(
    world: Any,
) -> None:
    async def body(size: int) -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(size):
            yield b"x"
        yield b'"}'

    json = {"Content-Type": "application/json"}
    response = await world.client.post("/v1/completions", content=body(20), headers=json)
    assert response.status_code == 200
    response = await world.client.post("/v1/completions", content=body(10_000), headers=json)
    assert response.status_code == 413
    assert "60 bytes" in response.json()["error"]["message"]
    assert len(world.verifier.requests) == 1


async def test_the_limit_is_that_of_the_configuration(world: Any) -> None:
    most = ApiConfig().max_body_bytes
    assert (await world.complete(prompt="x" * most)).status_code == 413
