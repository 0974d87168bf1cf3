"""An lm draft in training: some layers of the target, whatever stands beside a text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.eagles import some_tokens
from workers.draft import DraftRequest, DraftSpec, DraftUpdate
from workers.load_draft import load_draft
from workers.training.batch import collate
from workers.training.lm_student import LMStudent, save_lm
from workers.training.teacher import TeacherText

pytestmark = pytest.mark.usefixtures("single_thread")

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
VOCABULARY = torch.tensor([3, 50, 51, 200, 272])


def text(prompt: int, answer: int, seed: int = 0) -> TeacherText:
    law = torch.zeros(answer, 3)
    tokens = torch.tensor(some_tokens(prompt + answer, seed))
    return TeacherText(tokens, prompt, 0.0, torch.zeros(len(tokens), 0), law.long(), law)


TEXTS = [text(9, 6), text(20, 2, 1), text(1, 15, 2), text(6, 1, 3)]


@torch.inference_mode()
def test_it_says_what_its_layers_say_whatever_stands_beside_it(tiny_folder: Path) -> None:
    """All layers are the target; of its scores those of the vocabulary are there."""
    student = LMStudent(tiny_folder, (0, 1), VOCABULARY)
    target = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    outputs = student.unroll(collate(TEXTS, CPU), 2)
    assert len(outputs) == 2
    for row, one in enumerate(TEXTS):
        logits = target(one.tokens[None].long()).logits[0, one.prompt - 1 : -1, VOCABULARY]
        for hidden in outputs:
            own = student.logits(hidden[row, : len(one.top_ids)])
            torch.testing.assert_close(own, logits, **CLOSE)


def test_embeddings_and_head_are_not_trained_and_the_layers_are(tiny_folder: Path) -> None:
    student = LMStudent(tiny_folder, (1,), VOCABULARY)
    trained = {name for name, p in student.model.named_parameters() if p.requires_grad}
    assert "model.layers.0.mlp.up_proj.weight" in trained
    assert not [name for name in trained if "layers.1" in name or "embed" in name or "head" in name]
    hidden = student.unroll(collate(TEXTS, CPU), 1)[0]
    student.logits(hidden).logsumexp(-1).sum().backward()
    for name, weight in student.model.named_parameters():
        assert (weight.grad is not None) == (name in trained), name


def test_layers_that_are_not_there_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^layers: the model has layers 0 to 1, not \[2\]"):
        LMStudent(tiny_folder, (0, 2), VOCABULARY)


def test_what_is_saved_is_a_draft_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    student = LMStudent(tiny_folder, (1,), VOCABULARY)
    save_lm(student, tmp_path, tiny_folder)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (saved.dtype, saved.config.num_hidden_layers) == (torch.bfloat16, 1)
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == (
        AutoTokenizer.from_pretrained(tiny_folder).get_vocab()
    )
    answers = []
    for spec in (
        DraftSpec("saved", "lm", path=str(tmp_path)),
        DraftSpec("layers", "lm", layers=(1,)),
    ):
        draft = load_draft(spec, tiny_folder)
        draft.commit([DraftUpdate(0, 0, some_tokens(9))])
        (answer,) = draft.propose([DraftRequest(0, 9, 5, 1)])
        assert answer is not None
        answers.append(answer)
    assert answers[0].tree.tokens[0] == answers[1].tree.tokens[0]
    assert answers[0].confidence == pytest.approx(answers[1].confidence, rel=0.1)
