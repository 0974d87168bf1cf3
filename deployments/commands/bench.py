"""`outrider bench`: measure on this machine, side by side in one run."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    add_budget_option,
    add_target_options,
    count,
    natural,
    target_spec,
    temperatures,
)
from deployments.pool import find_draft, open_verifier
from deployments.prompt_file import PromptFile, chat_ids, read_prompts
from workers.engine.model_store import is_default, resolve
from workers.target import Target
from workers.verifier import OnVerdict, Verifier

if TYPE_CHECKING:
    from bench.peers import Decoder

Prompts = Mapping[str, Sequence[tuple[int, ...]]]
"""Token ids by domain."""

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
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="S",
        help="of the first prompt, the next one has S + 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="also decode with the shipped draft of every domain; prints tau and speed-up by "
        "prompts and draft",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="OUT.png",
        help="draw tau, tokens/s, calibration and the matrix here",
    )
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
    parser.add_argument(
        "--arms",
        default=arms,
        metavar="A,B",
        help=f"{PLAIN}, pool members (code, math, en, zh, lm), kinds (hybrid: the draft of the "
        "file's domain, or code's where there is none; chain: that draft without branches; ngram, "
        "eagle: one of its members) or draft folders (default: %(default)s)",
    )
    add_budget_option(parser)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    parser.add_argument(
        "--report", type=Path, metavar="OUT.md", help="write all of it in Markdown here"
    )
    add_target_options(parser)


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


# -- both ------------------------------------------------------------------------------------------


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
    files = [read_prompts(path, args.limit) for path in args.prompts]
    domains = [file.domain for file in files]
    check_unique("prompts: two files are called", domains)
    names = args.arms.split(",")
    check_unique("arms: two are called", names)
    _check_folder("json", args.json)
    _check_folder("report", args.report)
    return _Plan(files, {d: LineUp.of(names, d, args.target, matrix=matrix) for d in domains})


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
