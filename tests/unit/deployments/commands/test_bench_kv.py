"""`outrider bench kv` from end to end; it needs no model."""

import json
from pathlib import Path

import pytest

from bench.kv import WAYS
from deployments.cli import main

SMALL = ("bench", "kv", "--requests", "30", "--kv-tokens", "4096", "--max-tokens", "64")


def test_it_prints_a_table_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outs = {name: tmp_path / f"out.{name}" for name in ("json", "report", "plot")}
    options = [part for name, out in outs.items() for part in (f"--{name}", str(out))]
    assert main([*SMALL, "--rate", "0.5", "--page-size", "8", "--seed", "7", *options]) == 0

    summary = json.loads(outs["json"].read_text())
    assert tuple(summary["ways"]) == WAYS
    for report in summary["ways"].values():
        assert report["finished"] + report["cancelled"] == 30
        assert 0 <= report["waste"]["mean"] <= report["waste"]["max"] < 1
        assert report["over_time"]["step"]
    assert summary["trace"]["requests"] == 30
    assert {"command", "revision", "machine"} <= summary["run"].keys()
    assert summary["run"]["settings"] == {
        "requests": 30,
        "rate": 0.5,
        "kv_tokens": 4096,
        "page_size": 8,
        "max_tokens": 64,
        "seed": 7,
    }
    assert capsys.readouterr().out.split()[:4] == ["maximum", "length", "plain", "paging"]
    assert "| waste after steps: mean |" in outs["report"].read_text()
    assert outs["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "--requests: 0 is not 1 or more"),
        (["--rate", "0"], "rate: 0.0 is no number above 0"),
        (["--rate", "nan"], "rate: nan is no number above 0"),
        (["--rate", "often"], "--rate: invalid float value: 'often'"),
        (["--kv-tokens", "0"], "--kv-tokens: 0 is not 1 or more"),
        (["--kv-tokens", "8"], "kv_tokens: no request of the trace fits into 8"),
        (["--page-size", "0"], "--page-size: 0 is not 1 or more"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not 1 or more"),
        (["--seed", "-1"], "--seed: -1 is not 0 or more"),
        (["--json", "/no/such/folder/x.json"], "json: there is no folder /no/such/folder"),
        (["--report", "/no/such/folder/x.md"], "report: there is no folder /no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "plot: there is no folder /no/such/folder"),
    ],
    ids=lambda value: " ".join(value[:2]).strip("-") if isinstance(value, list) else "",
)
def test_options_that_cannot_be_used_are_named(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main([*SMALL, *options]) == 2
    except SystemExit as exit_:
        assert exit_.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
