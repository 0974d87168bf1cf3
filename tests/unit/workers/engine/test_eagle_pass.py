"""The compiled pass of an eagle draft says what torch's says, in the dtypes that it is for."""

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.eagles import HIDDEN, LAYERS, attentive_eagle, save_tiny_eagle, tiny_eagle
from tests.int8 import round_weights, rounded_input
from workers.draft import DraftSpec
from workers.eagle_member import EagleMember
from workers.engine import eagle_pass, pass_work
from workers.engine.compiled_eagle import CompiledEagle, can_compile, layer_sizes
from workers.engine.eagle import EagleModel
from workers.engine.eagle_batch import LIKELIEST
from workers.engine.eagle_pass import EaglePass, NewRows, Told
from workers.engine.eagle_store import EagleStore, Pairs
from workers.hybrid_draft import load_hybrid_draft

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(not pass_work.COMPILES, reason="nothing is compiled here"),
]


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def told_by(model: EagleModel, *, int8: bool = False) -> list[Told]:
    """Two prompts, two nodes below the first, a third below both prompts."""
    run = EaglePass(model, int8=int8)
    one, two = run.new_sequence(), run.new_sequence()
    features = some(19, len(LAYERS) * HIDDEN)
    causal = np.tri(12, dtype=np.bool_)
    prompts = run.run(
        [
            NewRows(one, range(20, 32), features[:12], range(12), causal, 1),
            NewRows(two, range(40, 47), features[12:], range(7), causal[:7, :7], 3),
        ],
        fuse=True,
    )
    for pairs in (one, two):
        pairs.committed, pairs.nodes = pairs.nodes, 0
    roots = [told.states[-1:] for told in prompts]
    apart = np.eye(2, dtype=np.bool_)
    nodes = run.run([NewRows(one, (5, 6), roots[0].repeat(2, 1), (12, 12), apart, 2)], fuse=False)
    below = np.array([[False, True, True]])
    deeper = run.run(
        [
            NewRows(one, (7,), nodes[0].states[1:], (13,), below, 1),
            NewRows(two, (7,), roots[1], (7,), below[:, 1:2], 1),
        ],
        fuse=False,
    )
    return [*prompts, *nodes, *deeper]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_it_is_as_close_to_torchs_as_rounding_allows(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, close: float
) -> None:
    model = attentive_eagle(tiny_folder).to(dtype)
    assert isinstance(EaglePass(model)._compute, CompiledEagle)
    ours = told_by(model)
    monkeypatch.setattr(eagle_pass, "can_compile", lambda model: False)
    for mine, theirs in zip(ours, told_by(model), strict=True):
        assert mine.states.dtype == dtype
        scale = float(theirs.states.abs().max())
        torch.testing.assert_close(mine.states, theirs.states, rtol=0, atol=close * scale)
        for law, other in zip(mine.laws, theirs.laws, strict=True):
            assert law.probs == pytest.approx(other.probs, rel=10 * close)
            if dtype == torch.float32:
                assert law.ids == other.ids


def test_int8_is_the_draft_with_weights_and_inputs_rounded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the weights that read features."""
    ours = told_by(attentive_eagle(tiny_folder), int8=True)
    model = attentive_eagle(tiny_folder)
    exact = told_by(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "fc":
            round_weights(module)
            module.register_forward_pre_hook(rounded_input)
    monkeypatch.setattr(eagle_pass, "can_compile", lambda model: False)
    for mine, theirs, whole in zip(ours, told_by(model), exact, strict=True):
        # A few inputs lie so near the middle of two steps that they are rounded otherwise.
        apart = float((mine.states - theirs.states).norm())
        assert apart < 0.3 * float((mine.states - whole.states).norm())


def test_it_guesses_no_more_tokens_than_there_are(tiny_folder: Path) -> None:
    """Its head is filled up to whole vectors, with scores of nothing."""
    few = torch.tensor([9, 40, 77])
    assert len(few) < LIKELIEST
    told = told_by(tiny_eagle(tiny_folder, vocabulary=few))
    for law in (law for own in told for law in own.laws):
        assert sorted(law.ids) == few.tolist()
        assert sum(law.probs) == pytest.approx(1)


def test_sizes_that_fill_no_vectors_are_left_to_torch(tiny_folder: Path) -> None:
    assert can_compile(tiny_eagle(tiny_folder))
    assert not can_compile(tiny_eagle(tiny_folder, intermediate_size=40))
    assert not can_compile(tiny_eagle(tiny_folder).to(torch.float16))


def test_a_loaded_draft_runs_in_bfloat16_and_int8(tiny_folder: Path, tmp_path: Path) -> None:
    folder = save_tiny_eagle(tiny_eagle(tiny_folder), tmp_path / "draft", tiny_folder)
    (folder / "calibration.json").write_bytes(
        Path("drafts/code/eagle/calibration.json").read_bytes()
    )
    spec = DraftSpec("d", "eagle", path=str(folder))
    member = load_hybrid_draft(spec, tiny_folder, threads=1, device="cpu")._eagle
    assert isinstance(member, EagleMember)
    assert member._pass._dtype == torch.bfloat16
    assert isinstance(member._pass._compute, CompiledEagle)
    assert member._pass._compute._bytes_wide > 0


def test_a_store_that_cannot_grow_stays_as_it_is(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels do not look where they write: no slot may be told that is not there."""
    store = EagleStore(layer_sizes(tiny_eagle(tiny_folder)), torch.float32, torch.device("cpu"))
    pairs = Pairs(store)
    assert pairs._slots.device == store.keys.device
    size = len(store.keys)
    pairs.append(np.tri(size, dtype=np.bool_))
    pairs.committed, pairs.nodes = pairs.nodes, 0
    zeros_like, made = torch.zeros_like, []

    def short(x: Tensor) -> Tensor:
        made.append(x)
        if len(made) == 2:
            raise MemoryError
        return zeros_like(x)

    with monkeypatch.context() as memory:
        memory.setattr(torch, "zeros_like", short)
        with pytest.raises(MemoryError):
            pairs.append(np.tri(1, dtype=np.bool_))
    assert len(store.keys) == len(store.values) == size
    pairs.nodes = 0
    plan = pairs.append(np.tri(1, dtype=np.bool_))
    assert int(plan.slots.max()) < len(store.keys) == len(store.values)


def test_a_model_is_not_kept_beside_its_packed_weights(tiny_folder: Path) -> None:
    model = tiny_eagle(tiny_folder)
    run, gone = EaglePass(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert run.new_sequence().committed == 0
