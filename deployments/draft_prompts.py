"""Which prompts a draft learns from, which are held out, and in what order the target answers."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.prompt_file import chat_ids
from workers.training.corpus import TargetAnswer

FEWEST = 8
LONGEST = 512
MOST_HELD_OUT = 40

_Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitPrompts:
    """Token ids to learn from, by file, and to hold out; texts of the latter."""

    training: list[list[_Ids]]
    held_out: list[_Ids]
    held_out_texts: list[str]


def split_prompts(
    files: Sequence[Sequence[str]], tokenizer: Any, context: int, seed: int
) -> SplitPrompts:
    """Some prompts of every file are held out: what is fitted on them shall fit all of them. They
    take turns, as those to learn from do.

    Raises ValueError for a file of too few that fit the target's context.
    """
    training, held_out = [], []
    texts: dict[_Ids, str] = {}
    for prompts in files:
        own = {chat_ids(tokenizer, text): text for text in prompts}
        shuffled = _shuffled([ids for ids in own if ids not in texts], context, seed)
        size = min(MOST_HELD_OUT, len(shuffled) // 4)
        held_out.append(shuffled[:size])
        training.append(shuffled[size:])
        texts |= own
    mixed = [ids for turn in itertools.zip_longest(*held_out) for ids in turn if ids]
    return SplitPrompts(training, mixed, [texts[ids] for ids in mixed])


def _shuffled(prompts: Sequence[_Ids], context: int, seed: int) -> list[_Ids]:
    longest = min(LONGEST, context - 1)
    fitting = [ids for ids in prompts if len(ids) <= longest]
    if len(fitting) < FEWEST:
        raise ValueError(
            f"prompts: {len(fitting)} different ones fit in {longest} tokens; a draft needs at "
            f"least {FEWEST} of every file, some to learn from and some to be measured on"
        )
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
