"""The picture shows the numbers, each where it belongs."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from bench.plot import draw, plot
from tests.unit.bench.summary import summary


def heights(ax: Axes, arm: str) -> list[float]:
    [bars] = [bars for bars in ax.containers if bars.get_label() == arm]
    return [bar.get_height() for bar in bars]  # type: ignore[attr-defined]


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_column_for_each_temperature_and_a_row_for_each_question() -> None:
    axes = draw(summary()).axes
    assert len(axes) == 4 * 2
    assert [ax.get_title() for ax in axes] == ["temperature 0.0", "temperature 0.8", *[""] * 6]
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["code", "zh", "all"]


def test_bars_are_as_high_as_the_numbers() -> None:
    axes = draw(summary()).axes
    assert heights(axes[0], "hybrid") == [2.5, 2.5, 2.5]
    assert heights(axes[1], "hybrid") == [1.25, 1.25, 1.25]
    assert heights(axes[2], "plain") == [10.0, 10.0, 10.0]
    assert heights(axes[3], "hybrid") == [20.0, 20.0, 20.0]
    assert "2.5" in words(axes[0])


def test_reliability_is_drawn_for_arms_with_a_draft_where_there_are_nodes() -> None:
    diagonal, hybrid = draw(summary()).axes[4].lines
    assert list(diagonal.get_xdata()) == [0, 1]
    assert hybrid.get_label() == "hybrid, error 0.250"
    assert list(zip(hybrid.get_xdata(), hybrid.get_ydata(), strict=True)) == [(0.25, 0), (0.75, 1)]


def test_the_matrix_says_tau_and_speed() -> None:
    axes = draw(summary()).axes
    assert words(axes[6]) == ["1.60\n×2.00", "2.50\n×4.00"] * 2
    assert [text.get_fontweight() for text in axes[6].texts] == ["normal", "bold"] * 2
    scales = {ax.images[0].get_clim() for ax in axes[6:]}
    assert scales == {(1, 2.5)}, "one colour means one tau in the whole picture"


def test_without_a_matrix_there_is_no_row_for_it(tmp_path: Path) -> None:
    made = summary()
    for found in made["temperatures"].values():
        del found["matrix"]
    assert len(draw(made).axes) == 3 * 2


def test_a_single_domain_is_not_drawn_twice() -> None:
    made = summary()
    for found in made["temperatures"].values():
        del found["domains"]["zh"]
    assert heights(draw(made).axes[0], "hybrid") == [2.5]


@pytest.mark.filterwarnings("error")
def test_the_file_is_a_png(tmp_path: Path) -> None:
    plot(summary(), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
