"""An eagle draft in training: its answers to whole batches of texts, as it would give them in use.

In use it reads the target's features up to the last committed token, and from there on its own
output. Training on features alone would leave it helpless from the second token on, so each batch
is run several times, each time on the output of the one before (the "training-time test" of
EAGLE-3, Li et al., 2025).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.eagle import EagleModel, rotary
from workers.training.batch import Batch


class EagleStudent:
    """The `workers.training.distil.Student` of an eagle draft."""

    def __init__(self, model: EagleModel) -> None:
        self.model = model

    def to(self, device: torch.device) -> None:
        self.model.to(device)

    @property
    def vocabulary(self) -> Tensor:
        return self.model.vocabulary

    def unroll(self, batch: Batch, ahead: int) -> list[Tensor]:
        return unroll(self.model, batch, ahead)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def unroll(model: EagleModel, batch: Batch, steps: int) -> list[Tensor]:
    """Hidden states from which the answers are guessed, 1, 2, ... tokens ahead of what the target
    has been asked: [B, A, hidden] each, aligned with the answers.

    Column t of the inputs holds the features at t and the token at t + 1, so step k guesses the
    token at t + 2 + k there. Later steps leave out columns that no answer needs.
    """
    size = batch.tokens.shape[1]
    embedded = model.embed(batch.tokens)
    positions = torch.arange(size, device=batch.tokens.device)
    hidden = model.fuse(batch.features[:, : size - 1])
    begin = max(batch.prompt - 1 - steps, 0)
    seen = _visible(batch)
    keys: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for step in range(steps):
        columns = slice(0 if step == 0 else begin, size - 1 - step)
        shifted = slice(columns.start + 1 + step, size)
        hidden = hidden[:, : columns.stop - columns.start]
        query, key, value = model.midlayer.project(
            embedded[:, shifted], hidden, rotary(model.config, positions[columns] + step)
        )
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if step == 0:
            attended = scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
        else:
            attended = _attend(query, [*keys, (key, value)], seen[:, 0, columns, : columns.stop])
        hidden = model.midlayer.finish(hidden, attended.transpose(1, 2).flatten(2))
        keys.append((key, value))
        answers = batch.prompt - 2 - step - columns.start
        outputs.append(hidden[:, answers : answers + batch.top_ids.shape[1]])
        if step == 0:
            hidden = hidden[:, begin:]
    return outputs


def _visible(batch: Batch) -> Tensor:
    """Which columns of step 0 each of its columns sees: [B, 1, T, T] bool."""
    size = batch.tokens.shape[1] - 1
    columns = torch.arange(size, device=batch.tokens.device)
    causal = columns[:, None] >= columns
    real = columns >= batch.first[:, None]
    own = torch.eye(size, dtype=torch.bool, device=columns.device)  # padding must see something
    return ((causal & real[:, None]) | own)[:, None]


def _attend(query: Tensor, keys: Sequence[tuple[Tensor, Tensor]], seen: Tensor) -> Tensor:
    """Attention of a later step: to step 0 as far as `seen`, and to its own column in the others.

    query [B, heads, M, d]; keys: per step [B, kv_heads, >= M, d] and as many values; step 0 has all
    columns, the others begin where the query does. -> [B, heads, M, d]
    """
    batch, heads, size, width = query.shape
    kv_heads = keys[0][0].shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, size, width)
    first_keys, first_values = (x[:, :, None, : seen.shape[-1]] for x in keys[0])
    scores = (grouped @ first_keys.transpose(-1, -2)).float() / math.sqrt(width)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    later = [(k[:, :, None, :size], v[:, :, None, :size]) for k, v in keys[1:]]
    own = [(grouped * k).sum(-1, keepdim=True).float() / math.sqrt(width) for k, _ in later]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(query.dtype)
    out = weights[..., : seen.shape[-1]] @ first_values
    for step, (_, value) in enumerate(later):
        out = out + weights[..., seen.shape[-1] + step, None] * value
    return out.reshape(batch, heads, size, width)
