"""What the target knows about its answers, computed once: features and likeliest next tokens.

Recomputing the teacher in every step of training would cost ten times the student's own work.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.engine.pack import Pack, Segment, chain_parents
from workers.engine.runner import PassOutput
from workers.training.corpus import TargetAnswer

TOP = 48
"""Tokens of each of the teacher's laws that are kept."""

PASS_TOKENS = 1024
_SHARD_TEXTS = 64


@dataclass(frozen=True, slots=True)
class TeacherText:
    """One prompt and answer of N and A tokens.

    tokens [N + A] int64; prompt: N; features [N + A, layers * hidden] bfloat16: the target's hidden
    states at each token; top_ids, top_logprobs [A, TOP]: the likeliest tokens where each token of
    the answer stands, and their log probabilities at temperature 1. temperature: of the answer.
    """

    tokens: Tensor
    prompt: int
    temperature: float
    features: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Model(Protocol):
    """The target, with nobody else in its KV store."""

    def forward(self, pack: Pack) -> PassOutput:
        """As `workers.engine.runner.Runner` does."""


def teach(
    model: Model,
    answers: Sequence[TargetAnswer],
    folder: Path,
    on_texts: Callable[[int], object] = lambda texts: None,
) -> None:
    """Write what the target knows about the answers, shard by shard; those that are
    there are kept. `on_texts` hears how many texts were done.

    Raises ValueError when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, len(answers), _SHARD_TEXTS):
        part = answers[first : first + _SHARD_TEXTS]
        path = _shard(folder, first)
        if not path.exists():
            _save(path, _concatenated([t for batch in _batches(part) for t in _run(model, batch)]))
        on_texts(len(part))


def taught(folder: Path) -> list[TeacherText]:
    """Everything that `teach` wrote, in its order. Tensors are mapped, not read."""
    return [text for path in sorted(folder.glob("*.safetensors")) for text in _split(path)]


def bare_text(answer: TargetAnswer) -> TeacherText:
    """An answer without what the teacher knows about it."""
    tokens = torch.tensor((*answer.prompt, *answer.tokens))
    features, law = torch.empty(len(tokens), 0), torch.empty(len(answer.tokens), 0)
    return TeacherText(tokens, len(answer.prompt), answer.temperature, features, law, law)


def likeliest_tokens(
    texts: Sequence[TeacherText],
    vocabulary: int,
    size: int,
    also_said: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Ids, in order, of the `size` tokens of the tokenizer's `vocabulary` to which the teacher gave
    most probability in all; its law may have more, which are padding. Of what it `also_said` only
    the tokens are known: each counts as one that it was sure of.
    """
    said = torch.tensor([token for tokens in also_said for token in tokens], dtype=torch.int64)
    mass = torch.bincount(said, minlength=vocabulary).double()
    for text in texts:
        ids, logprobs = text.top_ids.long().flatten(), text.top_logprobs.double().flatten()
        real = ids < vocabulary
        mass.index_add_(0, ids[real], logprobs[real].exp())
    return mass.topk(min(size, vocabulary)).indices.sort().values


def _shard(folder: Path, first: int) -> Path:
    return folder / f"{first:06d}.safetensors"


def _batches(answers: Sequence[TargetAnswer]) -> Iterator[list[TargetAnswer]]:
    """Neighbours, as many as a pass should hold."""
    batch: list[TargetAnswer] = []
    size = 0
    for answer in answers:
        own = len(answer.prompt) + len(answer.tokens)
        if batch and size + own > PASS_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(answer)
        size += own
    yield batch


def _run(model: Model, batch: Sequence[TargetAnswer]) -> list[TeacherText]:
    """One pass over whole texts, side by side in the model's store."""
    segments: list[Segment] = []
    slot = 0
    for answer in batch:
        text = (*answer.prompt, *answer.tokens)
        before = range(len(answer.prompt) - 1, len(text) - 1)
        extents = ((slot, slot + len(text)),)
        segments.append(Segment(text, 0, chain_parents(len(text)), extents, tuple(before)))
        slot += len(text)
    pack = Pack(tuple(segments))
    output = model.forward(pack)
    features = output.features.flatten(1).to(torch.bfloat16)
    parts = features.split([len(segment.tokens) for segment in segments])
    texts = []
    for answer, segment, own, logits in zip(
        batch, segments, parts, pack.split_rows(output.logits), strict=True
    ):
        top = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]), -1)
        texts.append(
            TeacherText(
                torch.tensor(segment.tokens),
                len(answer.prompt),
                answer.temperature,
                own.cpu(),
                top.indices.cpu(),
                top.values.cpu(),
            )
        )
    return texts


def _concatenated(texts: Sequence[TeacherText]) -> dict[str, Tensor]:
    return {
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompts": torch.tensor([text.prompt for text in texts]),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float64),
        "tokens": torch.cat([text.tokens for text in texts]).to(torch.int32),
        "features": torch.cat([text.features for text in texts]),
        "top_ids": torch.cat([text.top_ids for text in texts]).to(torch.int32),
        "top_logprobs": torch.cat([text.top_logprobs for text in texts]).to(torch.float16),
    }


def _split(path: Path) -> Iterator[TeacherText]:
    saved = load_file(path)
    lengths, prompts = saved["lengths"].tolist(), saved["prompts"].tolist()
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    for tokens, prompt, temperature, features, ids, logprobs in zip(
        saved["tokens"].split(lengths),
        prompts,
        saved["temperatures"].tolist(),
        saved["features"].split(lengths),
        saved["top_ids"].split(answers),
        saved["top_logprobs"].split(answers),
        strict=True,
    ):
        yield TeacherText(tokens, prompt, temperature, features, ids, logprobs)


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial)
    except Exception as error:  # safetensors wraps the system's error in its own
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno != errno.ENOSPC:
            raise
        raise ValueError(
            f"--out: {path.parent} cannot be written ({error}); what is there is kept: make room "
            "and go on with --resume"
        ) from error
    partial.rename(path)
