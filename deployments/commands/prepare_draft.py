"""`outrider prepare-draft`: make a draft for a target and a domain, from prompts alone.

The target answers the prompts; what it said is what the draft learns.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from deployments.commands.options import add_target_options, count, target_spec
from deployments.prompt_file import PromptFile, chat_ids, read_prompts
from workers.completion import Completion, run_requests
from workers.engine.model_store import resolve
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, load_target
from workers.training.ngram_table import ORDER, NgramTable
from workers.verifier import build_verifier

_DESCRIPTION = """\
Make a draft for a target and a domain. The target answers the prompts of FILE, over and over with
the given temperatures in turn, until it has said N tokens; the draft learns from what it said.
An n-gram table learns its domain from little: 55,000 tokens are a start, 250,000 are good.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.add_argument("--domain", required=True, metavar="NAME", help="what the draft is for")
    parser.add_argument(
        "--prompts", required=True, type=Path, metavar="FILE", help='JSON lines with a "prompt"'
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder that becomes the draft"
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=55_000,
        metavar="N",
        help="what the target shall say in all (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=count,
        default=160,
        metavar="M",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.8),
        metavar="T,T",
        help="of the answers, in turn; 0 is greedy (default: 0,0.8)",
    )
    parser.add_argument(
        "--together",
        type=count,
        default=16,
        metavar="N",
        help="answers at a time; more are faster and take more memory (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the order of prompts and of the answers (default: %(default)s)",
    )
    parser.add_argument(
        "--source",
        default="",
        metavar="TEXT",
        help="where the prompts are from and their licence, for the draft's card",
    )
    add_target_options(parser)
    parser.set_defaults(func=run)


def _temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for prompts or options that cannot be used."""
    prompts = read_prompts(args.prompts)
    vocabulary = vocabulary_of(resolve(args.target))
    target = load_target(target_spec(args))
    said = _answers(target, prompts, args)
    card = {
        "domain": args.domain,
        "target": args.target,
        "dtype": args.dtype,
        "prompts": args.source or args.prompts.name,
        "temperatures": list(args.temperatures),
        "max_tokens": args.max_tokens,
        "seed": args.seed,
        "answers": len(said),
        "tokens": sum(len(completion.tokens) for completion in said),
    }
    # The end of the prompt is context for the first tokens of the answer.
    texts = [[*completion.request.prompt[-ORDER:], *completion.tokens] for completion in said]
    NgramTable.build(texts, vocabulary, card).save(args.out)
    print(f"{args.out}: {card['tokens']:,} tokens of {card['answers']:,} answers")
    return 0


def _answers(target: Target, prompts: PromptFile, args: argparse.Namespace) -> list[Completion]:
    """Answers of the target until they hold enough tokens."""
    said: list[Completion] = []
    bar: tqdm[NoReturn] = tqdm(total=args.tokens, unit="tok", desc=f"{args.target} answers")
    with bar:

        def note(completion: Completion) -> None:
            said.append(completion)
            bar.update(len(completion.tokens))

        run_requests(
            build_verifier(target, {}, Limits(max_running=args.together)),
            itertools.takewhile(lambda _: bar.n < args.tokens, _requests(target, prompts, args)),
            together=args.together,
            on_done=note,
        )
    return sorted(said, key=lambda completion: int(completion.request.id))


def _requests(
    target: Target, prompts: PromptFile, args: argparse.Namespace
) -> Iterator[GenerationRequest]:
    """All prompts in a random order, again and again. The temperatures take turns from prompt to
    prompt, and for each prompt from round to round.
    """
    encoded = [chat_ids(target.tokenizer, prompt) for prompt in prompts.prompts]
    fitting = [ids for ids in encoded if len(ids) < target.context_length]
    if not fitting:
        raise ValueError(
            f"prompts: none leaves room for an answer in {target.context_length} tokens of context"
        )
    shuffled = random.Random(args.seed).sample(fitting, len(fitting))
    numbers = itertools.count()
    for turn in itertools.count():
        for place, ids in enumerate(shuffled):
            number = next(numbers)
            temperature = args.temperatures[(turn + place) % len(args.temperatures)]
            yield GenerationRequest(
                id=str(number),
                prompt=ids,
                max_tokens=min(args.max_tokens, target.context_length - len(ids)),
                sampling=SamplingParams(seed=args.seed + number, temperature=temperature),
            )
