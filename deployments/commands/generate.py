"""`outrider generate`: one answer in this process, to try a draft or to script with."""

import argparse
import json
import secrets
import sys
from typing import Any

from deployments.commands.options import (
    add_budget_option,
    add_target_options,
    add_temperature_option,
    count,
    natural,
    target_spec,
)
from deployments.pool import PLAIN, find_draft, open_verifier
from deployments.prompt_file import chat_ids
from workers.budget import spending
from workers.completion import Completion, run_requests
from workers.engine.model_store import is_default
from workers.engine.sampling import SamplingParams
from workers.request import Delta, GenerationRequest
from workers.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer one prompt in this process. The text goes to stdout as it grows, what "
        "speculation did to stderr; with --json one object goes to stdout."
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="sent as a user's message")
    parser.add_argument(
        "--draft",
        metavar="D",
        help="a pool member (code, math, en, zh, lm), a kind (hybrid: the one for code; chain, "
        f"ngram and eagle: parts of it), a draft's folder, or {PLAIN} for plain decoding "
        "(default: hybrid, or ngram with another target than the default one)",
    )
    add_budget_option(parser)
    add_temperature_option(parser)
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that hold this probability (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        metavar="S",
        help="the same seed gives the same text, with any draft or none (default: a new one)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=256,
        metavar="M",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_target_options(parser, dtype="float32")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for options that cannot be used."""
    if not args.prompt.strip():
        raise ValueError("prompt: is empty; give some text")
    draft = args.draft or ("hybrid" if is_default(args.target) else "ngram")
    drafts = [] if draft == PLAIN else [find_draft(draft, target=args.target)]
    target, verifier = open_verifier(target_spec(args), drafts)
    request = _request(args, target, drafts[0].name if drafts else None)
    done = run_requests(verifier, [request], on_delta=_ignore if args.json else _print)
    completion = done.completions[0]
    facts = _facts(completion, done.seconds, request.sampling.seed)
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(flush=True)
        print(_summary(facts), file=sys.stderr)
    return 0


def _request(args: argparse.Namespace, target: Target, draft: str | None) -> GenerationRequest:
    ids = chat_ids(target.tokenizer, args.prompt)
    seed = secrets.randbits(63) if args.seed is None else args.seed
    budget, adaptive = spending(args.budget)
    return GenerationRequest(
        id="generate",
        prompt=ids,
        max_tokens=args.max_tokens,
        sampling=SamplingParams(seed=seed, temperature=args.temperature, top_p=args.top_p),
        draft=draft,
        budget=budget,
        adaptive=adaptive,
    )


def _ignore(delta: Delta) -> None:
    """The whole answer is printed at the end."""


def _print(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _facts(completion: Completion, seconds: float, seed: int) -> dict[str, Any]:
    stats = completion.stats
    assert stats is not None
    return {
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "seed": seed,
        "tokens_per_second": len(completion.tokens) / seconds,
        "draft": stats.draft,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "members": dict(stats.members),
        "tau": stats.tau,
        "alpha": stats.alpha,
    }


def _summary(facts: dict[str, Any]) -> str:
    return (
        f"[{len(facts['tokens'])} tokens, {facts['tokens_per_second']:.1f} tokens/s, "
        f"draft {facts['draft'] or PLAIN}, tau {facts['tau']:.2f}, "
        f"{facts['accepted']} of {facts['drafted']} drafted tokens accepted, seed {facts['seed']}]"
    )
