"""`outrider serve` as a process of its own, and all the processes that belong to it.

Nothing else on the machine is looked at or touched: what belongs to it descends from the command,
but for the embedded Valkey, which is known by its socket in a folder that only this service has.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from deployments.commands.serve import free_port
from tests.serving import RESTART_S
from tests.tiny import make_target

ROOT = Path(__file__).parents[2]
CONTEXT = 1024
STOPPING_S = 90.0

PATIENCE_S = RESTART_S
"""How long a client waits for the next word."""


def tiny_settings(folder: Path, ranks: int = 1) -> dict[str, Any]:
    """A tiny target; of its drafts two are actors, and `twin` is the target itself."""
    model = make_target(folder / "tiny", max_position_embeddings=CONTEXT)
    return {
        "target": {
            "model": str(model),
            "kv_tokens": 16_384,
            "threads": 1,
            "tensor_parallel": ranks,
        },
        "drafts": [
            {"name": "self", "kind": "ngram", "placement": "actor"},
            {"name": "inline", "kind": "ngram"},
            {"name": "twin", "kind": "lm", "layers": [0, 1]},
        ],
        "limits": {"max_running": 8, "max_queued": 16, "restart_patience_s": RESTART_S},
    }


def default_settings(ranks: int = 1) -> dict[str, Any]:
    """The default target with the shipped drafts."""
    return {
        "target": {"tensor_parallel": ranks},
        "limits": {"max_queued": 16, "restart_patience_s": RESTART_S},
    }


class Service:
    """Runs from `with` to its end."""

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="endure-"))  # short: sockets live there
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        self._log = (folder / "stderr").open("w+")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = ["-m", "deployments.cli", "serve", "--port", str(port), "--config", str(config)]
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self._folder)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> "Service":
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all of it, kindly if that helps.

        Raises:
            TimeoutExpired: it did not, which is a fault of the command's.
        """
        left = self.processes()
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            for pid in left:
                _kill(pid)
            raise
        finally:
            self._process.communicate()
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        greeting = self._process.stdout.readline()
        if not greeting:
            self._log.seek(0)
            raise RuntimeError(f"the server did not start:\n{self._log.read()}")

    def client(self) -> httpx.Client:
        """One for a thread. Each request has a new connection: no broken one is met again."""
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, limits=limits)

    def processes(self) -> dict[int, str]:
        """Command lines by process id."""
        lines, children = {}, defaultdict(list)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
                lines[int(entry.name)] = line
                children[parent].append(int(entry.name))
        mine = [pid for pid, line in lines.items() if str(self._folder) in line]
        fresh = [self._process.pid]
        while fresh:
            mine += fresh
            fresh = [child for pid in fresh for child in children[pid]]
        return {pid: lines[pid] for pid in mine}

    def find(self, title: str) -> list[int]:
        """Its processes whose names begin so, as Ray's `ray::` and class, or a program's."""
        return [pid for pid, line in self.processes().items() if _name(line).startswith(title)]

    def memory(self) -> Counter[str]:
        """Bytes by kind of process: PSS, which counts shared pages once altogether."""
        found: Counter[str] = Counter()
        for pid, line in self.processes().items():
            found[_kind(line)] += _pss(pid)
        return found


def _name(line: str) -> str:
    return Path(line.split(" ")[0]).name


def _kind(line: str) -> str:
    """`ray::ServeReplica:outrider:Verifier.generate` is a ServeReplica:outrider:Verifier."""
    name = _name(line)
    return name.removeprefix("ray::").partition(".")[0] if name.startswith("ray::") else name


def _pss(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended meanwhile
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is a KeyboardInterrupt meanwhile, and SIGINT too where a shell's `&` switched it off:
    nothing is left running."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
