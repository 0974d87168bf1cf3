"""What is compiled is kept on the disk, until the source of anything in it changes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workers.engine import pass_work

pytestmark = pytest.mark.skipif(not pass_work.COMPILES, reason="nothing is compiled here")

WORKERS = Path(pass_work.__file__).parents[1]
LIKELIEST = """
import numpy as np
from workers.engine.kernels.eagle import likeliest
places, probabilities = np.zeros(1, np.int64), np.zeros(1, np.float32)
likeliest(np.array([0, 1], np.float32), places, probabilities)
kept = sum(likeliest.stats.cache_hits.values())
print(probabilities[0], kept)
"""


def likeliest_in(folder: Path) -> tuple[float, int]:
    """What a copy of the package makes of two scores, and how often it was kept code."""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", LIKELIEST],
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
    of_two = pytest.approx(0.7310586)
    assert likeliest_in(tmp_path) == (of_two, 0)
    assert likeliest_in(tmp_path) == (of_two, 1)
    elements = tmp_path / "workers" / "engine" / "kernels" / "elements.py"
    source = elements.read_text(encoding="utf-8")
    last = "return _scaled(p * (r * r) + r + np.float32(1), power)"
    assert last in source
    elements.write_text(source.replace(last, "return np.float32(1)"), encoding="utf-8")
    assert likeliest_in(tmp_path) == (0.5, 0), "exp is in another file"
