"""The unroll against the same done slowly, one column at a time."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.eagles import attentive_eagle, some_features, some_tokens
from workers.engine.eagle import EagleModel, rotary
from workers.training.batch import collate
from workers.training.eagle_student import EagleStudent, unroll
from workers.training.teacher import TeacherText

pytestmark = pytest.mark.usefixtures("single_thread")

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
STEPS = 4


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> EagleModel:
    return attentive_eagle(tiny_folder)


def text(prompt: int, answer: int, seed: int = 0) -> TeacherText:
    size = prompt + answer
    features = some_features(size, seed).flatten(1).bfloat16()
    law = torch.zeros(answer, 3)
    tokens = torch.tensor(some_tokens(size, seed))
    return TeacherText(tokens, prompt, 0.0, features, law.long(), law)


@torch.inference_mode()
def unrolled(model: EagleModel, *texts: TeacherText, steps: int = STEPS) -> list[Tensor]:
    return unroll(model, collate(texts, CPU), steps)


@torch.inference_mode()
def slowly(model: EagleModel, one: TeacherText) -> dict[tuple[int, int], Tensor]:
    """States by step and column. A column sees step 0 up to itself, and itself in later steps."""
    states: dict[tuple[int, int], Tensor] = {}
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    tokens, layer = one.tokens, model.midlayer
    for step in range(STEPS):
        for column in range(len(tokens) - 1 - step):
            hidden = model.fuse(one.features[column]) if step == 0 else states[step - 1, column]
            angles = rotary(model.config, torch.tensor(column + step))
            embedded = model.embed(tokens[column + 1 + step])
            query, key, value = layer.project(embedded, hidden, angles)
            seen[step, column] = key, value
            places = [(0, at) for at in range(column + 1)]
            places += [(at, column) for at in range(1, step + 1)]
            attended = attention(query, [seen[place] for place in places])
            states[step, column] = layer.finish(hidden, attended)
    return states


def attention(query: Tensor, seen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """query [heads, d] to keys and values [kv_heads, d], two heads to each."""
    out = []
    for head, q in enumerate(query):
        scores = torch.stack([q @ key[head // 2] for key, _ in seen]) / math.sqrt(len(q))
        out.append(scores.softmax(0) @ torch.stack([value[head // 2] for _, value in seen]))
    return torch.cat(out)


@pytest.mark.parametrize(("prompt", "answer"), [(9, 6), (5, 3), (13, 1)])
def test_step_k_guesses_an_answer_from_what_was_known_k_tokens_before(
    model: EagleModel, prompt: int, answer: int
) -> None:
    """The guess at a token comes from the state two columns before it and one more per step."""
    one = text(prompt, answer)
    states = slowly(model, one)
    outputs = unrolled(model, one)
    assert len(outputs) == STEPS
    for step, output in enumerate(outputs):
        assert output.shape[:2] == (1, answer)
        for place in range(answer):
            expected = states[step, prompt + place - 2 - step]
            torch.testing.assert_close(output[0, place], expected, **CLOSE)


def test_a_text_alone_is_as_beside_longer_and_shorter_ones(model: EagleModel) -> None:
    """Padding on either side is seen by nobody."""
    texts = [text(9, 6), text(20, 2, 1), text(6, 15, 2), text(6, 1, 3)]
    together = unrolled(model, *texts)
    for row, one in enumerate(texts):
        answer = len(one.top_ids)
        for ours, alone in zip(together, unrolled(model, one), strict=True):
            torch.testing.assert_close(ours[row, :answer], alone[0], **CLOSE)


def test_how_far_ahead_it_is_asked_changes_no_nearer_guess(model: EagleModel) -> None:
    one = text(9, 6)
    for steps in range(1, STEPS):
        for ours, whole in zip(
            unrolled(model, one, steps=steps), unrolled(model, one), strict=False
        ):
            torch.testing.assert_close(ours, whole, **CLOSE)


@pytest.mark.parametrize("place", [0, 3, 5])
def test_nothing_is_guessed_from_what_comes_later(model: EagleModel, place: int) -> None:
    one, other = text(9, 6), text(9, 6)
    at = 9 + place  # the token that is guessed
    before = unrolled(model, one)
    other.tokens[at:] = 5
    for step in range(STEPS):
        other.features[at - 1 - step :] = 7.0
        after = unrolled(model, other)
        assert torch.equal(after[step][0, place], before[step][0, place])
    other.features[at - 1 - STEPS] = 7.0
    assert not torch.equal(unrolled(model, other)[STEPS - 1][0, place], before[STEPS - 1][0, place])


def test_every_step_and_weight_is_learned_from(tiny_folder: Path) -> None:
    student = EagleStudent(attentive_eagle(tiny_folder))
    student.model.requires_grad_(True)
    outputs = student.unroll(collate([text(9, 6)], CPU), STEPS)
    student.logits(outputs[-1]).logsumexp(-1).sum().backward()
    for name, weight in student.model.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) > 0, name
    assert torch.equal(student.vocabulary, student.model.vocabulary)
