"""The bench of KV memory: picture and Markdown show its numbers and how to repeat them."""

from pathlib import Path
from typing import Any

import pytest

from bench.kv import OURS, ROWS, WAYS, Settings, measure
from bench.kv_plot import draw, plot
from bench.kv_report import kv_report


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    found = measure(Settings(40, 1.0, 4096, 16, 128, seed=1))
    run = {
        "command": "outrider bench kv --requests 40",
        "revision": "0123456789ab",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": "Abacus, 2 cores",
        "versions": {"torch": "2.13.0"},
        "python": "3.11.7",
        "settings": {
            "requests": 40,
            "rate": 1.0,
            "kv_tokens": 4096,
            "page_size": 16,
            "max_tokens": 128,
            "seed": 1,
        },
    }
    return found | {"run": run}


def test_lines_are_the_course_of_each_way(summary: dict[str, Any]) -> None:
    waste, running = draw(summary).axes
    for ax, key in ((waste, "waste"), (running, "running")):
        for line, report in zip(ax.lines, summary["ways"].values(), strict=True):
            assert list(line.get_xdata()) == report["over_time"]["step"]
            assert list(line.get_ydata()) == report["over_time"][key]
    labels = [str(line.get_label()) for line in waste.lines]
    mean = summary["ways"][OURS]["waste"]["mean"]
    assert labels[2] == f"outrider, waste {mean:.1%}"
    assert len({line.get_color() for line in waste.lines}) == len(WAYS)


@pytest.mark.filterwarnings("error")
def test_the_file_is_a_png(summary: dict[str, Any], tmp_path: Path) -> None:
    plot(summary, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_says_where_the_numbers_come_from(summary: dict[str, Any]) -> None:
    said = kv_report(summary)
    assert said.startswith("# KV memory, Abacus, 2 cores, 2026-01-02\n")
    assert "\n    outrider bench kv --requests 40\n" in said
    whole = " ".join(said.split())
    assert "Revision 0123456789ab; Python 3.11.7. 40 requests, 1 a step, seed 1: prompts" in whole
    assert "Pools of 4,096 tokens, pages of 16." in whole


def test_the_report_has_every_number_of_every_way(summary: dict[str, Any]) -> None:
    said = kv_report(summary)
    assert "|  | maximum length | plain paging | outrider | outrider, host |\n" in said
    rows = [line for line in said.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len({row.split("|")[1] for row in rows}) == len(ROWS)
    p95 = " | ".join(f"{report['waste']['p95']:.1%}" for report in summary["ways"].values())
    assert f"| waste after steps: 95th percentile | {p95} |" in said
    finished = " | ".join(f"{report['finished']}" for report in summary["ways"].values())
    assert f"| finished | {finished} |" in said
