"""Training: what is learned, that a seed decides it, and that an interruption changes nothing."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.eagles import guessing_eagle, tiny_eagle
from workers.training import distil
from workers.training.batch import BATCH_TEXTS, Batch, collate
from workers.training.distil import Schedule, Trainer, loss_of, places_of, score
from workers.training.eagle_student import EagleStudent
from workers.training.teacher import TOP, TeacherText

pytestmark = pytest.mark.usefixtures("single_thread")

CPU = torch.device("cpu")
SCHEDULE = Schedule(steps=8, seed=3, ahead=2)


def untrained(folder: Path, seed: int = 0) -> EagleStudent:
    model = tiny_eagle(folder, seed)
    model.requires_grad_(True)
    model.lm_head.requires_grad_(False)
    return EagleStudent(model)


def weights(student: EagleStudent) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in student.model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- what is learned -------------------------------------------------------------------------------


def test_it_learns_what_the_target_says(
    easy_folder: Path, texts: list[TeacherText], tmp_path: Path
) -> None:
    """All that is there to learn is the last token, and a few dozen steps see enough of it."""
    student = untrained(easy_folder)
    before = score(student, texts, 1)
    heard: list[float] = []
    trainer = Trainer(student, texts, Schedule(60, 0, 2, rate=1e-2), tmp_path / "c")
    trainer.run(heard.append)
    assert heard == trainer.losses
    assert len(heard) == trainer.step == 60
    curve = trainer.curve()
    assert len(curve) == 20
    assert curve[0] == pytest.approx(sum(heard[:3]) / 3, abs=1e-4)
    assert curve[-1] < 0.8 * curve[0]
    after = score(student, texts, 1)
    assert after.alpha > before.alpha + 0.1


def test_what_is_not_trained_stays_the_targets(
    easy_folder: Path, texts: list[TeacherText], tmp_path: Path
) -> None:
    student = untrained(easy_folder)
    before, embedding = weights(student), student.model.embedding.clone()
    Trainer(student, texts, SCHEDULE, tmp_path / "c").run()
    changed = {name for name, now in weights(student).items() if not torch.equal(now, before[name])}
    assert changed == before.keys() - {"lm_head.weight"}
    assert torch.equal(student.model.embedding, embedding)


def test_the_loss_is_the_cross_entropy_with_the_teachers_laws(
    easy_folder: Path, texts: list[TeacherText]
) -> None:
    """Per answered token, tokens that the student does not have left out; each level further ahead
    counts for a fifth less.
    """
    student, few = untrained(easy_folder), texts[:3]
    own = {token: place for place, token in enumerate(student.vocabulary.tolist())}
    expected, count = [0.0, 0.0, 0.0], 0
    with torch.inference_mode():
        for text in few:
            for further, hidden in enumerate(student.unroll(collate([text], CPU), 3)):
                laws = student.logits(hidden[0]).log_softmax(-1)
                for law, ids, logprobs in zip(laws, text.top_ids, text.top_logprobs, strict=True):
                    for token, p in zip(ids.tolist(), logprobs.float().exp().tolist(), strict=True):
                        if token in own:
                            expected[further] -= p * float(law[own[token]])
            count += len(text.top_ids)
        losses = [0.0, *(float(loss_of(student, few, ahead)) for ahead in (1, 2, 3))]
    for further in range(3):
        added = losses[further + 1] - losses[further]
        own_loss = expected[further] / count
        assert added == pytest.approx(0.8**further * own_loss, rel=0.02), "up to bfloat16"


def test_places_are_the_drafts_own_numbers() -> None:
    vocabulary, ids = torch.tensor([2, 5, 9]), torch.tensor([[5, 2, 3], [40, 9, 0]])
    assert places_of(vocabulary, ids).tolist() == [[1, 0, -1], [-1, 2, -1]]


# -- its score -------------------------------------------------------------------------------------


class Told(nn.Module):
    """A student that says what it is told to at every place of the answers: [B, A, vocabulary]."""

    def __init__(self, said: Sequence[Sequence[Tensor]]) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(1))
        self.vocabulary = torch.arange(273)
        self._said = list(said)

    @property
    def model(self) -> nn.Module:
        return self

    def unroll(self, batch: Batch, ahead: int) -> list[Tensor]:
        """The texts come in their order."""
        own = [self._said.pop(0) for _ in range(len(batch.tokens))]
        size = batch.top_ids.shape[1]
        padded = [torch.cat([law, torch.zeros(size - len(law), 273)]) for law in own]
        return [torch.stack(padded)] * ahead

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def teachers_laws(text: TeacherText) -> Tensor:
    law = torch.full((len(text.top_ids), 273), -30.0)
    return law.scatter(1, text.top_ids.long(), text.top_logprobs.float())


def test_a_perfect_student_scores_1(texts: list[TeacherText]) -> None:
    found = score(Told([*map(teachers_laws, texts)]), texts, 3)
    assert (found.hits, found.top3) == ((1.0, 1.0, 1.0), 1.0)
    kept = sum(float(text.top_logprobs.float().exp().sum()) for text in texts)
    count = sum(len(text.top_ids) for text in texts)
    assert found.alpha == pytest.approx(kept / count, abs=1e-3), "but for tokens that are not kept"
    assert found.alpha > 0.95


def test_the_score_counts_answered_tokens_alone(texts: list[TeacherText]) -> None:
    """Every second answer is guessed right, the others' likeliest token comes second."""
    laws = []
    for number, text in enumerate(texts):
        law, best = torch.zeros(len(text.top_ids), 273), text.top_ids[:, :1].long()
        law = law.scatter(1, best, 8.0)
        if number % 2:
            law = law.scatter(1, (best + 1) % 273, 9.0)
        laws.append(law)
    count = [sum(len(text.top_ids) for text in texts[kind::2]) for kind in (0, 1)]
    found = score(Told(laws), texts, 2)
    assert found.hits == pytest.approx((count[0] / sum(count),) * 2)
    assert found.top3 == 1.0
    overlap = 0.0
    for text, law in zip(texts, laws, strict=True):
        q = law.softmax(-1)
        for row, (ids, logprobs) in enumerate(zip(text.top_ids, text.top_logprobs, strict=True)):
            p = logprobs.float().exp()
            overlap += float(torch.minimum(p, q[row, ids.long()]).sum())
    assert found.alpha == pytest.approx(overlap / sum(count), rel=1e-4)


