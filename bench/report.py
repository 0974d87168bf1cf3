"""A whole result as Markdown, for bench/results: the numbers, and what is needed to repeat them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from bench.decode import cell
from bench.matrix import entry_text


def decode_report(summary: Mapping[str, Any]) -> str:
    """What `outrider bench decode` found."""
    parts = [_header(summary["run"])]
    for temperature, found in summary["temperatures"].items():
        parts += [f"## Temperature {temperature}", _arms(found)]
        if "matrix" in found:
            parts += ["Every draft on every prompts, tau (speed-up):", _matrix(found["matrix"])]
        parts += _members(found["arms"])
        parts += _reliability(found["arms"])
    return "\n\n".join(parts) + "\n"


def peers_report(summary: Mapping[str, Any], tables: Mapping[str, str]) -> str:
    """What `outrider bench peers` found; tables: by domain, in Markdown."""
    parts = [_header(summary["run"])]
    for domain, text in tables.items():
        parts += [f"## {domain}", text]
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def header(run: Mapping[str, Any], how: str) -> str:
    """Title, where the numbers come from, and how they were had, in sentences."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    facts = f"Revision {run['revision']}; {versions}, Python {run['python']}. {how}"
    return (
        f"# {Path(run['settings']['target']).name}, {run['machine']}, {run['date'][:10]}\n\n"
        f"{fill(facts, 120)}\n\n    {run['command']}"
    )


def prompts_of(settings: Mapping[str, Any]) -> str:
    """How many of which file."""
    return ", ".join(f"{number} of {name}" for name, number in settings["prompts"].items())


def _header(run: Mapping[str, Any]) -> str:
    settings = run["settings"]
    return header(
        run,
        f"{settings['dtype']} on {settings['device']}, budget {settings['budget']}, at most "
        f"{settings['max_tokens']} tokens; prompts: {prompts_of(settings)}. Prefill is included.",
    )


def _arms(found: Mapping[str, Any]) -> str:
    head = ("prompts", "arm", "tokens/s", "tau", "alpha", "against plain", "same text as plain")
    return markdown_table(
        (*head, "calibration error"),
        [
            (domain, name, *_numbers(row))
            for domain, reports in [*found["domains"].items(), ("all", found["arms"])]
            for name, row in reports.items()
        ],
    )


def _numbers(row: Mapping[str, Any]) -> tuple[str, ...]:
    same = row["exact_match"]
    return (
        f"{row['tokens_per_second']:.1f}",
        f"{row['tau']:.2f}",
        cell(row["alpha"]),
        cell(row["speedup"]),
        "-" if same is None else f"{same:.0%}",
        cell(row["calibration_error"], 3),
    )


def _matrix(matrix: Mapping[str, Any]) -> str:
    drafts = list(next(iter(matrix.values())))
    rows = [(name, *(entry_text(own[draft]) for draft in drafts)) for name, own in matrix.items()]
    return markdown_table(("prompts", *drafts), rows)


def _members(arms: Mapping[str, Any]) -> list[str]:
    """Who guessed the accepted tokens; nothing where no draft has members."""
    members = sorted({member for row in arms.values() for member in row["members"]})
    if not members:
        return []
    rows = [
        (name, *(f"{row['members'].get(member, 0):,}" for member in members))
        for name, row in arms.items()
        if row["members"]
    ]
    return ["Accepted tokens by who guessed them:", markdown_table(("arm", *members), rows)]


def _reliability(arms: Mapping[str, Any]) -> list[str]:
    """A row per bin of confidence; nothing where no arm has a draft."""
    drafted = {n: row for n, row in arms.items() if row["calibration_error"] is not None}
    if not drafted:
        return []
    bins = zip(*(row["reliability"] for row in drafted.values()), strict=True)
    rows = [
        (f"{own[0]['from']:.1f} to {own[0]['to']:.1f}", *(_bin(one) for one in own)) for own in bins
    ]
    return [
        "Nodes of the trees by the draft's confidence: share accepted, of how many:",
        markdown_table(("confidence", *drafted), rows),
    ]


def _bin(row: Mapping[str, Any]) -> str:
    return f"{row['accepted']:.2f} of {row['count']:,}" if row["count"] else "-"
