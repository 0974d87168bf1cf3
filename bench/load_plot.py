"""One picture of what `outrider bench load` found: a column for each kind of load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bench.plot import Colours, colours_of, label_of, plainly

_LOADS = {"concurrency": "requests open at once", "rate": "requests per second"}
_TIMES = {
    "first_text_s": "seconds to the first text",
    "per_token_s": "seconds per token",
    "whole_s": "seconds to the end",
}
_STYLES = {"p50": "-", "p95": "--", "p99": ":"}


def plot_load(summary: Mapping[str, Any], path: Path) -> None:
    """Write a PNG; summary: as `outrider bench load` writes it."""
    draw_load(summary).savefig(path, format="png")


def draw_load(summary: Mapping[str, Any]) -> Figure:
    """Throughput, and the percentiles of each time, by load."""
    by_kind = {kind: _sorted(summary["levels"], kind) for kind in _LOADS}
    kinds = {kind: levels for kind, levels in by_kind.items() if levels}
    size = (6.4 * len(kinds), 2.9 * (1 + len(_TIMES)) + 0.9)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(1 + len(_TIMES), len(kinds), squeeze=False)
    for column, (kind, levels) in enumerate(kinds.items()):
        arms = list(levels[0]["arms"])
        colours = {arm: colours_of(arms)[arm] for arm in arms}
        _throughput(axes[0][column], kind, levels, colours)
        for ax, key in zip(axes[1:, column], _TIMES, strict=True):
            _time(ax, kind, levels, colours, key)
        axes[-1][column].set_xlabel(_LOADS[kind])
    _caption(figure, summary["run"])
    return figure


def _sorted(levels: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    """Those of a kind, whatever their order was."""
    return sorted(
        (own for own in levels if own[kind] is not None), key=lambda own: float(own[kind])
    )


def _caption(figure: Figure, run: Mapping[str, Any]) -> None:
    settings = run["settings"]
    how = "over HTTP" if settings["url"] else f"{settings['dtype']}, in process"
    figure.suptitle(
        f"{Path(settings['target']).name}, {how}, budget {settings['budget']}, "
        f"{settings['max_tokens']} tokens, temperature {settings['temperature']:g}\n"
        f"{run['machine']}, {run['date'][:10]}, revision {run['revision']}",
        fontsize=10,
        color="#3c4043",
    )


def _throughput(ax: Axes, kind: str, levels: Sequence[Mapping[str, Any]], colours: Colours) -> None:
    for arm, colour in colours.items():
        speeds = [own["arms"][arm]["tokens_per_second"] for own in levels]
        _draw(ax, kind, levels, speeds, color=colour, label=label_of(arm))
    ax.set_ylabel("tokens/s")
    ax.legend(fontsize=8, frameon=False)
    _axes(ax, kind, levels)


def _time(
    ax: Axes, kind: str, levels: Sequence[Mapping[str, Any]], colours: Colours, key: str
) -> None:
    """A line for each arm and percentile; what nobody measured is a gap."""
    for arm, colour in colours.items():
        for share, style in _STYLES.items():
            times = [own["arms"][arm][key][share] for own in levels]
            known = [float("nan") if time is None else time for time in times]
            label = f"{label_of(arm)}, {share}"
            _draw(ax, kind, levels, known, color=colour, linestyle=style, label=label)
    ax.set_ylabel(_TIMES[key])
    ax.legend(fontsize=7, frameon=False, ncols=2)
    _axes(ax, kind, levels)


def _draw(
    ax: Axes, kind: str, levels: Sequence[Mapping[str, Any]], y: Sequence[float], **look: Any
) -> None:
    loads = [own[kind] for own in levels]
    ax.plot(loads, y, marker="o", markersize=3, linewidth=1.3, **look)


def _axes(ax: Axes, kind: str, levels: Sequence[Mapping[str, Any]]) -> None:
    """Loads are chosen by doubling, mostly; each has its tick. Times and speeds begin at 0."""
    ax.margins(y=0.15)
    ax.set_ylim(bottom=0)
    loads = [own[kind] for own in levels]
    ax.set_xscale("log", base=2)
    ax.set_xticks(loads, [f"{load:g}" for load in loads])
    ax.xaxis.set_minor_locator(NullLocator())
    plainly(ax)
