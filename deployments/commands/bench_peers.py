"""`outrider bench peers`: our arms beside transformers' and llama.cpp's own ways to decode."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from joblib import cpu_count

from bench.decode import PLAIN
from bench.report import peers_report
from deployments.commands.bench_options import write, write_json
from deployments.commands.bench_plan import Prompts, add_plan_options, load, plan_of, run_of
from deployments.pool import find_draft
from workers.engine.model_store import is_default, resolve

if TYPE_CHECKING:
    from bench.peers import Decoder

HELP = "our arms beside transformers' and llama.cpp's own ways to decode"
DESCRIPTION = (
    "Decode the same prompts with our arms and with transformers' generate, its prompt lookup, "
    "and its assisted generation, and with llama.cpp, plain and with prompt lookup, where "
    "outrider[llama] is installed and the target is a GGUF file: each in turn in one run, "
    "greedily. Prints a table in Markdown; OUT holds the same numbers with command, revision and "
    "machine. Times include prefill."
)

_LLAMA_MISSING = (
    "llama.cpp is left out: `pip install -e '.[llama]'` brings it (README, Measure it yourself, "
    "says with which CMAKE_ARGS)"
)
_LLAMA_UNFIT = "llama.cpp is left out: it reads GGUF files, and the target is none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser, arms=f"{PLAIN},ngram,hybrid")
    parser.add_argument(
        "--assistant",
        type=Path,
        metavar="DIR",
        help="an lm draft for transformers' assisted generation (default: layers of the default "
        "target, none for another)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    # Imported late: it brings transformers' generation along.
    from bench import llama_peers, peers

    plan = plan_of(args, matrix=False)
    theirs = _transformers(args)
    target, verifier = load(plan, args)
    prompts = plan.encode(target)
    llama = _llama(args, prompts, target.eos_token_ids)
    domains = {}
    with plan.progress() as bar:
        for domain, encoded in prompts.items():
            ours = peers.ours(verifier, plan.line_ups[domain].arms, args.budget)
            laps = peers.race({**theirs, **llama, **ours}, encoded, args.max_tokens, bar.update)
            domains[domain] = peers.summarise(laps)
    also = (llama_peers.PACKAGE,) if llama else ()
    summary = {"domains": domains, "run": run_of(args, plan, also)}
    tables = {domain: peers.table(own) for domain, own in domains.items()}
    for domain, text in tables.items():
        print(f"{domain}\n\n{text}\n")
    write_json(args.json, summary)
    write(args.report, lambda: peers_report(summary, tables))
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
