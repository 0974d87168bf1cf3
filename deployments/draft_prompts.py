"""Which prompts a draft learns from, which are held out, and in what order the target answers."""

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.prompt_file import chat_ids
from workers.training.corpus import TargetAnswer

FEWEST = 8
LONGEST = 512
MOST_HELD_OUT = 40

_BETWEEN = re.compile(r"[。！？；：，、\n]+|[.!?;:,]+\s+")
_FEWEST_LETTERS = 2

_Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitPrompts:
    """Token ids to learn from, by file, and to hold out; texts of the latter."""

    training: list[list[_Ids]]
    held_out: list[_Ids]
    held_out_texts: list[str]


def split_prompts(
    files: Sequence[Sequence[str]], tokenizer: Any, context: int, seed: int, *, clauses: bool
) -> SplitPrompts:
    """Some prompts of every file are held out: what is fitted on them shall fit all of them. They
    take turns, as those to learn from do. clauses: whether those of a file's prompts are prompts as
    well, as if in a file of their own; what is held out are clauses of held-out prompts.

    Raises ValueError for a file of too few that fit the target's context.
    """
    training, held_out = [], []
    longest = min(LONGEST, context - 1)
    texts: dict[_Ids, str] = {}

    def fresh(prompts: Iterable[str]) -> list[_Ids]:
        """Those that are not there yet, in an order of their own."""
        own = {chat_ids(tokenizer, text): text for text in prompts}
        found = _shuffled([ids for ids in own if ids not in texts], longest, seed)
        texts.update(own)
        return found

    for prompts in files:
        shuffled = fresh(prompts)
        if len(shuffled) < FEWEST:
            raise ValueError(
                f"prompts: {len(shuffled)} different ones fit in {longest} tokens; a draft needs "
                f"at least {FEWEST} of every file, some to learn from and some to be measured on"
            )
        size = min(MOST_HELD_OUT, len(shuffled) // 4)
        parts = shuffled[:size], shuffled[size:]
        held_out.append(parts[0])
        training.append(parts[1])
        if clauses:
            held, learned = ([texts[ids] for ids in part] for part in parts)
            held_out.append(fresh(_clauses(held))[:MOST_HELD_OUT])
            training.append(fresh(_clauses(learned)))
    mixed = [ids for turn in itertools.zip_longest(*held_out) for ids in turn if ids]
    return SplitPrompts([own for own in training if own], mixed, [texts[ids] for ids in mixed])


def _clauses(prompts: Sequence[str]) -> Iterator[str]:
    """What stands between punctuation marks, if it holds a word."""
    for clause in itertools.chain.from_iterable(map(_BETWEEN.split, prompts)):
        if sum(map(str.isalpha, clause)) >= _FEWEST_LETTERS:
            yield clause.strip()


def _shuffled(prompts: Sequence[_Ids], longest: int, seed: int) -> list[_Ids]:
    """Those that are not too long."""
    fitting = [ids for ids in prompts if len(ids) <= longest]
    return random.Random(seed).sample(fitting, len(fitting))


def planned(prompts: SplitPrompts, temperatures: Sequence[float]) -> Iterator[TargetAnswer]:
    """What the target is asked, without its tokens: the held-out prompts once at every temperature,
    then the others again and again, a prompt of each file in turn. The temperatures take turns from
    prompt to prompt of a file, and for each prompt from round to round.
    """
    numbers = itertools.count()
    for ids in prompts.held_out:
        for temperature in temperatures:
            yield TargetAnswer(next(numbers), True, temperature, ids, ())
    for turn in itertools.count():
        for own in prompts.training:
            again, place = divmod(turn, len(own))
            temperature = temperatures[(again + place) % len(temperatures)]
            yield TargetAnswer(next(numbers), False, temperature, own[place], ())
