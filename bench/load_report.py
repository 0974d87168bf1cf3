"""What `outrider bench load` found, for people: a line for every lap, and all of it in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.decode import cell
from bench.report import header, markdown_table, prompts_of

_HEAD = (
    ("load", 10),
    ("arm", 12),
    ("done", 6),
    ("lost", 6),
    ("tokens/s", 10),
    ("first text, ms", 20),
    ("per token, ms", 18),
    ("whole, s", 18),
    ("tau", 7),
    ("pages", 7),
    ("drafts", 8),
    ("passes", 8),
    ("same", 7),
)
"""Columns and how wide they are; the first two are aligned to the left."""

_LEGEND = (
    "First text, per token and whole answer: the 50th, 95th and 99th percentile. Lost: requests "
    "that were refused or failed. Pages: of the KV pool, most in use. Drafts, passes: shares of "
    "the time that steps took for proposals, and for the rest. Same: share of texts that are "
    "plain's."
)


def table_head() -> str:
    return _line(name for name, _ in _HEAD)


def level_lines(level: Mapping[str, Any]) -> str:
    """A line per arm, and one for every reason for which requests were lost."""
    lines = []
    for arm, row in level["arms"].items():
        lines.append(_line(_cells(level["load"], arm, row)))
        lines += [f"  {reason}" for reason in _reasons(row)]
    return "\n".join(lines)


def load_report(summary: Mapping[str, Any]) -> str:
    """All of it, as the files in bench/results are."""
    levels = summary["levels"]
    rows = [_cells(own["load"], arm, row) for own in levels for arm, row in own["arms"].items()]
    parts = [
        header(summary["run"], f"{_how(summary['run']['settings'])} {_LEGEND}"),
        markdown_table([name for name, _ in _HEAD], rows),
    ]
    lost = [
        f"- {own['load']}, {arm}: {reason}"
        for own in levels
        for arm, row in own["arms"].items()
        for reason in _reasons(row)
    ]
    if lost:
        parts += ["Requests that were lost:", "\n".join(lost)]
    return "\n\n".join(parts) + "\n"


def _how(settings: Mapping[str, Any]) -> str:
    where = (
        f"Over HTTP, {settings['url']}"
        if settings["url"]
        else f"In process, {settings['dtype']} on {settings['device']}, at most "
        f"{settings['max_running']} requests in a pass"
    )
    return (
        f"{where}; budget {settings['budget']}, temperature {settings['temperature']:g}, at most "
        f"{settings['max_tokens']} tokens; {settings['requests']} requests per load and arm; "
        f"prompts: {prompts_of(settings)}."
    )


def _line(cells: Iterable[str]) -> str:
    widths = [width for _, width in _HEAD]
    parts = [
        f"{cell_:<{width}}" if column < 2 else f"{cell_:>{width}}"
        for column, (cell_, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "".join(parts)


def _cells(load: str, arm: str, row: Mapping[str, Any]) -> Sequence[str]:
    pages = row["kv_pages"]
    return (
        load,
        arm,
        f"{row['done']}",
        f"{sum(row['refused'].values()) + sum(row['failed'].values())}",
        f"{row['tokens_per_second']:.1f}",
        _spread(row["first_text_s"], 1000, 0),
        _spread(row["per_token_s"], 1000, 1),
        _spread(row["whole_s"], 1, 2),
        cell(row["tau"]),
        "-" if pages is None else f"{pages}",
        _share(row["draft_share"]),
        _share(row["pass_share"]),
        _share(row["exact_match"]),
    )


def _spread(values: Mapping[str, float | None], unit: float, digits: int) -> str:
    return "/".join(cell(None if v is None else v * unit, digits) for v in values.values())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _reasons(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{number} {how}: {reason}"
        for how in ("refused", "failed")
        for reason, number in row[how].items()
    ]
