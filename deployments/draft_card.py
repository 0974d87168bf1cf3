"""The card of a draft: what it was made of and how good it is, for people and for programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.decode import cell
from workers.draft import DraftKind

CARD, README = "card.json", "README.md"


def write_card(folder: Path, kind: DraftKind, card: Mapping[str, Any]) -> None:
    """Both forms, into the draft's folder."""
    text = json.dumps(card, indent=1, ensure_ascii=False)
    (folder / CARD).write_text(text + "\n", encoding="utf-8")
    (folder / README).write_text(_readme(kind, card), encoding="utf-8")


def _readme(kind: DraftKind, card: Mapping[str, Any]) -> str:
    target, run = card["target"], card["run"]
    parts = [
        f"# A draft for {card['domain']} ({kind})",
        f"For the target {target['name']} ({target['layers']} layers of {target['hidden_size']}, "
        f"weights {target['weights']}); any other is refused.",
        f"Made from prompts of: {card['prompts']}" + _clauses(card),
        f"The target ({card['dtype']}) answered {card['answers']:,} prompts with "
        f"{card['tokens']:,} tokens, at temperatures {', '.join(map(str, card['temperatures']))}, "
        f"at most {card['max_tokens']} each; {card['held_out_tokens']:,} more were held out.",
        _table(card) if "table_tokens" in card else "",
        _training(card) if "steps" in card else "",
        _measured(card),
        f"Command: `{run['command']}`\n\nRevision {run['revision']}, {run['date']}, "
        f"{run['machine']}, torch {run['versions']['torch']}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _clauses(card: Mapping[str, Any]) -> str:
    return ", whole and by single clauses." if card["clauses"] else "."


def _table(card: Mapping[str, Any]) -> str:
    others = ", ".join(
        f"{folder} (made from prompts of: {prompts})"
        for folder, prompts in card["table_from"].items()
    )
    also = f", those of {others} among them" if others else ""
    return f"## Table\n\n{card['table_tokens']:,} tokens{also}."


def _training(card: Mapping[str, Any]) -> str:
    hits = " ".join(f"{hit:.3f}" for hit in card["hits"])
    losses = " ".join(f"{loss:.2f}" for loss in card["losses"])
    began = f", begun with the weights of {card['start_from']}" if card["start_from"] else ""
    steps = "1 step" if card["steps"] == 1 else f"{card['steps']:,} steps"
    return (
        f"## Training\n\n{steps}{began}; {card['vocabulary']:,} tokens that it can guess. Loss by "
        f"twentieth of the training: {losses}.\n\n"
        "On held-out answers, the share of guesses that are the target's likeliest token, by how "
        f"far ahead: {hits}; among three: {card['top3']:.3f}; overlap with the target's law at "
        f"temperature 1: {card['alpha']:.3f}."
    )


def _measured(card: Mapping[str, Any]) -> str:
    lines = [
        f"## Measured\n\nPrompts: {card['measured_prompts']}, {card['measured_tokens']} new tokens "
        "each, trees of at most 32 nodes; tau is tokens per pass of the target.\n",
        "| temperature | member | tau | alpha | calibration error |",
        "|---|---|---|---|---|",
    ]
    for temperature, arms in card["measured"].items():
        for name, row in arms.items():
            lines.append(
                f"| {temperature} | {name} | {row['tau']:.2f} | {cell(row['alpha'])} "
                f"| {cell(row['calibration_error'], 3)} |"
            )
    return "\n".join(lines)
