"""What is kept beside a number."""

import re
from datetime import datetime
from importlib.metadata import version

import pytest

from bench.provenance import provenance


def test_it_says_what_is_needed_to_repeat_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/outrider", "bench", "decode", "--limit", "2"])
    found = provenance()
    assert found["command"] == "outrider bench decode --limit 2"
    assert re.fullmatch(r"(\S+-g)?[0-9a-f]{12,}(-dirty)?|unknown", found["revision"])
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert re.search(r", \d+ cores?$", found["machine"])
    assert found["versions"]["torch"] == version("torch")
