"""One picture of what `outrider bench decode` found: a column of panels for each temperature."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.decode import PLAIN

_PLAIN_COLOUR = "#9aa0a6"
# Okabe and Ito's, which nobody confuses; their yellow is too light for lines on white.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_GRID = "#e3e6ea"
# Points of the reliability diagram: areas go by share of the arm's nodes, between these two.
_SMALLEST, _LARGEST = 10.0, 160.0

Colours = Mapping[str, str]
Panel = Callable[[Axes, Mapping[str, Any], Colours], None]


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """Write a PNG; summary: as `outrider bench decode` writes it."""
    draw(summary).savefig(path, format="png")


def draw(summary: Mapping[str, Any]) -> Figure:
    """Tau and tokens/s by domain and arm, reliability, and the matrix if there is one, row by row.

    No pyplot here: nothing is shown, and no state outlives the figure.
    """
    temperatures = summary["temperatures"]
    panels: list[Panel] = [_tau, _speed, _reliability]
    matrices = [found["matrix"] for found in temperatures.values() if "matrix" in found]
    if matrices:
        panels.append(partial(_matrix, most=max(map(_most, matrices))))
    figure = Figure(
        figsize=(_width(temperatures), 3.6 * len(panels) + 1.1), dpi=150, layout="constrained"
    )
    axes = figure.subplots(len(panels), len(temperatures), squeeze=False, sharey="row")
    for panel, row in zip(panels, axes, strict=True):
        for ax, found in zip(row, temperatures.values(), strict=True):
            panel(ax, found, colours_of(found["arms"]))
        for ax in row[1:]:
            ax.set_ylabel("")
    for ax, temperature in zip(axes[0], temperatures, strict=True):
        _head(ax, temperature)
    _caption(figure, summary["run"])
    return figure


def _width(temperatures: Mapping[str, Any]) -> float:
    """Inches: room for the bars of every arm and domain."""
    bars = max(len(found["domains"]) * len(found["arms"]) for found in temperatures.values())
    return len(temperatures) * min(14.0, max(5.6, 0.24 * bars + 1.2))


def colours_of(arms: Sequence[str]) -> Colours:
    """Each arm's own; plain decoding's is the same in all pictures."""
    drafts = [name for name in arms if name != PLAIN]
    return {PLAIN: _PLAIN_COLOUR} | dict(zip(drafts, cycle(_COLOURS), strict=False))


def _head(ax: Axes, temperature: str) -> None:
    """What a column of panels shares: its temperature, and the arms' colours below it."""
    ax.set_title(f"temperature {temperature}", fontsize=12, fontweight="bold", pad=22)
    ax.legend(
        ncols=6,
        fontsize=8,
        frameon=False,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        handlelength=1.1,
        columnspacing=1.2,
    )


def _caption(figure: Figure, run: Mapping[str, Any]) -> None:
    settings = run["settings"]
    figure.suptitle(
        f"{Path(settings['target']).name}, {settings['dtype']}, budget {settings['budget']}, "
        f"{settings['max_tokens']} tokens\n{run['machine']}, {run['date'][:10]}, "
        f"revision {run['revision']}",
        fontsize=10,
        color="#3c4043",
    )


def _tau(ax: Axes, found: Mapping[str, Any], colours: Colours) -> None:
    _bars(ax, found, colours, "tau", "{:.1f}")
    ax.set_ylabel("tau: tokens per pass of the target")
    ax.axhline(1, color="#5f6368", linewidth=0.8, linestyle=":")


def _speed(ax: Axes, found: Mapping[str, Any], colours: Colours) -> None:
    _bars(ax, found, colours, "tokens_per_second", "{:.0f}")
    ax.set_ylabel("tokens/s, prefill included")


