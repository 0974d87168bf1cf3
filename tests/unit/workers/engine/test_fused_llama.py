"""The fused pass computes what transformers' own does, bit for bit, over the same packed layers."""

from pathlib import Path

import pytest
import torch

from tests.tiny import make_target
from workers.engine import passes
from workers.engine.fused_llama import FusedLlama, can_fuse
from workers.engine.model import load_model
from workers.engine.pack import Pack, Segment, chain_parents, tree_parents
from workers.engine.packed_linear import can_pack
from workers.engine.passes import GenericPass
from workers.engine.runner import Runner

CPU = torch.device("cpu")
FEATURES = (1, 3)
DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not can_pack(getattr(torch, dtype), CPU), reason=f"no packed {dtype} layers here"
        ),
    )
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for kernels to work in blocks, with heads that share keys."""
    return make_target(
        tmp_path_factory.mktemp("wide"),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.1,
    )


def packs() -> list[Pack]:
    """A prompt; one token; a tree; and a tree beside another sequence's prompt."""
    first = Segment(tuple(range(5, 45)), 0, chain_parents(40), ((0, 40),), (39,))
    one = Segment((7,), 40, (-1,), ((0, 41),), (0,))
    tree = (3, 9, 4, 11, 8), tree_parents((-1, -1, 0, 2))
    grown = Segment(tree[0], 41, tree[1], ((0, 46),), tuple(range(5)))
    other = Segment(tuple(range(60, 67)), 0, chain_parents(7), ((64, 71),), (6,))
    return [Pack((first,)), Pack((one,)), Pack((grown,)), Pack((grown, other))]


def run(folder: Path, dtype: str) -> tuple[Runner, list[torch.Tensor]]:
    model = load_model(folder, dtype=dtype, device=CPU)
    runner = Runner(model, 96, feature_layers=FEATURES)
    found = []
    for pack in packs():
        output = runner.forward(pack)
        found += [output.logits, output.features]
    return runner, [*found, *runner.store.keys, *runner.store.values]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_the_generic_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    fused, by_fused = run(folder, dtype)
    assert isinstance(fused._pass, FusedLlama)
    monkeypatch.setattr(passes, "can_fuse", lambda model: False)
    generic, by_generic = run(folder, dtype)
    assert isinstance(generic._pass, GenericPass)
    for ours, theirs in zip(by_fused, by_generic, strict=True):
        assert torch.equal(ours, theirs)


def test_other_models_keep_the_generic_pass(tmp_path: Path) -> None:
    plain = load_model(make_target(tmp_path / "plain"), dtype="float32", device=CPU)
    biased = make_target(tmp_path / "biased", attention_bias=True)
    assert can_fuse(plain) == can_pack(torch.float32, CPU)
    assert not can_fuse(load_model(biased, dtype="float32", device=CPU))
    assert not can_fuse(load_model(tmp_path / "plain", dtype="float16", device=CPU))


def test_its_weights_are_not_kept_twice(folder: Path) -> None:
    model = load_model(folder, dtype="float32", device=CPU)
    if not can_fuse(model):
        pytest.skip("no packed layers here")
    Runner(model, 16)
    left = {name for name, _ in model.named_parameters() if "proj" in name}
    assert not left
