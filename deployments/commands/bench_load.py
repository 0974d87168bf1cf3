"""`outrider bench load`: latencies and throughput with many requests at once."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from bench.arms import LineUp, all_drafts, check_unique
from bench.decode import PLAIN
from bench.provenance import provenance
from deployments.commands.bench_options import (
    add_plot_option,
    add_prompt_options,
    add_result_options,
    add_seed_option,
    check_folder,
    prompt_files,
    write,
    write_json,
)
from deployments.commands.options import (
    TARGET_OPTIONS,
    add_temperature_option,
    count,
    counts,
    rates,
    target_spec,
)
from deployments.pool import verifier_over
from deployments.prompt_file import PromptFile, chat_ids
from workers.load_draft import feature_layers_of
from workers.scheduler import Limits
from workers.target import load_target

if TYPE_CHECKING:
    from bench.load import Level, Question, Server
    from bench.load_servers import InProcess

HELP = "many requests at once, in this process or over HTTP: latencies and throughput"
DESCRIPTION = (
    "Send the same requests to each arm in turn, one load after the other: a closed loop keeps C "
    "requests open (--concurrency), an open loop sends R a second on average, at random moments, "
    "whoever still waits (--rates). Prints a line for each load and arm: requests done and lost "
    "(refused or failed; the reasons follow), tokens per second of the whole; the 50th, 95th and "
    "99th percentile of the time to the first text, per token after it, and to the end, each from "
    "when a request was due; tau, tokens per pass of the target; and in this process the most KV "
    "pages in use and the shares of the time that steps took for drafts and for the rest. same is "
    "the share of texts equal to plain's. OUT holds the same numbers in seconds, with command, "
    "revision and machine."
)

_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_options(parser)
    parser.add_argument(
        "--url",
        metavar="URL",
        help="of a server, before /v1 (default: a verifier in this process)",
    )
    parser.add_argument(
        "--concurrency",
        type=counts,
        metavar="C,C",
        help="requests open at once, one load after the other (default: "
        f"{','.join(map(str, _CONCURRENCY))}, or none where there are rates)",
    )
    parser.add_argument(
        "--rates",
        type=rates,
        default=(),
        metavar="R,R",
        help="requests per second, one load after the other (default: none)",
    )
    parser.add_argument(
        "--requests",
        type=count,
        default=64,
        metavar="N",
        help="for each load and arm; prompts are used again when there are fewer (default: "
        "%(default)s)",
    )
    add_temperature_option(parser)
    add_seed_option(parser, "of the first request and of the arrivals; the next one has S + 1")
    parser.add_argument(
        "--arms",
        default=f"{PLAIN},{_AUTO}",
        metavar="A,B",
        help=f"{PLAIN}; {_AUTO}: the shipped draft of the file's domain, or with --url whichever "
        "the server's router chooses; or what bench decode takes, with --url a draft of the "
        "server's (default: %(default)s)",
    )
    add_result_options(parser)
    add_plot_option(parser, "throughput and latencies by load")
    parser.set_defaults(
        func=run,
        target_defaults={name: parser.get_default(name) for name in TARGET_OPTIONS},
    )


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    # Imported late: only this one talks HTTP.
    from bench import load, load_report

    files = prompt_files(args)
    arms = args.arms.split(",")
    check_unique("arms: two are called", arms)
    check_folder("plot", args.plot)
    levels = _levels(args)
    questions = load.questions_of(files, args.requests, seed=args.seed, max_tokens=args.max_tokens)
    server, facts = _over_http(args) if args.url else _in_process(args, arms, files, questions)
    with tqdm(total=len(levels) * len(arms) * len(questions), unit="request") as bar:
        found = asyncio.run(
            load.measure(
                server,
                questions,
                arms,
                levels,
                on_ready=lambda: bar.write(load_report.table_head()),
                on_question=bar.update,
                on_level=lambda level: bar.write(load_report.level_lines(level)),
            )
        )
    summary = {"levels": found, "run": _run_of(args, files, facts)}
    write_json(args.json, summary)
    write(args.report, lambda: load_report.load_report(summary))
    if args.plot:
        from bench.load_plot import plot_load  # imported late: matplotlib takes a second

        plot_load(summary, args.plot)
    return 0


def _levels(args: argparse.Namespace) -> "list[Level]":
    from bench.load import Closed, Open

    closed = _concurrency(args)
    if closed and max(closed) > args.requests:
        raise ValueError(
            f"requests: {args.requests} cannot keep {max(closed)} open; give more, or less "
            "--concurrency"
        )
    return [*map(Closed, closed), *(Open(rate, args.seed) for rate in args.rates)]


def _concurrency(args: argparse.Namespace) -> tuple[int, ...]:
    if args.concurrency is None:
        return () if args.rates else _CONCURRENCY
    found: tuple[int, ...] = args.concurrency
    return found


def _over_http(args: argparse.Namespace) -> "tuple[Server, dict[str, Any]]":
    """A server, and what is known of it."""
    from bench.load_servers import OverHttp, served_model

    for name, default in args.target_defaults.items():
        if getattr(args, name) != default:
            raise ValueError(f"{name}: the server at --url has its target already; leave it out")
    facts = dict.fromkeys(("dtype", "device", "max_running"))
    facts |= {"url": args.url, "target": served_model(args.url)}
    return OverHttp(args.url, args.budget, args.temperature), facts


def _in_process(
    args: argparse.Namespace,
    arms: Sequence[str],
    files: Sequence[PromptFile],
    questions: "Sequence[Question]",
) -> "tuple[Server, dict[str, Any]]":
    """A verifier whose loop runs, and how it is set up.

    It is loaded in a thread that ends with it. OpenMP keeps a team of threads for every thread that
    ever computed; where they outnumber the cores, the loop's passes take two to three times as
    long.
    """
    limits = Limits(
        max_running=max(Limits().max_running, *_concurrency(args), 1),
        max_queued=len(questions),
    )
    with ThreadPoolExecutor(1) as once:
        server = once.submit(_start, args, arms, files, limits).result()
    facts = {name: getattr(args, name) for name in ("target", "dtype", "device")}
    return server, facts | {"max_running": limits.max_running, "url": None}


def _start(
    args: argparse.Namespace, arms: Sequence[str], files: Sequence[PromptFile], limits: Limits
) -> "InProcess":
    from bench.load_servers import InProcess, MostPages

    # What auto stands for here; the router is the server's.
    names = ["hybrid" if arm == _AUTO else arm for arm in arms]
    check_unique("arms: two stand for", names)
    line_ups = {f.domain: LineUp.of(names, f.domain, args.target, matrix=False) for f in files}
    spec, drafts = target_spec(args), all_drafts(list(line_ups.values()))
    target = load_target(replace(spec, feature_layers=feature_layers_of(drafts)))
    pages = MostPages(target.pool)
    verifier = verifier_over(target, spec, drafts, pages, limits)
    verifier.start()
    return InProcess(
        verifier,
        pages,
        {domain: dict(zip(arms, own.arms, strict=True)) for domain, own in line_ups.items()},
        {p: chat_ids(target.tokenizer, p) for file in files for p in file.prompts},
        args.budget,
        args.temperature,
    )


def _run_of(
    args: argparse.Namespace, files: Sequence[PromptFile], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the numbers come from; facts: of the server."""
    names = ("budget", "temperature", "seed", "max_tokens", "requests")
    prompts = {file.domain: len(file.prompts) for file in files}
    settings = {name: getattr(args, name) for name in names}
    return provenance() | {"settings": {**facts, **settings, "prompts": prompts}}