def _bars(ax: Axes, found: Mapping[str, Any], colours: Colours, key: str, form: str) -> None:
    """A group of bars for each domain, and for all together where there are several."""
    groups = dict(found["domains"])
    if len(groups) > 1:
        groups["all"] = found["arms"]
    names = list(found["arms"])
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        heights = [reports[name][key] for reports in groups.values()]
        middle = (place - (len(names) - 1) / 2) * width
        drawn = ax.bar(
            [group + middle for group in range(len(groups))],
            heights,
            width * 0.92,
            label=label_of(name),
            color=colours[name],
        )
        ax.bar_label(drawn, [form.format(h) for h in heights], fontsize=6.5, padding=1.5)
    ax.set_xticks(range(len(groups)), list(groups))
    side = 1.0 if len(groups) == 1 else 0.5  # a single group need not fill the panel
    ax.set_xlim(-side, len(groups) - 1 + side)
    ax.margins(y=0.12)
    plainly(ax)


def _reliability(ax: Axes, found: Mapping[str, Any], colours: Colours) -> None:
    """Above the diagonal a draft is too modest, below it too sure of itself."""
    ax.plot([0, 1], [0, 1], color="#5f6368", linewidth=0.8, linestyle=":")
    for name, row in found["arms"].items():
        if row["calibration_error"] is not None:
            _reliability_line(ax, name, row, colours[name])
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.set_xlabel("confidence of the draft; dots by number of nodes")
    ax.set_ylabel("share accepted")
    ax.legend(fontsize=7.5, frameon=False, loc="upper left", markerscale=0.5)
    plainly(ax)


def _reliability_line(ax: Axes, name: str, row: Mapping[str, Any], colour: str) -> None:
    bins = [own for own in row["reliability"] if own["count"]]
    most = max(own["count"] for own in bins)
    x, y = [own["confidence"] for own in bins], [own["accepted"] for own in bins]
    ax.plot(
        x,
        y,
        color=colour,
        linewidth=1.3,
        label=f"{label_of(name)}, error {row['calibration_error']:.3f}",
    )
    areas = [_SMALLEST + (_LARGEST - _SMALLEST) * own["count"] / most for own in bins]
    ax.scatter(x, y, areas, color=colour, alpha=0.45, linewidths=0, clip_on=False)


def label_of(name: str) -> str:
    """An arm may be a draft's folder."""
    return Path(name).name


def _most(matrix: Mapping[str, Any]) -> float:
    """The greatest tau in it."""
    return max(float(entry["tau"]) for own in matrix.values() for entry in own.values())


def _matrix(ax: Axes, found: Mapping[str, Any], colours: Colours, *, most: float) -> None:
    """Tau as colour, up to `most`; each row's best is in bold."""
    matrix = found["matrix"]
    drafts = list(next(iter(matrix.values())))
    values = [[own[draft]["tau"] for draft in drafts] for own in matrix.values()]
    ax.imshow(values, cmap="YlGnBu", vmin=1, vmax=max(most, 1.01), aspect="auto")
    for line, (own, taus) in enumerate(zip(matrix.values(), values, strict=True)):
        for column, draft in enumerate(drafts):
            _entry(ax, column, line, own[draft], taus, dark=taus[column] > 1 + 0.6 * (most - 1))
    ax.set_xticks(range(len(drafts)), drafts)
    ax.set_yticks(range(len(matrix)), list(matrix))
    ax.set_xlabel("draft; tau, and speed against plain decoding")
    ax.set_ylabel("prompts")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _entry(
    ax: Axes, x: int, y: int, entry: Mapping[str, Any], row: Sequence[float], *, dark: bool
) -> None:
    speedup = "" if entry["speedup"] is None else f"\n×{entry['speedup']:.2f}"
    ax.text(
        x,
        y,
        f"{entry['tau']:.2f}{speedup}",
        ha="center",
        va="center",
        fontsize=9,
        color="white" if dark else "#202124",
        fontweight="bold" if entry["tau"] == max(row) else "normal",
    )


def plainly(ax: Axes) -> None:
    """No more lines than are looked at."""
    ax.set_axisbelow(True)
    ax.grid(axis="y", color=_GRID, linewidth=0.8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
