"""`outrider prepare-draft`: make a draft for a target and a domain, from prompts alone."""

import argparse
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import torch

from deployments.commands.options import (
    add_target_options,
    count,
    natural,
    target_spec,
    temperatures,
)
from deployments.draft_maker import EPOCHS, DraftMaker, MakerOptions
from deployments.prompt_file import read_prompts

_DESCRIPTION = """\
Make a draft for a target and a domain. The target answers the prompts of FILE, over and over with
the given temperatures in turn; the draft learns from what it said, is calibrated and measured on
prompts that were held out, and describes itself in its README.md. The same options and seed on the
same machine give the same draft, where --steps is given instead of --minutes.
"""
_KINDS = {
    "hybrid": "an n-gram table and an eagle draft, merged into one tree",
    "ngram": "a table of what the target said",
    "eagle": "one layer that reads the target's hidden states",
    "lm": "some of the target's layers, distilled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--kind",
        choices=list(_KINDS),
        default="hybrid",
        help="; ".join(f"{kind}: {what}" for kind, what in _KINDS.items()) + " (default: hybrid)",
    )
    parser.add_argument(
        "--domain",
        required=True,
        metavar="NAME",
        help="what the draft is for; the router knows code, math, en and zh",
    )
    parser.add_argument(
        "--prompts",
        required=True,
        type=Path,
        action="append",
        metavar="FILE",
        help='JSON lines with a "prompt"; may be given several times: the files take turns',
    )
    parser.add_argument(
        "--clauses",
        action="store_true",
        help="the target is also asked single clauses of the prompts, in turn with whole ones: "
        "what people type is often no more than a few words",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder that becomes the draft"
    )
    parser.add_argument(
        "--source",
        metavar="TEXT",
        help="where the prompts are from and their licence, for the card (default: FILE's name)",
    )
    _add_effort(parser)
    _add_answers(parser)
    _add_measuring(parser)
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help="of everything (default: %(default)s)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was interrupted"
    )
    add_target_options(parser)
    parser.set_defaults(func=run, device="cuda" if torch.cuda.is_available() else "cpu")


def _add_effort(parser: argparse.ArgumentParser) -> None:
    """How long it may take, and how much is learned."""
    parser.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="how long all of it may take, about (default: as long as tokens and steps need)",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=130_000,
        metavar="N",
        help="how much of what the target says is used, held-out answers included; a table learns "
        "from 55,000 already (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=count,
        metavar="N",
        help=f"batches to train on (default: what --minutes allow, else {EPOCHS} rounds)",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="DRAFT",
        help="an eagle or hybrid draft for the same target, whose neural part is trained further "
        "(default: start from the target's last layer)",
    )
    parser.add_argument(
        "--table-from",
        type=Path,
        action="append",
        default=[],
        metavar="DRAFT",
        help="an ngram or hybrid draft for the same target, whose table is learned beside the "
        "answers to FILE, but for answers that both have, and for those that begin as an answer "
        "to a prompt that is held out here; may be given several times",
    )
    parser.add_argument(
        "--vocab",
        type=count,
        default=4096,
        metavar="K",
        help="tokens that a trained draft can guess (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="L,L",
        help="of the target, that an lm draft starts from (default: its first and its last)",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    """How the target answers."""
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=160,
        metavar="M",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.8),
        metavar="T,T",
        help="of the answers, in turn; 0 is greedy (default: 0,0.8)",
    )
    parser.add_argument(
        "--together",
        type=count,
        default=32,
        metavar="N",
        help="answers at a time; more are faster and take more memory (default: %(default)s)",
    )


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    """What the card's numbers are measured on."""
    parser.add_argument(
        "--measure-on",
        type=Path,
        metavar="FILE",
        help="prompts to measure on (default: those held out of --prompts, kept as held_out.jsonl)",
    )
    parser.add_argument(
        "--measure-limit",
        type=count,
        default=8,
        metavar="N",
        help="how many of them (default: %(default)s)",
    )


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < minutes < float("inf"):
        raise ArgumentTypeError(f"{text} is not more than 0")
    return minutes


def _layers(text: str) -> tuple[int, ...]:
    return tuple(natural(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for prompts or options that cannot be used."""
    measured = read_prompts(args.measure_on).prompts if args.measure_on else None
    options = MakerOptions(
        target=target_spec(args),
        kind=args.kind,
        domain=args.domain,
        out=args.out,
        prompts=tuple(read_prompts(path).prompts for path in args.prompts),
        clauses=args.clauses,
        measured=measured,
        measured_limit=args.measure_limit,
        source=args.source or ", ".join(path.name for path in args.prompts),
        tokens=args.tokens,
        steps=args.steps,
        start_from=args.start_from,
        table_from=tuple(args.table_from),
        minutes=args.minutes,
        vocab=args.vocab,
        layers=args.layers or (),
        max_tokens=args.max_tokens,
        temperatures=args.temperatures,
        together=args.together,
        seed=args.seed,
    )
    maker = DraftMaker(options)
    try:
        maker.run(resume=args.resume)
    except KeyboardInterrupt:
        print("outrider: what was done is kept; go on with --resume", file=sys.stderr)
        raise
    facts = maker.facts
    print(f"{args.out}: {facts['tokens']:,} tokens of {facts['answers']:,} answers")
    for temperature, arms in facts["measured"].items():
        for name, row in arms.items():
            print(f"temperature {temperature}, {name}: tau {row['tau']:.2f}")
    return 0
