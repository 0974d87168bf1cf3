"""One picture of what `outrider bench kv` found: waste and running requests over time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

_COLOURS = ("#9aa0a6", "#e69f00", "#0072b2", "#56b4e9")  # by way, in their order; ours are last
_GRID = "#e3e6ea"


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Write a PNG; summary: as `outrider bench kv` writes it."""
    draw(summary).savefig(path, format="png")


def draw(summary: Mapping[str, Any]) -> Figure:
    """Two panels over the same steps. No pyplot: nothing is shown, nothing outlives the figure."""
    figure = Figure(figsize=(9.0, 6.4), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _lines(above, summary["ways"], "waste")
    above.set_ylabel("waste: held slots without\na committed token, after steps")
    above.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    above.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _lines(below, summary["ways"], "running")
    below.set(ylabel="requests running", xlabel="step")
    _caption(figure, summary["run"])
    return figure


def _lines(ax: Axes, ways: Mapping[str, Any], key: str) -> None:
    for (name, report), colour in zip(ways.items(), _COLOURS, strict=True):
        course, label = report["over_time"], f"{name}, waste {report['waste']['mean']:.1%}"
        ax.plot(course["step"], course[key], color=colour, linewidth=1.2, label=label)
    ax.set_ylim(bottom=0)
    ax.margins(x=0.01)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _caption(figure: Figure, run: Mapping[str, Any]) -> None:
    settings = run["settings"]
    figure.suptitle(
        f"{settings['requests']:,} requests, {settings['rate']:g} a step, pools of "
        f"{settings['kv_tokens']:,} tokens, pages of {settings['page_size']}, seed "
        f"{settings['seed']}\n{run['date'][:10]}, revision {run['revision']}",
        fontsize=10,
        color="#3c4043",
    )
