"""`outrider serve` as a user starts it: no file, the default target, all shipped drafts."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.commands.serve import free_port
from tests.serving import chunks, processes, text_of, wait_until

ROOT = Path(__file__).parents[2]
ASK = {"prompt": "def fibonacci(n):\n", "temperature": 0, "max_tokens": 48}


class Server:
    """The running command, and what it printed when it was ready."""

    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.greeting = "".join(self.process.stdout.readline() for _ in range(3))
        self.http = httpx.Client(base_url=f"http://localhost:{port}/v1", timeout=120)

    def stop(self) -> int:
        self.http.close()
        self.process.send_signal(signal.SIGINT)
        _, _ = self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="module")
def before() -> set[int]:
    return set(processes("ray::"))


@pytest.fixture(scope="module")
def server(before: set[int]) -> Iterator[Server]:
    server = Server(free_port())
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def test_the_printed_request_works(server: Server) -> None:
    assert server.greeting.startswith("Ready at http://localhost:"), server.greeting
    command = server.greeting[server.greeting.index("curl") :]
    short = command.replace('"max_tokens": 128', '"max_tokens": 16')
    done = subprocess.run(["sh", "-c", f"{short.strip()} -s"], capture_output=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["speculation"]["draft"] == "code"


@pytest.mark.parametrize("draft", ["code", "lm"])
def test_a_shipped_draft_saves_steps_and_changes_nothing(server: Server, draft: str) -> None:
    def ask(wish: str) -> dict[str, Any]:
        body = {**ASK, "speculation": {"draft": wish}}
        answer: dict[str, Any] = server.http.post("/completions", json=body).json()
        return answer

    plain, said = ask("none"), ask(draft)
    assert text_of(said) == text_of(plain)
    assert said["usage"] == plain["usage"]
    assert said["speculation"]["steps"] <= plain["speculation"]["steps"] == 48
    with server.http.stream(
        "POST", "/completions", json={**ASK, "stream": True, "speculation": {"draft": draft}}
    ) as response:
        assert "".join(text_of(chunk) for chunk in chunks(response)) == text_of(plain)


def test_an_interrupt_ends_all_of_it(server: Server, before: set[int]) -> None:
    assert server.stop() == 0
    assert wait_until(lambda: set(processes("ray::")) <= before)
