"""`outrider bench kv`: how much of the KV memory is wasted."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from bench.provenance import provenance
from deployments.commands.bench_options import check_folder, write, write_json
from deployments.commands.options import count, natural

HELP = "how much of the KV memory is wasted, beside two other ways to keep it"
DESCRIPTION = (
    "Replay arrivals (many lengths, shared beginnings, clients that leave, trees of guesses) "
    "through our KV pool and scheduler, the same with as many pages again on the host, through "
    "plain paging without shared pages, and through room for the longest answer in one piece, "
    "each with the same memory and without a model. Prints waste (the share of held slots without "
    "a committed token), requests running and ended, prompt tokens that were there already, and "
    "the time that the books take. OUT holds the same numbers, their course over time, command, "
    "revision and machine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, kind, default, metavar, purpose in (
        ("--requests", count, 1500, "N", "how many arrive"),
        ("--rate", float, 3.0, "R", "arrivals in a step, on average"),
        ("--kv-tokens", count, 33280, "N", "tokens that each pool holds"),
        ("--page-size", count, 16, "N", "tokens of a page"),
        ("--max-tokens", count, 1024, "M", "longest answer that a client asks for, in tokens"),
        ("--seed", natural, 0, "S", "of the arrivals"),
    ):
        parser.add_argument(
            option,
            type=kind,
            default=default,
            metavar=metavar,
            help=f"{purpose} (default: %(default)s)",
        )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    parser.add_argument(
        "--report", type=Path, metavar="OUT.md", help="write the table in Markdown here"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="draw waste and running requests over time"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    from bench import kv
    from bench.kv_report import kv_report

    for option in ("json", "report", "plot"):
        check_folder(option, getattr(args, option))
    settings = kv.Settings(
        args.requests, args.rate, args.kv_tokens, args.page_size, args.max_tokens, args.seed
    )
    with tqdm(total=len(kv.WAYS) * settings.requests, unit="request") as bar:
        found = kv.measure(settings, bar.update)
    summary = found | {"run": provenance() | {"settings": asdict(settings)}}
    print(kv.table(summary))
    write_json(args.json, summary)
    write(args.report, lambda: kv_report(summary))
    if args.plot:
        from bench.kv_plot import plot  # imported late: matplotlib takes a second

        plot(summary, args.plot)
    return 0
