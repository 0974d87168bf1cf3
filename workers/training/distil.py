"""Training a draft on what the teacher left: loss, schedule, checkpoints, held-out score.

The order of texts, and with it the draft, follows from the seed alone, also where a run was
interrupted and went on.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workers.training.batch import BATCH_TEXTS, Batch, collate, shuffled_batches
from workers.training.teacher import TeacherText

_CHECKPOINT_S = 60.0
_PROBES = 4
_WARM_UP_STEPS = 40
_LEAST_RATE = 0.03  # of the highest learning rate, at the end
# A guess further ahead is needed less often.
_DISCOUNT = 0.8
_BETAS, _DECAY, _CLIP = (0.9, 0.95), 0.01, 1.0
# What CPUs that multiply it are able to, as torch names it.
_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


class Student(Protocol):
    """A draft in training."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def vocabulary(self) -> Tensor:
        """The target's ids of the tokens that it scores: [K]."""
        ...

    def unroll(self, batch: Batch, ahead: int) -> list[Tensor]:
        """What it guesses the answers from, by how many tokens ahead: [B, A, hidden] each."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., K]"""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """steps: batches to learn from; ahead: guesses per token that are trained; rate: the highest
    learning rate.
    """

    steps: int
    seed: int
    ahead: int
    rate: float = 1e-3

    def rate_at(self, step: int) -> float:
        """Warm up, then a cosine down to almost nothing."""
        warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * step / max(1, self.steps)))
        return self.rate * warm * (_LEAST_RATE + (1 - _LEAST_RATE) * cosine)


@dataclass(frozen=True, slots=True)
class Score:
    """On held-out answers. hits: by how many tokens ahead, the share of guesses that were the
    teacher's likeliest token; top3: share of the nearest where that was among three; alpha:
    `1 - TV` of the nearest, at temperature 1.
    """

    hits: tuple[float, ...]
    top3: float
    alpha: float


