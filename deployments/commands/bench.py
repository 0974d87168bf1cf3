"""`outrider bench`: measure on this machine, side by side in one run."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from joblib import cpu_count
from tqdm import tqdm

from bench.arms import LineUp, all_drafts, check_unique
from bench.decode import PLAIN, Results, Settings, measure, summarise, table
from bench.matrix import matrix_of, matrix_table
from bench.provenance import provenance
from bench.reliability import Witness
from bench.report import decode_report, peers_report
from deployments.commands.options import (
    TARGET_OPTIONS,
    add_budget_option,
    add_target_options,
    add_temperature_option,
    count,
    counts,
    natural,
    rates,
    target_spec,
    temperatures,
)
from deployments.pool import find_draft, open_verifier, verifier_over
from deployments.prompt_file import PromptFile, chat_ids, read_prompts
from workers.draft import feature_layers_of
from workers.engine.model_store import is_default, resolve
from workers.scheduler import Limits
from workers.target import Target, load_target
from workers.verifier import OnVerdict, Verifier

if TYPE_CHECKING:
    from bench.load import Level, Question, Server
    from bench.load_servers import InProcess
    from bench.peers import Decoder

Prompts = Mapping[str, Sequence[tuple[int, ...]]]
"""Token ids by domain."""

_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_AUTO = "auto"

_LLAMA_MISSING = (
    "llama.cpp is left out: `pip install -e '.[llama]'` brings it (README, Measure it yourself, "
    "says with which CMAKE_ARGS)"
)
_LLAMA_UNFIT = "llama.cpp is left out: it reads GGUF files, and the target is none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    _add_decode(
        kinds.add_parser(
            "decode",
            help="tokens per second, tau, alpha and calibration of drafts against plain decoding",
            description="Decode the same prompts with each arm in turn, one request at a time, at "
            "each temperature. Prints a table per temperature: tau is tokens per pass of the "
            "target, alpha the share of right guesses, same the share of texts equal to plain's, "
            "ece the calibration error: how far, on average over all nodes, the draft's "
            "confidence in a node is from the share accepted. OUT holds the same numbers by "
            "temperature, and in it under arms and domains, with the bins of the calibration, the "
            "accepted tokens by the draft's member that guessed them, command, revision and "
            "machine. Times include prefill.",
        )
    )
    _add_peers(
        kinds.add_parser(
            "peers",
            help="our arms beside transformers' and llama.cpp's own ways to decode",
            description="Decode the same prompts with our arms and with transformers' generate, "
            "its prompt lookup, and its assisted generation, and with llama.cpp, plain and with "
            "prompt lookup, where outrider[llama] is installed and the target is a GGUF file: "
            "each in turn in one run, greedily. Prints a table in Markdown; OUT holds the same "
            "numbers with command, revision and machine. Times include prefill.",
        )
    )
    _add_load(
        kinds.add_parser(
            "load",
            help="many requests at once, in this process or over HTTP: latencies and throughput",
            description="Send the same requests to each arm in turn, one load after the other: a "
            "closed loop keeps C requests open (--concurrency), an open loop sends R a second on "
            "average, at random moments, whoever still waits (--rates). Prints a line for each "
            "load and arm: requests done and lost (refused or failed; the reasons follow), tokens "
            "per second of the whole; the 50th, 95th and 99th percentile of the time to the first "
            "text, per token after it, and to the end, each from when a request was due; tau, "
            "tokens per pass of the target; and in this process the most KV pages in use and the "
            "shares of the time that steps took for drafts and for the rest. same is the share "
            "of texts equal to plain's. OUT holds the same numbers in seconds, with command, "
            "revision and machine.",
        )
    )
    _add_kv(
        kinds.add_parser(
            "kv",
            help="how much of the KV memory is wasted, beside two other ways to keep it",
            description="Replay arrivals (many lengths, shared beginnings, clients that leave, "
            "trees of guesses) through our KV pool and scheduler, through plain paging without "
            "shared pages, and through room for the longest answer in one piece, each with the "
            "same memory and without a model. Prints waste (the share of held slots without a "
            "committed token), requests running and ended, prompt tokens that were there already, "
            "and the time that the books take. OUT holds the same numbers, their course over time, "
            "command, revision and machine.",
        )
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, arms=f"{PLAIN},chain,ngram,eagle,hybrid")
    parser.add_argument(
        "--temperatures",
        type=temperatures,
        default=(0.0, 0.8),
        metavar="T,T",
        help="one after the other; 0 is greedy (default: 0,0.8)",
    )
    _add_seed_option(parser, "of the first prompt, the next one has S + 1")
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="also decode with the shipped draft of every domain; prints tau and speed-up by "
        "prompts and draft",
    )
    _add_plot_option(parser, "tau, tokens/s, calibration and the matrix")
    parser.set_defaults(func=run_decode)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, arms=f"{PLAIN},ngram,hybrid")
    parser.add_argument(
        "--assistant",
        type=Path,
        metavar="DIR",
        help="an lm draft for transformers' assisted generation (default: layers of the default "
        "target, none for another)",
    )
    parser.set_defaults(func=run_peers)


def _add_load(parser: argparse.ArgumentParser) -> None:
    _add_prompt_options(parser)
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
    _add_seed_option(parser, "of the first request and of the arrivals; the next one has S + 1")
    parser.add_argument(
        "--arms",
        default=f"{PLAIN},{_AUTO}",
        metavar="A,B",
        help=f"{PLAIN}; {_AUTO}: the shipped draft of the file's domain, or with --url whichever "
        "the server's router chooses; or what bench decode takes, with --url a draft of the "
        "server's (default: %(default)s)",
    )
    _add_result_options(parser)
    _add_plot_option(parser, "throughput and latencies by load")
    parser.set_defaults(
        func=run_load,
        target_defaults={name: parser.get_default(name) for name in TARGET_OPTIONS},
    )


def _add_kv(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(func=run_kv)


def _add_common(parser: argparse.ArgumentParser, *, arms: str) -> None:
    _add_prompt_options(parser)
    parser.add_argument(
        "--arms",
        default=arms,
        metavar="A,B",
        help=f"{PLAIN}, pool members (code, math, en, zh, lm), kinds (hybrid: the draft of the "
        "file's domain, or code's where there is none; chain: that draft without branches; ngram, "
        "eagle: one of its members) or draft folders (default: %(default)s)",
    )
    _add_result_options(parser)


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
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


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    """--budget, --json, --report, and the target's."""
    add_budget_option(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    parser.add_argument(
        "--report", type=Path, metavar="OUT.md", help="write all of it in Markdown here"
    )
    add_target_options(parser)


def _add_seed_option(parser: argparse.ArgumentParser, whose: str) -> None:
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="S", help=f"{whose} (default: %(default)s)"
    )


