"""The fused pass computes what transformers' own does over the same packed layers: bit for bit with
torch's own operations between them, nearly so with compiled ones, whose rows are nobody's business.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_target
from workers.engine import layer_steps, passes
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


def run_both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Everything that the fused pass gives beside what the generic one does."""
    fused, by_fused = run(folder, dtype)
    assert isinstance(fused._pass, FusedLlama)
    monkeypatch.setattr(passes, "can_fuse", lambda model: False)
    generic, by_generic = run(folder, dtype)
    assert isinstance(generic._pass, GenericPass)
    return zip(by_fused, by_generic, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_torchs_operations_it_has_the_bits_of_the_generic_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(layer_steps, "kernels", None)
    for ours, theirs in run_both(folder, monkeypatch, dtype):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_it_is_as_close_as_rounding_allows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Sums in another order: a few units in the last place of the largest."""
    close = {"float32": 1e-5, "bfloat16": 0.03}[dtype]
    for ours, theirs in run_both(folder, monkeypatch, dtype):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=close * scale)


PROMPT = tuple(range(5, 20))


def answers(runner: Runner, *segments: Segment) -> list[torch.Tensor]:
    """The logits of each segment's rows, after sequences of PROMPT at slots 0 and 48."""
    size = len(PROMPT)
    for start in (0, 48):
        whole = Segment(PROMPT, 0, chain_parents(size), ((start, start + size),), ())
        runner.forward(Pack((whole,)))
    pack = Pack(segments)
    return pack.split_rows(runner.forward(pack).logits)


@pytest.mark.skipif(layer_steps.kernels is None, reason="nothing is compiled here")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_path_has_the_same_bits_in_a_tree_alone_and_beside_another(
    folder: Path, dtype: str
) -> None:
    runner = Runner(load_model(folder, dtype=dtype, device=CPU), 96)
    size = len(PROMPT)
    tree = Segment(
        (3, 9, 4, 11, 8), size, tree_parents((-1, -1, 1, 2)), ((0, size + 5),), tuple(range(5))
    )
    other = Segment((50, 51), size, (-1, 0), ((48, 50 + size),), (0, 1))
    path = Segment((3, 4, 11, 8), size, (-1, 0, 1, 2), ((0, size + 4),), tuple(range(4)))
    (in_tree,) = answers(runner, tree)
    (alone,) = answers(runner, path)
    _, in_batch = answers(runner, other, tree)
    assert torch.equal(in_tree[[0, 2, 3, 4]], alone)
    assert torch.equal(in_batch, in_tree)
    for row, token in enumerate(path.tokens):  # as plain decoding would have it
        step = Segment((token,), size + row, (-1,), ((0, size + row + 1),), (0,))
        logits = runner.forward(Pack((step,))).logits
        assert torch.equal(logits[0], alone[row])


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