class Trainer:
    """Trains one student; `checkpoint` keeps where it is."""

    def __init__(
        self,
        student: Student,
        texts: Sequence[TeacherText],
        schedule: Schedule,
        checkpoint: Path,
    ) -> None:
        self._student = student
        self._texts = texts
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._parameters = [p for p in student.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=schedule.rate, betas=_BETAS, weight_decay=_DECAY
        )
        self.step = 0
        self.losses: list[float] = []
        if checkpoint.is_file():
            self._load()

    def run(self, on_step: Callable[[float], object] = lambda loss: None) -> None:
        """Go on to the end; `on_step` hears the loss of every batch."""
        saved = time.monotonic()
        for numbers in itertools.islice(self._order(), self.step, self._schedule.steps):
            on_step(self._learn([self._texts[number] for number in numbers]))
            if time.monotonic() - saved > _CHECKPOINT_S:
                self._save()
                saved = time.monotonic()
        self._save()

    def curve(self) -> list[float]:
        """Mean losses of twenty equal parts of the training."""
        parts = [
            self.losses[len(self.losses) * part // 20 : len(self.losses) * (part + 1) // 20]
            for part in range(20)
        ]
        return [round(sum(part) / len(part), 4) for part in parts if part]

    @staticmethod
    def steps_for(texts: Sequence[TeacherText], epochs: int) -> int:
        """Batches that hold every text so often."""
        return epochs * -(-len(texts) // BATCH_TEXTS)

    @staticmethod
    def seconds_per_step(student: Student, texts: Sequence[TeacherText], ahead: int) -> float:
        """Measured on a few batches; the student is left as it was."""
        started = time.monotonic()
        batches = list(itertools.islice(shuffled_batches(texts, 0, 0), _PROBES))
        for numbers in batches:
            loss_of(student, [texts[number] for number in numbers], ahead).backward()
            student.model.zero_grad()
        return (time.monotonic() - started) / len(batches)

    def _order(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            yield from shuffled_batches(self._texts, self._schedule.seed, epoch)

    def _learn(self, texts: Sequence[TeacherText]) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate_at(self.step)
        self._student.model.train()
        self._optimizer.zero_grad()
        loss = loss_of(self._student, texts, self._schedule.ahead)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, _CLIP)
        self._optimizer.step()
        self.step += 1
        self.losses.append(loss.item())
        return self.losses[-1]

    def _save(self) -> None:
        partial = self._checkpoint.with_suffix(".partial")
        state = {
            "schedule": asdict(self._schedule),
            "step": self.step,
            "losses": self.losses,
            "model": self._student.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, partial)
        partial.rename(self._checkpoint)

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
        if state["schedule"] != asdict(self._schedule):
            raise ValueError(
                f"--resume: {self._checkpoint} was made with {state['schedule']}, not "
                f"{asdict(self._schedule)}; repeat its options, or delete it"
            )
        self._student.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


def loss_of(student: Student, texts: Sequence[TeacherText], ahead: int) -> Tensor:
    """Cross entropy with the teacher's laws, as far as the student has their tokens."""
    device = next(student.model.parameters()).device
    batch = collate(texts, device)
    place = places_of(student.vocabulary, batch.top_ids)[batch.answered]
    wanted = torch.where(place >= 0, batch.top_probs[batch.answered], 0.0)
    total = torch.zeros((), device=device)
    with _autocast(device):
        for further, hidden in enumerate(student.unroll(batch, ahead)):
            logprobs = student.logits(hidden[batch.answered]).float().log_softmax(-1)
            loss = -(wanted * logprobs.gather(1, place.clamp(min=0))).sum(-1).mean()
            total = total + _DISCOUNT**further * loss
    return total


def places_of(vocabulary: Tensor, ids: Tensor) -> Tensor:
    """The draft's own numbers of the target's tokens `ids`; -1 where it has none."""
    size = int(max(vocabulary.max(), ids.max())) + 1
    place = torch.full((size,), -1, device=ids.device)
    place[vocabulary.to(ids.device)] = torch.arange(len(vocabulary), device=ids.device)
    return place[ids]


@torch.inference_mode()
def score(student: Student, texts: Sequence[TeacherText], ahead: int) -> Score:
    """How well a student guesses texts that it did not learn from."""
    student.model.eval()
    device = next(student.model.parameters()).device
    hits, top3, alpha, count = [0] * ahead, 0, 0.0, 0
    for at in range(0, len(texts), BATCH_TEXTS):
        batch = collate(texts[at : at + BATCH_TEXTS], device)
        best = batch.top_ids[batch.answered][:, :1]
        with _autocast(device):
            outputs = student.unroll(batch, ahead)
            for further, hidden in enumerate(outputs):
                logits = student.logits(hidden[batch.answered]).float()
                guesses = student.vocabulary[logits.topk(min(3, logits.shape[-1]), -1).indices]
                hits[further] += int((guesses[:, :1] == best).sum())
                if further == 0:
                    top3 += int((guesses == best).any(-1).sum())
                    alpha += _overlap(student, logits, batch)
        count += len(best)
    return Score(tuple(hit / count for hit in hits), top3 / count, alpha / count)


def _overlap(student: Student, logits: Tensor, batch: Batch) -> float:
    """Sum of min(p, q) over the tokens of which the teacher's probability is known."""
    place = places_of(student.vocabulary, batch.top_ids)[batch.answered]
    q = logits.softmax(-1).gather(1, place.clamp(min=0)).where(place >= 0, torch.zeros(()))
    return float(torch.minimum(q, batch.top_probs[batch.answered]).sum())


def _autocast(device: torch.device) -> torch.autocast:
    """bfloat16 where it is fast; parameters and their updates stay float32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=multiplies_bfloat16(device))


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for that; a CPU without takes 25 times as long as for float32."""
    able = torch.cpu.get_capabilities()
    return device.type != "cpu" or any(able.get(name) for name in _BFLOAT16)
