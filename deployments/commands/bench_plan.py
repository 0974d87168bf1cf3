"""Prompts, and what decodes them in this process: for `bench decode` and `bench peers`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tqdm import tqdm

from bench.arms import LineUp, all_drafts, check_unique
from bench.decode import PLAIN
from bench.provenance import provenance
from deployments.commands.bench_options import (
    add_prompt_options,
    add_result_options,
    prompt_files,
)
from deployments.commands.options import target_spec
from deployments.pool import open_verifier
from deployments.prompt_file import PromptFile, chat_ids
from workers.target import Target
from workers.verifier import OnVerdict, Verifier

Prompts = Mapping[str, Sequence[tuple[int, ...]]]
"""Token ids by domain."""


def add_plan_options(parser: argparse.ArgumentParser, *, arms: str) -> None:
    add_prompt_options(parser)
    parser.add_argument(
        "--arms",
        default=arms,
        metavar="A,B",
        help=f"{PLAIN}, pool members (code, math, en, zh, lm), kinds (hybrid: the draft of the "
        "file's domain, or code's where there is none; chain: that draft without branches; ngram, "
        "eagle: one of its members) or draft folders (default: %(default)s)",
    )
    add_result_options(parser)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the options ask for: prompt files, and by domain what decodes them."""

    files: Sequence[PromptFile]
    line_ups: Mapping[str, LineUp]

    def progress(self, rounds: int = 1) -> "tqdm[NoReturn]":
        return tqdm(total=rounds * sum(len(file.prompts) for file in self.files), unit="prompt")

    def encode(self, target: Target) -> Prompts:
        return {
            file.domain: [chat_ids(target.tokenizer, prompt) for prompt in file.prompts]
            for file in self.files
        }


def plan_of(args: argparse.Namespace, *, matrix: bool) -> Plan:
    files = prompt_files(args)
    names = args.arms.split(",")
    check_unique("arms: two are called", names)
    line_ups = {f.domain: LineUp.of(names, f.domain, args.target, matrix=matrix) for f in files}
    return Plan(files, line_ups)


def load(
    plan: Plan, args: argparse.Namespace, on_verdict: OnVerdict | None = None
) -> tuple[Target, Verifier]:
    """The target, and a verifier with every draft that some arm uses."""
    specs = all_drafts(list(plan.line_ups.values()))
    return open_verifier(target_spec(args), specs, on_verdict)


def run_of(args: argparse.Namespace, plan: Plan, also: Sequence[str] = ()) -> dict[str, Any]:
    """Where the numbers come from; settings are told that were not given, too. also: packages that
    had a part in it.
    """
    names = ("target", "dtype", "device", "budget", "max_tokens")
    prompts = {file.domain: len(file.prompts) for file in plan.files}
    return provenance(also) | {
        "settings": {name: getattr(args, name) for name in names} | {"prompts": prompts}
    }