def _add_plot_option(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help=f"draw {what} here")


# -- decode ----------------------------------------------------------------------------------------


def run_decode(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    plan = _plan(args, matrix=args.matrix)
    _check_folder("plot", args.plot)
    witness = Witness()
    target, verifier = _load(plan, args, witness)
    prompts = plan.encode(target)
    found = {}
    with plan.progress(rounds=len(args.temperatures)) as bar:
        for temperature in args.temperatures:
            results = measure(
                verifier,
                prompts,
                {domain: line_up.arms for domain, line_up in plan.line_ups.items()},
                Settings(args.max_tokens, args.budget, temperature, args.seed),
                bar.update,
                witness,
            )
            found[str(temperature)] = _summary(plan, results)
    summary = {"temperatures": found, "run": _run(args, plan)}
    for temperature_name, own in found.items():
        print(f"temperature {temperature_name}\n\n{_tables(own)}\n")
    _write_json(args.json, summary)
    _write(args.report, lambda: decode_report(summary))
    if args.plot:
        from bench.plot import plot  # imported late: matplotlib takes a second

        plot(summary, args.plot)
    return 0


def _summary(plan: "_Plan", results: Results) -> dict[str, Any]:
    """The arms' numbers, without those of drafts that only the matrix asks for, and the matrix."""
    asked = {
        domain: {name: results[domain][name] for name in line_up.asked}
        for domain, line_up in plan.line_ups.items()
    }
    columns = {domain: line_up.columns for domain, line_up in plan.line_ups.items()}
    matrix = {"matrix": matrix_of(results, columns)} if any(columns.values()) else {}
    return summarise(asked) | matrix


def _tables(found: Mapping[str, Any]) -> str:
    tables = [table(found)]
    if "matrix" in found:
        tables += ["draft by draft: tau (speed-up)", matrix_table(found["matrix"])]
    return "\n\n".join(tables)


# -- peers -----------------------------------------------------------------------------------------


def run_peers(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    # Imported late: it brings transformers' generation along.
    from bench import llama_peers, peers

    plan = _plan(args, matrix=False)
    theirs = _transformers(args)
    target, verifier = _load(plan, args)
    prompts = plan.encode(target)
    llama = _llama(args, prompts, target.eos_token_ids)
    domains = {}
    with plan.progress() as bar:
        for domain, encoded in prompts.items():
            ours = peers.ours(verifier, plan.line_ups[domain].arms, args.budget)
            laps = peers.race({**theirs, **llama, **ours}, encoded, args.max_tokens, bar.update)
            domains[domain] = peers.summarise(laps)
    also = (llama_peers.PACKAGE,) if llama else ()
    summary = {"domains": domains, "run": _run(args, plan, also)}
    tables = {domain: peers.table(own) for domain, own in domains.items()}
    for domain, text in tables.items():
        print(f"{domain}\n\n{text}\n")
    _write_json(args.json, summary)
    _write(args.report, lambda: peers_report(summary, tables))
    return 0


def _transformers(args: argparse.Namespace) -> "dict[str, Decoder]":
    from bench import peers

    folder = resolve(args.target)
    assistant = None
    if args.assistant:
        assistant = peers.load_assistant(args.assistant, folder, args.dtype)
    elif layers := _assistant_layers(args.target):
        assistant = peers.layers_of(folder, args.dtype, layers)
    return peers.transformers_peers(folder, args.dtype, assistant)


def _assistant_layers(target: str) -> tuple[int, ...]:
    """Those of the default pool's lm draft, which are layers of the default target."""
    return find_draft("lm", target=target).layers if is_default(target) else ()


def _llama(args: argparse.Namespace, prompts: Prompts, eos: frozenset[int]) -> "dict[str, Decoder]":
    """llama.cpp's ways, where they can be had; else one line says why not."""
    from bench import llama_peers

    gguf = llama_peers.gguf_of(args.target)
    if gguf is None or not llama_peers.installed():
        print(_LLAMA_UNFIT if gguf is None else _LLAMA_MISSING, file=sys.stderr)
        return {}
    longest = max(len(ids) for own in prompts.values() for ids in own)
    return llama_peers.llama_peers(
        gguf, longest + args.max_tokens, threads=args.threads or cpu_count(), eos=eos
    )


# -- load ------------------------------------------------------------------------------------------


def run_load(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    # Imported late: only this one talks HTTP.
    from bench import load, load_report

    files = _files(args)
    arms = args.arms.split(",")
    check_unique("arms: two are called", arms)
    _check_folder("plot", args.plot)
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
    summary = {"levels": found, "run": _load_run(args, files, facts)}
    _write_json(args.json, summary)
    _write(args.report, lambda: load_report.load_report(summary))
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


def _load_run(
    args: argparse.Namespace, files: Sequence[PromptFile], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Where the numbers come from; facts: of the server."""
    names = ("budget", "temperature", "seed", "max_tokens", "requests")
    prompts = {file.domain: len(file.prompts) for file in files}
    settings = {name: getattr(args, name) for name in names}
    return provenance() | {"settings": {**facts, **settings, "prompts": prompts}}


# -- kv --------------------------------------------------------------------------------------------


def run_kv(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    from bench import kv
    from bench.kv_report import kv_report

    for option in ("json", "report", "plot"):
        _check_folder(option, getattr(args, option))
    settings = kv.Settings(
        args.requests, args.rate, args.kv_tokens, args.page_size, args.max_tokens, args.seed
    )
    with tqdm(total=len(kv.WAYS) * settings.requests, unit="request") as bar:
        found = kv.measure(settings, bar.update)
    summary = found | {"run": provenance() | {"settings": asdict(settings)}}
    print(kv.table(summary))
    _write_json(args.json, summary)
    _write(args.report, lambda: kv_report(summary))
    if args.plot:
        from bench.kv_plot import plot  # imported late: matplotlib takes a second

        plot(summary, args.plot)
    return 0


# -- all -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
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


def _plan(args: argparse.Namespace, *, matrix: bool) -> _Plan:
    files = _files(args)
    names = args.arms.split(",")
    check_unique("arms: two are called", names)
    line_ups = {f.domain: LineUp.of(names, f.domain, args.target, matrix=matrix) for f in files}
    return _Plan(files, line_ups)


def _files(args: argparse.Namespace) -> list[PromptFile]:
    """The prompt files, once it is known that there is a place for what will be written."""
    files = [read_prompts(path, args.limit) for path in args.prompts]
    check_unique("prompts: two files are called", [file.domain for file in files])
    _check_folder("json", args.json)
    _check_folder("report", args.report)
    return files


def _check_folder(option: str, path: Path | None) -> None:
    if path and not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent}")


def _load(
    plan: _Plan, args: argparse.Namespace, on_verdict: OnVerdict | None = None
) -> tuple[Target, Verifier]:
    """The target, and a verifier with every draft that some arm uses."""
    specs = all_drafts(list(plan.line_ups.values()))
    return open_verifier(target_spec(args), specs, on_verdict)


def _run(args: argparse.Namespace, plan: _Plan, also: Sequence[str] = ()) -> dict[str, Any]:
    """Where the numbers come from; settings are told that were not given, too. also: packages that
    had a part in it.
    """
    names = ("target", "dtype", "device", "budget", "max_tokens")
    prompts = {file.domain: len(file.prompts) for file in plan.files}
    return provenance(also) | {
        "settings": {name: getattr(args, name) for name in names} | {"prompts": prompts}
    }


def _write_json(path: Path | None, summary: Mapping[str, Any]) -> None:
    _write(path, lambda: json.dumps(summary, indent=2) + "\n")


def _write(path: Path | None, text: Callable[[], str]) -> None:
    if path:
        path.write_text(text(), encoding="utf-8")