def test_a_student_that_knows_the_target_scores_well_however_far_ahead(
    easy_folder: Path, texts: list[TeacherText]
) -> None:
    """The unroll asks the model as it is asked in use: on its own output it knows as much."""
    found = score(EagleStudent(guessing_eagle(easy_folder, torch.arange(273))), texts, 4)
    assert min(found.hits) > 0.4
    assert max(found.hits) - min(found.hits) < 0.1
    assert found.alpha > 0.6
    stranger = score(untrained(easy_folder), texts, 4)
    assert max(stranger.hits) < 0.2


# -- its seed and its interruptions ----------------------------------------------------------------


@pytest.fixture
def whole(easy_folder: Path, texts: list[TeacherText], tmp_path: Path) -> dict[str, Tensor]:
    """The weights of an uninterrupted run."""
    student = untrained(easy_folder)
    Trainer(student, texts, SCHEDULE, tmp_path / "whole").run()
    return weights(student)


def test_the_seed_decides_the_draft(
    easy_folder: Path, texts: list[TeacherText], tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    again, other = untrained(easy_folder), untrained(easy_folder)
    Trainer(again, texts, SCHEDULE, tmp_path / "again").run()
    Trainer(other, texts, replace(SCHEDULE, seed=4), tmp_path / "other").run()
    assert equal(weights(again), whole)
    assert not equal(weights(other), whole)


@pytest.mark.parametrize("at", [1, 5, 8])
def test_a_run_that_was_interrupted_ends_as_if_it_was_not(
    easy_folder: Path,
    texts: list[TeacherText],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, Tensor],
    at: int,
) -> None:
    """Also where it was interrupted between two checkpoints, or in the next epoch."""
    assert len(texts) < 5 * BATCH_TEXTS, "step 5 is the second epoch's"
    monkeypatch.setattr(distil, "_CHECKPOINT_S", 0.0)
    left = at

    def stop(loss: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt) if at < SCHEDULE.steps else nullcontext():
        Trainer(untrained(easy_folder), texts, SCHEDULE, path).run(stop)
    resumed = untrained(easy_folder, seed=9)  # what it starts from does not matter any more
    trainer = Trainer(resumed, texts, SCHEDULE, path)
    assert trainer.step == len(trainer.losses) == at
    trainer.run()
    assert trainer.step == len(trainer.losses) == SCHEDULE.steps
    assert equal(weights(resumed), whole)
    assert [file.name for file in tmp_path.glob("checkpoint*")] == ["checkpoint"]


