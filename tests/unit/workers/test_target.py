"""Loading a target: what it says about itself, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import CONTEXT, make_target, tiny_tokenizer
from workers.engine.pack import Pack, Segment, chain_parents
from workers.target import PAGE_SIZE, Target, TargetSpec, load_target

pytestmark = pytest.mark.usefixtures("single_thread")


def load(folder: Path, **changes: Any) -> Target:
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_tokens": 100}
    return load_target(TargetSpec(str(folder), **settings | changes))


def test_it_knows_its_vocabulary_context_and_end(tiny_folder: Path) -> None:
    target = load(tiny_folder)
    assert target.vocab_size == len(tiny_tokenizer()) == len(target.tokenizer)
    assert target.context_length == CONTEXT
    assert target.eos_token_ids == {target.tokenizer.eos_token_id}
    assert not target.sharded
    assert target.pool.pages * target.pool.page_size == 112, "whole pages, none too few"
    assert target.pool.page_size == PAGE_SIZE


def test_the_context_may_be_shorter_than_the_models_but_not_longer(tiny_folder: Path) -> None:
    assert load(tiny_folder, context_length=50).context_length == 50
    for length in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=rf"^target\.context_length: {length} is not between"):
            load(tiny_folder, context_length=length)


def test_kept_tokens_move_to_their_places(tiny_folder: Path) -> None:
    target = load(tiny_folder)
    target.pool.open(0)

    def forward(tokens: tuple[int, ...], parents: tuple[int, ...]) -> torch.Tensor:
        target.pool.reserve(0, len(tokens))
        start, rows = target.pool.committed(0), (len(tokens) - 1,)
        return target.forward(
            Pack((Segment(tokens, start, parents, target.pool.extents(0), rows),))
        ).logits

    forward((5, 6, 7, 8), (-1, 0, 0, 2))
    target.commit(0, (0, 2, 3), (5, 7, 8))
    after = forward((9,), (-1,))
    target.pool.rollback(0)
    target.pool.close(0)
    target.pool.open(0)
    expected = forward((5, 7, 8, 9), chain_parents(4))
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, r"^target\.device: 'tpu' is not cpu or cuda"),
        ({"kv_tokens": 0}, r"^target\.kv_tokens: 0 is not 1 or more"),
        ({"tensor_parallel": 0}, r"^target\.tensor_parallel: 0 is not 1 or more"),
        ({"threads": -1}, r"^target\.threads: -1 is not 0"),
        ({"dtype": "int7"}, r"^dtype: 'int7' is not one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_by_name(
    tiny_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(tiny_folder, **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said(tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^target\.device: this machine has no usable GPU"):
        load(tiny_folder, device="cuda")


def test_a_padded_vocabulary_is_the_models(tmp_path: Path) -> None:
    """Logits have that many columns; ids without a token may still be drawn, as by the target."""
    folder = make_target(tmp_path / "padded", vocab_size=300)
    assert load(folder).vocab_size == 300
