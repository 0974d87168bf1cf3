"""`outrider bench`: measure on this machine, side by side in one run."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from joblib import cpu_count
from tqdm import tqdm

from bench.decode import PLAIN, Arm, Settings, measure, summarise, table
from bench.provenance import provenance
from deployments.commands.options import add_target_options, count, target_spec
from deployments.pool import find_draft
from deployments.prompt_file import PromptFile, chat_ids, read_prompts
from workers.draft import DraftSpec, InlineDraft, load_draft
from workers.engine.model_store import is_default, resolve
from workers.scheduler import Limits
from workers.target import Target, load_target
from workers.verifier import build_verifier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    decode = kinds.add_parser(
        "decode",
        help="tokens per second, tau and alpha of drafts against plain decoding",
        description="Decode the same prompts with each arm in turn, one request at a time. "
        "Prints a table; OUT holds the same numbers under arms and domains, with command, "
        "revision and machine. Times include prefill.",
    )
    _add_common(decode)
    decode.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    decode.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the first prompt, the next one has S + 1 (default: %(default)s)",
    )
    decode.set_defaults(func=run_decode)
    peers = kinds.add_parser(
        "peers",
        help="our arms beside transformers' own ways to decode",
        description="Decode the same prompts with our arms and with transformers' generate, its "
        "prompt lookup, and its assisted generation with the lm draft, each in turn in one run, "
        "greedily. Prints a table in Markdown; OUT holds the same numbers with command, revision "
        "and machine. Times include prefill.",
    )
    _add_common(peers)
    peers.set_defaults(func=run_peers)


def _add_common(parser: argparse.ArgumentParser) -> None:
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
        default=f"{PLAIN},ngram",
        metavar="A,B",
        help=f"{PLAIN}, pool members (code, math, en, zh, lm), kinds (ngram: the table of the "
        "file's domain; lm) or draft folders (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        type=int,
        default=8,
        metavar="N",
        help="nodes of the token tree per step (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    add_target_options(parser)


def run_decode(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    plan = _plan(args)
    target = load_target(target_spec(args))
    settings = Settings(args.max_tokens, args.budget, args.temperature, args.seed)
    with plan.progress() as bar:
        results = measure(
            build_verifier(target, _load(plan.specs, args), Limits(max_running=1)),
            {file.domain: _encode(target, file) for file in plan.files},
            {domain: _arms(own) for domain, own in plan.specs.items()},
            settings,
            on_prompt=bar.update,
        )
    summary = summarise(results)
    print(table(summary))
    _write(args.json, summary)
    return 0


def run_peers(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    # Imported late: it brings transformers' generation along.
    from bench import peers

    plan = _plan(args)
    target = load_target(target_spec(args))
    verifier = build_verifier(target, _load(plan.specs, args), Limits(max_running=1))
    theirs = peers.transformers_peers(
        resolve(args.target), args.dtype, _assistant_layers(args.target)
    )
    domains = {}
    with plan.progress() as bar:
        for file in plan.files:
            decoders = peers.ours(verifier, _arms(plan.specs[file.domain]), args.budget)
            laps = peers.race(
                {**theirs, **decoders}, _encode(target, file), args.max_tokens, bar.update
            )
            domains[file.domain] = peers.summarise(laps)
    for domain, summary in domains.items():
        print(f"{domain}\n\n{peers.table(summary)}\n")
    _write(args.json, {"domains": domains})
    return 0


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the options ask for: prompt files, and by domain the arms' names and drafts."""

    files: Sequence[PromptFile]
    specs: Mapping[str, Sequence[tuple[str, DraftSpec | None]]]

    def progress(self) -> "tqdm[NoReturn]":
        return tqdm(total=sum(len(file.prompts) for file in self.files), unit="prompt")


def _plan(args: argparse.Namespace) -> _Plan:
    files = [read_prompts(path, args.limit) for path in args.prompts]
    _check_unique("prompts: two files are called", [file.domain for file in files])
    names = args.arms.split(",")
    _check_unique("arms: two are called", names)
    if args.json and not args.json.parent.is_dir():
        raise ValueError(f"json: there is no folder {args.json.parent}")
    return _Plan(files, {file.domain: _specs(names, file.domain, args.target) for file in files})


def _write(path: Path | None, summary: Mapping[str, Any]) -> None:
    if path:
        path.write_text(json.dumps({**summary, "run": provenance()}, indent=2) + "\n")


def _assistant_layers(target: str) -> tuple[int, ...]:
    """Those of the default pool's lm draft, which are layers of the default target."""
    return find_draft("lm", target=target).layers if is_default(target) else ()


def _check_unique(complaint: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{complaint} {twice[0]!r}; their numbers would be mixed up")


def _specs(names: Sequence[str], domain: str, target: str) -> list[tuple[str, DraftSpec | None]]:
    """The arms' drafts for one domain; None for plain decoding."""

    def spec_of(name: str) -> DraftSpec | None:
        if name == PLAIN:
            return None
        return find_draft(name, target=target, domain=domain, plain=PLAIN)

    return [(name, spec_of(name)) for name in names]


def _load(
    specs: Mapping[str, Sequence[tuple[str, DraftSpec | None]]], args: argparse.Namespace
) -> dict[str, InlineDraft]:
    """Every draft that some arm uses, once."""
    found = {spec for own in specs.values() for _, spec in own if spec is not None}
    _check_unique("arms: two different drafts are called", [spec.name for spec in found])
    wanted = {spec.name: spec for spec in found}
    target, threads = resolve(args.target), args.threads or cpu_count()
    return {
        name: InlineDraft(load_draft(spec, target, dtype=args.dtype, threads=threads))
        for name, spec in wanted.items()
    }


def _arms(specs: Sequence[tuple[str, DraftSpec | None]]) -> list[Arm]:
    return [Arm(name, None if spec is None else spec.name) for name, spec in specs]


def _encode(target: Target, file: PromptFile) -> list[tuple[int, ...]]:
    return [chat_ids(target.tokenizer, prompt) for prompt in file.prompts]
