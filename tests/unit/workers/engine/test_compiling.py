"""What is compiled is kept on the disk, until the source of anything in it changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.engine import layer_steps

pytestmark = pytest.mark.skipif(layer_steps.layer is None, reason="nothing is compiled here")

WORKERS = Path(layer_steps.__file__).parents[1]
GATE = """
import numpy as np
from workers.engine.kernels import elements, layer
both, out = np.ones(2, np.float32), np.zeros(1, np.float32)
layer.gate(both.ctypes.data, out.ctypes.data, 1, 1, elements.FLOAT32)
kept = sum(layer.gate.stats.cache_hits.values())
print(out[0], kept)
"""


def gate_in(folder: Path) -> tuple[float, int]:
    """What the gate of a copy of the package makes of 1 and 1, and how often it was kept code."""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", GATE],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    value, kept = done.stdout.split()
    return float(value), int(kept)


def test_code_is_kept_until_any_of_its_sources_changes(tmp_path: Path) -> None:
    shutil.copytree(
        WORKERS, tmp_path / "workers", ignore=shutil.ignore_patterns("__pycache__", "training")
    )
    silu_of_1 = pytest.approx(0.7310586)
    assert gate_in(tmp_path) == (silu_of_1, 0)
    assert gate_in(tmp_path) == (silu_of_1, 1)
    elements = tmp_path / "workers" / "engine" / "kernels" / "elements.py"
    source = elements.read_text(encoding="utf-8")
    last = "return _scaled(p * (r * r) + r + np.float32(1), power)"
    assert last in source
    elements.write_text(source.replace(last, "return np.float32(1)"), encoding="utf-8")
    assert gate_in(tmp_path) == (0.5, 0), "exp is in another file than the gate"
