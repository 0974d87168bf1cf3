"""What the teacher leaves is what the target says, and an interrupted run keeps it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.eagles import LAYERS, some_tokens
from workers.engine.model import load_model
from workers.engine.pack import Pack
from workers.engine.runner import PassOutput, Runner
from workers.training import teacher
from workers.training.corpus import TargetAnswer
from workers.training.teacher import TOP, TeacherText, bare_text, likeliest_tokens, taught, teach

pytestmark = pytest.mark.usefixtures("single_thread")


class Counting:
    """The tiny target, and how often and with how much it ran."""

    def __init__(self, folder: Path, slots: int = 64) -> None:
        model = load_model(folder, dtype="float32", device=torch.device("cpu"))
        self._runner = Runner(model, slots, feature_layers=LAYERS)
        self.passes: list[int] = []

    def forward(self, pack: Pack) -> PassOutput:
        self.passes.append(len(pack.segments))
        return self._runner.forward(pack)


@pytest.fixture
def model(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Its store has room for the texts of one pass, and each run overwrites the last one's."""
    monkeypatch.setattr(teacher, "PASS_TOKENS", 64)
    return Counting(tiny_folder)


def answers(*sizes: tuple[int, int]) -> list[TargetAnswer]:
    return [
        TargetAnswer(number, False, number % 2 * 0.8, some_tokens(n, number), some_tokens(a, 50))
        for number, (n, a) in enumerate(sizes)
    ]


def same(one: TeacherText, other: TeacherText) -> bool:
    return (one.prompt, one.temperature) == (other.prompt, other.temperature) and all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "features", "top_ids", "top_logprobs")
    )


def test_its_laws_and_features_are_those_of_transformers(
    model: Counting, tiny_folder: Path, tmp_path: Path
) -> None:
    said = answers((5, 7), (1, 9), (12, 1), (20, 30), (30, 33))
    teach(model, said, tmp_path)
    assert model.passes == [3, 1, 1], "neighbours share a pass as far as it has room"
    eager = LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    # transformers norms the last of its hidden states, which are wanted as the layer leaves them
    last: list[torch.Tensor] = []
    eager.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
    texts = taught(tmp_path)
    assert len(texts) == len(said)
    for answer, text in zip(said, texts, strict=True):
        tokens = (*answer.prompt, *answer.tokens)
        assert text.tokens.tolist() == list(tokens)
        assert (text.prompt, text.temperature) == (len(answer.prompt), answer.temperature)
        with torch.inference_mode():
            told = eager(torch.tensor([tokens]), output_hidden_states=True)
        law = told.logits[0, text.prompt - 1 : -1].log_softmax(-1)
        assert text.top_ids.shape == text.top_logprobs.shape == (len(answer.tokens), TOP)
        best = law.topk(TOP).values
        torch.testing.assert_close(text.top_logprobs.float(), best, rtol=1e-3, atol=1e-3)
        own = law.gather(1, text.top_ids.long())
        torch.testing.assert_close(text.top_logprobs.float(), own, rtol=1e-3, atol=1e-3)
        states = torch.stack([told.hidden_states[1][0], last.pop()], 1).flatten(1)
        assert text.features.dtype == torch.bfloat16
        torch.testing.assert_close(text.features, states.bfloat16(), rtol=1e-2, atol=1e-3)


def test_a_run_that_goes_on_keeps_what_is_there(
    model: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_SHARD_TEXTS", 2)
    said = answers((4, 4), (5, 3), (6, 2), (2, 8), (3, 3))
    done: list[int] = []
    teach(model, said, tmp_path / "whole", done.append)
    assert done == [2, 2, 1]
    whole = taught(tmp_path / "whole")
    shards = sorted((tmp_path / "whole").iterdir())
    assert len(shards) == 3
    shards[1].unlink()  # the others are not touched, nor is anything run for them
    before = [shards[0].stat().st_mtime_ns, shards[2].stat().st_mtime_ns]
    model.passes.clear()
    teach(model, said, tmp_path / "whole", done.append)
    assert model.passes == [2]
    assert done == [2, 2, 1] * 2
    assert [shards[0].stat().st_mtime_ns, shards[2].stat().st_mtime_ns] == before
    assert all(map(same, taught(tmp_path / "whole"), whole))
    assert [text.prompt for text in whole] == [4, 5, 6, 2, 3]


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: the system refuses to write more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_what_is_there_is_kept_and_the_way_on_is_told(
    model: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_SHARD_TEXTS", 1)
    said = answers((4, 4), (30, 30))
    with (
        files_at_most(6000),
        pytest.raises(ValueError, match=rf"^--out: {tmp_path} cannot be written .*--resume$"),
    ):
        teach(model, said, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000000.safetensors"]
    teach(model, said, tmp_path)
    assert [len(text.tokens) for text in taught(tmp_path)] == [8, 60]


def test_the_likeliest_tokens_are_those_with_most_of_the_probability(
    model: Counting, tmp_path: Path
) -> None:
    teach(model, answers((4, 20), (5, 20)), tmp_path)
    texts = taught(tmp_path)
    mass = [0.0] * 273
    for text in texts:
        for ids, logprobs in zip(text.top_ids.tolist(), text.top_logprobs, strict=True):
            for token, p in zip(ids, logprobs.double().exp().tolist(), strict=True):
                mass[token] += p
    best = sorted(sorted(range(273), key=lambda token: -mass[token])[:20])
    assert likeliest_tokens(texts, 273, 20).tolist() == best
    assert likeliest_tokens(texts, 273, 1000).tolist() == list(range(273))
    worst = min(range(273), key=lambda token: mass[token])
    also_said = [[worst] * 200, [worst] * 200]
    assert worst in likeliest_tokens(texts, 273, 1, also_said).tolist()


def test_a_bare_text_has_its_tokens_and_no_features() -> None:
    text = bare_text(TargetAnswer(0, True, 0.8, (1, 2, 3), (4, 5)))
    assert (text.tokens.tolist(), text.prompt, text.temperature) == ([1, 2, 3, 4, 5], 3, 0.8)
    assert (len(text.features), len(text.top_ids), text.features.shape[1]) == (5, 2, 0)
