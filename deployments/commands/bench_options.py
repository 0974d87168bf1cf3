"""Options that `outrider bench` has more than once, and where its results go."""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.arms import check_unique
from deployments.commands.options import add_budget_option, add_target_options, count, natural
from deployments.prompt_file import PromptFile, read_prompts


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """--prompts, --limit and --max-tokens."""
    parser.add_argument(
        "--prompts",
        required=True,
        action="append",
        type=Path,
        metavar="FILE",
        help='JSON lines with a "prompt"; may be given several times; a domain is a file\'s stem',
    )
    parser.add_argument("--limit", type=count, metavar="N", help="prompts per file (default: all)")
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=128,
        metavar="M",
        help="longest answer, in tokens (default: %(default)s)",
    )


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """--budget, --json, --report, and the target's."""
    add_budget_option(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    parser.add_argument(
        "--report", type=Path, metavar="OUT.md", help="write all of it in Markdown here"
    )
    add_target_options(parser)


def add_seed_option(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help=f"{whose} (default: %(default)s)"
    )


def add_plot_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help=f"draw {what} here")


def prompt_files(args: argparse.Namespace) -> list[PromptFile]:
    """The prompt files, once it is known that there is a place for what will be written."""
    files = [read_prompts(path, args.limit) for path in args.prompts]
    check_unique("prompts: two files are called", [file.domain for file in files])
    check_folder("json", args.json)
    check_folder("report", args.report)
    return files


def check_folder(option: str, path: Path | None) -> None:
    if path and not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")


def write_json(path: Path | None, summary: Mapping[str, Any]) -> None:
    write(path, lambda: json.dumps(summary, indent=2) + "\n")


def write(path: Path | None, text: Callable[[], str]) -> None:
    if path:
        path.write_text(text(), encoding="utf-8")
