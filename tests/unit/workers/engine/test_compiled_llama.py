"""The compiled pass computes what transformers' own does, and its rows are nobody's business."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.int8 import round_weights, rounded_input
from tests.tiny import make_target
from workers.engine import pass_work, passes
from workers.engine.compiled_llama import CompiledLlama, can_compile
from workers.engine.model import load_model
from workers.engine.pack import Pack, Segment, chain_parents, tree_parents
from workers.engine.passes import GenericPass
from workers.engine.runner import Runner

CPU = torch.device("cpu")
FEATURES = (1, 3)
DTYPES = ["float32", "bfloat16"]

pytestmark = pytest.mark.skipif(not pass_work.COMPILES, reason="nothing is compiled here")


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
    """Everything that the compiled pass gives beside what the generic one does."""
    compiled, by_compiled = run(folder, dtype)
    assert isinstance(compiled._pass, CompiledLlama)
    monkeypatch.setattr(passes, "can_compile", lambda model: False)
    generic, by_generic = run(folder, dtype)
    assert isinstance(generic._pass, GenericPass)
    return zip(by_compiled, by_generic, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_close_to_the_generic_pass_as_rounding_allows(
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


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_a_path_has_the_same_bits_in_a_tree_alone_and_beside_another(
    folder: Path, dtype: str
) -> None:
    runner = Runner(load_model(folder, dtype=dtype, device=CPU), 96, int8=dtype == "int8")
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


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_a_prompt_has_the_same_bits_in_any_chunks_and_with_any_number_of_threads(
    folder: Path, dtype: str
) -> None:
    runner = Runner(load_model(folder, dtype=dtype, device=CPU), 96, int8=dtype == "int8")
    tokens = tuple(range(3, 63))

    def read(*sizes: int) -> torch.Tensor:
        found, start = [], 0
        for size in sizes:
            own = tokens[start : start + size]
            extents, rows = ((0, start + size),), tuple(range(size))
            chunk = Segment(own, start, chain_parents(size), extents, rows)
            found.append(runner.forward(Pack((chunk,))).logits)
            start += size
        return torch.cat(found)

    whole = read(60)
    assert torch.equal(read(1, 2, 13, 44), whole)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(read(60), whole)
        assert torch.equal(read(59, 1), whole)
    finally:
        torch.set_num_threads(before)


def test_int8_is_the_model_with_weights_and_inputs_rounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = load_model(folder, dtype="float32", device=CPU)
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            round_weights(module)
            module.register_forward_pre_hook(rounded_input)
    ours = Runner(load_model(folder, dtype="float32", device=CPU), 96, int8=True)
    monkeypatch.setattr(passes, "can_compile", lambda model: False)
    monkeypatch.setattr(passes, "can_pack", lambda *_: False)
    theirs = Runner(rounded, 96)
    for pack in packs():
        found, expected = ours.forward(pack).logits, theirs.forward(pack).logits
        # A few inputs lie so near the middle of two steps that they are rounded otherwise.
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_int8_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    biased = make_target(tmp_path / "biased", attention_bias=True)
    with pytest.raises(ValueError, match=r"^target\.dtype: int8 is for models of Llama's kind"):
        Runner(load_model(biased, dtype="int8", device=CPU), 96, int8=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_no_numbers_are_of_their_own_row(folder: Path, dtype: str) -> None:
    model = load_model(folder, dtype=dtype, device=CPU)
    model.get_input_embeddings().weight[9] = float("nan")
    runner = Runner(model, 96)
    tree = Segment((5, 9, 7), 0, tree_parents((-1, -1)), ((0, 3),), (0, 1, 2))
    logits = runner.forward(Pack((tree,))).logits
    assert logits[1].isnan().all()
    alone = Segment((5, 7), 0, (-1, 0), ((0, 2),), (0, 1))
    assert torch.equal(runner.forward(Pack((alone,))).logits, logits[[0, 2]])


def test_other_models_keep_the_generic_pass(tmp_path: Path) -> None:
    plain = load_model(make_target(tmp_path / "plain"), dtype="float32", device=CPU)
    biased = make_target(tmp_path / "biased", attention_bias=True)
    assert can_compile(plain)
    assert not can_compile(load_model(biased, dtype="float32", device=CPU))
    assert not can_compile(load_model(tmp_path / "plain", dtype="float16", device=CPU))


def test_its_weights_are_not_kept_twice(folder: Path) -> None:
    model = load_model(folder, dtype="float32", device=CPU)
    Runner(model, 16)
    left = {name for name, _ in model.named_parameters() if "proj" in name}
    assert not left
