"""The embedded server answers, and never outlives its owner."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deployments.embedded_valkey import EmbeddedValkey

ROOT = Path(__file__).parents[3]


def reachable(url: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(url.removeprefix("unix://"))
        except OSError:
            return False
        return True


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_it_answers_until_it_is_closed() -> None:
    valkey = EmbeddedValkey()
    folder = Path(valkey.url.removeprefix("unix://")).parent
    assert reachable(valkey.url)
    valkey.close()
    assert not reachable(valkey.url)
    assert not folder.exists()
    valkey.close()


def test_two_can_run_side_by_side() -> None:
    one, two = EmbeddedValkey(), EmbeddedValkey()
    assert one.url != two.url
    one.close()
    assert reachable(two.url)
    two.close()


def test_it_ends_with_an_owner_that_is_killed() -> None:
    code = "from deployments.embedded_valkey import EmbeddedValkey\n"
    code += "v = EmbeddedValkey(); print(v.url, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        assert reachable(url)
        owner.send_signal(signal.SIGKILL)
    assert soon(lambda: not reachable(url))
    assert soon(lambda: not Path(url.removeprefix("unix://")).parent.exists())


def process_of(url: str) -> int:
    """The server's process, as the kernel tells those who connect to it."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(url.removeprefix("unix://"))
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", peer)[0]
    return pid


def test_one_that_is_killed_is_replaced_and_ends_all_the_same() -> None:
    valkey = EmbeddedValkey()
    for _ in range(2):
        os.kill(process_of(valkey.url), signal.SIGKILL)
        assert soon(lambda: not reachable(valkey.url))
        assert soon(lambda: reachable(valkey.url))
    last = process_of(valkey.url)
    valkey.close()
    assert not Path(f"/proc/{last}").exists()


def test_one_that_is_frozen_ends_all_the_same() -> None:
    valkey = EmbeddedValkey()
    pid = process_of(valkey.url)
    os.kill(pid, signal.SIGSTOP)
    valkey.close()
    assert not Path(f"/proc/{pid}").exists()
