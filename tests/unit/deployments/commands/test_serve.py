"""`outrider serve`, up to where a cluster would begin."""

import argparse
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.commands import serve
from deployments.config import DEFAULT, OutriderConfig


@pytest.fixture(autouse=True)
def no_redis_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_REDIS_URL", raising=False)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


def test_without_options_the_defaults_are_served() -> None:
    assert serve.configured(parse()) == DEFAULT


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("http: {port: 9000, host: 0.0.0.0}\nlimits: {max_running: 3}")
    config = serve.configured(parse("--config", str(file), "--port", "9001"))
    assert (config.http.host, config.http.port) == ("0.0.0.0", 9001)
    assert config.limits.max_running == 3


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="http.port"):
        serve.configured(parse("--port", "70000"))


def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}.*--port"):
            serve.run(parse("--port", str(port)))
    serve.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "localhost"), ("0.0.0.0", "localhost"), ("::1", "[::1]"), ("a.b", "a.b")],
)
def test_the_greeting_has_a_request_to_copy(host: str, shown: str) -> None:
    config = OutriderConfig.model_validate({"http": {"host": host, "port": 81}})
    assert f"curl http://{shown}:81/v1/chat/completions" in serve.greeting(config)


def status(*messages: str) -> Any:
    deployments = {str(i): SimpleNamespace(message=text) for i, text in enumerate(messages)}
    return SimpleNamespace(message="Deploying application failed", deployments=deployments)


def test_a_mistake_is_told_without_its_traceback() -> None:
    trace = 'Traceback:\n  File "x.py", line 3\nValueError: drafts.a: not for this target\n\nRetry.'
    assert serve.failure(status("", trace)) == "drafts.a: not for this target"


def test_another_failure_is_told_in_full() -> None:
    told = serve.failure(status("Traceback:\nMemoryError: no room"))
    assert "Deploying application failed" in told
    assert "MemoryError: no room" in told
