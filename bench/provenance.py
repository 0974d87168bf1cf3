"""Where a number comes from: command, revision, machine and versions, kept beside it."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from joblib import cpu_count

_ROOT = Path(__file__).resolve().parents[1]


def provenance(also: Sequence[str] = ()) -> dict[str, Any]:
    """What somebody needs to repeat this run; also: packages besides the usual ones."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "revision": _revision(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_processor()}, {cpu_count()} core{'s' if cpu_count() > 1 else ''}",
        "versions": {name: version(name) for name in ("torch", "transformers", "ray", *also)},
        "python": platform.python_version(),
    }


def _revision() -> str:
    """The commit, marked when the tree has changes on top of it; "unknown" outside a checkout."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