@pytest.mark.parametrize("change", [{"seed": 4}, {"steps": 9}, {"ahead": 1}, {"rate": 2e-3}])
def test_a_checkpoint_of_another_schedule_is_refused(
    easy_folder: Path, texts: list[TeacherText], tmp_path: Path, change: dict[str, int]
) -> None:
    path = tmp_path / "checkpoint"
    schedule = replace(SCHEDULE, steps=1)
    Trainer(untrained(easy_folder), texts, schedule, path).run()
    with pytest.raises(ValueError, match=rf"^--resume: {path} was made with .*; repeat its opt"):
        Trainer(untrained(easy_folder), texts, replace(schedule, **change), path)


def test_measuring_its_speed_leaves_it_as_it_was(
    easy_folder: Path, texts: list[TeacherText]
) -> None:
    student = untrained(easy_folder)
    before = weights(student)
    assert 0 < Trainer.seconds_per_step(student, texts, 2) < 60
    assert equal(weights(student), before)
    assert not [p for p in student.model.parameters() if p.grad is not None and p.grad.any()]


# -- its schedule ----------------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_falls_to_almost_nothing() -> None:
    schedule = Schedule(steps=400, seed=0, ahead=1, rate=2.0)
    rates = [schedule.rate_at(step) for step in range(400)]
    top = rates.index(max(rates))
    assert 20 <= top <= 60
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[200] == pytest.approx(0.5 * 2.0 * 1.03)
    assert rates[-1] == pytest.approx(0.06, rel=0.01)
    assert math.isfinite(Schedule(steps=0, seed=0, ahead=1).rate_at(0))


def test_an_epoch_is_every_text_once(texts: list[TeacherText]) -> None:
    assert len(texts) % BATCH_TEXTS
    assert Trainer.steps_for(texts, 3) == 3 * (len(texts) // BATCH_TEXTS + 1)
    assert texts[0].top_ids.shape[1] == TOP


@pytest.mark.parametrize(
    ("device", "able", "fast"),
    [
        ("cpu", {"avx2": True, "avx512_bf16": False}, False),
        ("cpu", {"avx512_bf16": True}, True),
        ("cpu", {"neon": True, "bf16": True}, True),
        ("cuda", {"avx2": True}, True),
    ],
)
def test_bfloat16_is_for_machines_that_multiply_it(
    monkeypatch: pytest.MonkeyPatch, device: str, able: dict[str, bool], *, fast: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert distil.multiplies_bfloat16(torch.device(device)) == fast


@pytest.mark.parametrize("able", [{}, {"avx512_bf16": True}], ids=["float32", "bfloat16"])
def test_a_student_learns_in_either(
    tiny_folder: Path,
    texts: list[TeacherText],
    monkeypatch: pytest.MonkeyPatch,
    able: dict[str, bool],
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    loss = loss_of(untrained(tiny_folder), texts[:4], ahead=2)
    assert loss.isfinite()
    loss.backward()
