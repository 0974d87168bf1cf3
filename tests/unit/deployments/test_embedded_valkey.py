"""The embedded server answers, and never outlives its owner."""

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from deployments.embedded_valkey import EmbeddedValkey
from tests.serving import wait_until

ROOT = Path(__file__).parents[3]


def reachable(url: str) -> bool:
    return process_of(url) is not None


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
    assert wait_until(lambda: not reachable(url), 5)
    assert wait_until(lambda: not Path(url.removeprefix("unix://")).parent.exists(), 5)


def process_of(url: str) -> int | None:
    """The server's, as the kernel tells those who connect to it; None while there is none."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(url.removeprefix("unix://"))
        except OSError:
            return None
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", peer)[0]
    return pid


def test_one_that_is_killed_is_replaced_and_ends_all_the_same() -> None:
    valkey = EmbeddedValkey()
    for _ in range(2):
        killed = process_of(valkey.url)
        os.kill(killed, signal.SIGKILL)
        assert wait_until(lambda killed=killed: process_of(valkey.url) not in (None, killed), 5)
    last = process_of(valkey.url)
    assert last
    valkey.close()
    assert not Path(f"/proc/{last}").exists()


def test_one_that_is_frozen_ends_all_the_same() -> None:
    valkey = EmbeddedValkey()
    pid = process_of(valkey.url)
    assert pid
    os.kill(pid, signal.SIGSTOP)
    valkey.close()
    assert not Path(f"/proc/{pid}").exists()
