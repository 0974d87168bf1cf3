"""Texts side by side, as training and scoring take them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.training.teacher import TeacherText

BATCH_TEXTS = 8
# Columns of prompt that every batch has: a guess several tokens ahead needs so many before it.
LEAST_PROMPT = 8
# Texts of about the same length share a batch; noise, in tokens, makes it another one each time.
_LENGTH_NOISE = 40


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts, aligned where their answers begin: P columns of prompts, then A of answers.

    tokens [B, P + A]; features [B, P + A, layers * hidden]; first [B]: where each text begins;
    top_ids, top_probs [B, A, TOP]: the teacher's law of each token of the answers; answered
    [B, A] bool: whether there is one.
    """

    tokens: Tensor
    features: Tensor
    first: Tensor
    top_ids: Tensor
    top_probs: Tensor
    answered: Tensor

    @property
    def prompt(self) -> int:
        return self.tokens.shape[1] - self.top_ids.shape[1]


def collate(texts: Sequence[TeacherText], device: torch.device) -> Batch:
    """Lay texts side by side."""
    prompt = max(LEAST_PROMPT, *(text.prompt for text in texts))
    answer = max(len(text.top_ids) for text in texts)
    top = texts[0].top_ids.shape[1]
    tokens = torch.zeros(len(texts), prompt + answer, dtype=torch.long)
    features = torch.zeros(*tokens.shape, texts[0].features.shape[1], dtype=torch.bfloat16)
    ids = torch.zeros(len(texts), answer, top, dtype=torch.long)
    probs = torch.zeros(len(texts), answer, top)
    answered = torch.zeros(len(texts), answer, dtype=torch.bool)
    first = torch.tensor([prompt - text.prompt for text in texts])
    for row, text in enumerate(texts):
        place = slice(prompt - text.prompt, prompt - text.prompt + len(text.tokens))
        tokens[row, place] = text.tokens.long()
        features[row, place] = text.features
        size = len(text.top_ids)
        ids[row, :size] = text.top_ids.long()
        probs[row, :size] = text.top_logprobs.float().exp()
        answered[row, :size] = True
    parts = (tokens, features, first, ids, probs, answered)
    return Batch(*(part.to(device) for part in parts))


def shuffled_batches(texts: Sequence[TeacherText], seed: int, epoch: int) -> Iterator[list[int]]:
    """All texts once, by their numbers, in an order that seed and epoch decide."""
    chance = random.Random(f"{seed} {epoch}")
    order = sorted(
        chance.sample(range(len(texts)), len(texts)),
        key=lambda number: len(texts[number].tokens) + chance.random() * _LENGTH_NOISE,
    )
    batches = [order[at : at + BATCH_TEXTS] for at in range(0, len(order), BATCH_TEXTS)]
    chance.shuffle(batches)
    yield from batches
