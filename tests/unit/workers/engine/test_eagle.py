"""The eagle draft's folder, whose it is, and what it starts from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.eagles import HIDDEN, LAYERS, eagle_config, save_tiny_eagle, tiny_eagle
from workers.draft import DraftUpdate, Features
from workers.eagle_member import EagleMember
from workers.engine.eagle import (
    CONFIG,
    WEIGHTS,
    EagleModel,
    check_continues,
    continue_eagle,
    load_eagle,
    new_eagle,
    read_eagle_config,
)
from workers.engine.weights import identity_of

pytestmark = pytest.mark.usefixtures("single_thread")

TRAINED = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "midlayer.input_layernorm.weight": (HIDDEN,),
    "midlayer.hidden_norm.weight": (HIDDEN,),
    "midlayer.self_attn.q_proj.weight": (32, 2 * HIDDEN),
    "midlayer.self_attn.k_proj.weight": (16, 2 * HIDDEN),
    "midlayer.self_attn.v_proj.weight": (16, 2 * HIDDEN),
    "midlayer.self_attn.o_proj.weight": (HIDDEN, 32),
    "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    "midlayer.mlp.gate_proj.weight": (32, HIDDEN),
    "midlayer.mlp.up_proj.weight": (32, HIDDEN),
    "midlayer.mlp.down_proj.weight": (HIDDEN, 32),
    "norm.weight": (HIDDEN,),
}


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A saved draft, to be spoiled."""
    return save_tiny_eagle(tiny_eagle(tiny_folder), tmp_path / "eagle", tiny_folder)


def outputs(model: EagleModel) -> list[Tensor]:
    """Of each of its functions, for some input."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, HIDDEN, generator=generator).to(model.dtype)
    embedded = model.embed(torch.tensor([3, 9, 70, 200, 0]))
    angles = torch.ones(5, 1, 8), torch.zeros(5, 1, 8)
    return [
        embedded,
        model.fuse(torch.cat([hidden, embedded], -1)),
        *model.midlayer.project(embedded, hidden, angles),
        model.midlayer.finish(hidden, embedded),
        model.logits(hidden),
    ]


# -- the folder ------------------------------------------------------------------------------------


def test_its_tensors_have_the_names_that_others_read(folder: Path, tiny_folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    to_target, is_drafts = tensors.pop("d2t"), tensors.pop("t2d")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == TRAINED
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    vocabulary = tiny_eagle(tiny_folder).vocabulary.tolist()
    assert [own + int(to_target[own]) for own in range(len(to_target))] == vocabulary
    assert is_drafts.dtype == torch.bool
    assert is_drafts.nonzero().flatten().tolist() == vocabulary
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == len(vocabulary) < config["vocab_size"] == len(is_drafts)


@torch.inference_mode()
def test_what_is_saved_comes_back_up_to_bfloat16(
    folder: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    saved, back = tiny_eagle(tiny_folder), load_eagle(folder, tiny_folder, "drafts.d")
    assert back.config == saved.config == read_eagle_config(folder)[0]
    assert torch.equal(back.vocabulary, saved.vocabulary)
    for ours, theirs in zip(outputs(back), outputs(saved), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03 * float(theirs.abs().max()))
    again = save_tiny_eagle(back, tmp_path / "again", tiny_folder)
    assert (again / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert (again / CONFIG).read_bytes() == (folder / CONFIG).read_bytes()


@torch.inference_mode()
def test_it_scores_its_own_tokens_with_the_targets_head(folder: Path, tiny_folder: Path) -> None:
    model = load_eagle(folder, tiny_folder, "drafts.d")
    head = LlamaForCausalLM.from_pretrained(tiny_folder).lm_head.weight
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected = (model.norm(hidden) @ head.T)[:, model.vocabulary]
    torch.testing.assert_close(model.logits(hidden), expected)


def test_the_layers_it_reads_are_told_without_loading_it(folder: Path, tiny_folder: Path) -> None:
    config, made_for = read_eagle_config(folder)
    assert config.feature_layers == LAYERS
    assert made_for == identity_of(tiny_folder, "tiny")


@torch.inference_mode()
def test_trained_weights_go_on_under_another_vocabulary(folder: Path, tiny_folder: Path) -> None:
    trained = load_eagle(folder, tiny_folder, "drafts.d")
    model = tiny_eagle(tiny_folder, seed=5, vocabulary=torch.arange(10, 30))
    continue_eagle(model, folder, tiny_folder, "start")
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    both = [i for i, token in enumerate(trained.vocabulary.tolist()) if 10 <= token < 30]
    here = [token - 10 for token in trained.vocabulary[both].tolist()]
    torch.testing.assert_close(model.logits(hidden)[:, here], trained.logits(hidden)[:, both])
    for name in ("fc", "midlayer"):
        expected = getattr(trained, name).state_dict()
        torch.testing.assert_close(getattr(model, name).state_dict(), expected)


def test_weights_for_other_layers_of_the_target_are_refused(
    folder: Path, tiny_folder: Path
) -> None:
    config = tiny_eagle(tiny_folder, feature_layers=(2, 1)).config
    with pytest.raises(ValueError, match=r"^start: .*\(1, 2\).*would be.*\(2, 1\)"):
        check_continues(folder, config, identity_of(tiny_folder, "tiny"), "start")


# -- refused ---------------------------------------------------------------------------------------


def test_a_draft_for_another_target_is_refused_with_the_reason(
    folder: Path, stranger_folder: Path
) -> None:
    reason = r"^drafts\.d: was made for the target 'tiny' \(2 layers of 32, weights \w{16}\), not"
    with pytest.raises(ValueError, match=reason + ".*prepare-draft"):
        load_eagle(folder, stranger_folder, "drafts.d")


def without(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[name]
        save_file(tensors, folder / WEIGHTS)

    return spoil


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / WEIGHTS)

    return spoil


def cut_off(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        *((without(name), rf"{name} is missing, not \[") for name in TRAINED),
        (changed("fc.weight", lambda t: t[:, 1:]), r"fc\.weight is \[32, 63\], not \[32, 64\]"),
        (changed("norm.weight", lambda t: t[1:]), r"norm\.weight is \[31\], not \[32\]"),
        (without("d2t"), "d2t"),
        (changed("d2t", lambda t: t[1:]), r"d2t is torch\.int64 \["),
        (changed("d2t", lambda t: t[:1]), r"d2t is torch\.int64 \[1\]"),
        (changed("d2t", lambda t: t > 0), r"d2t is torch\.bool"),
        (changed("d2t", lambda t: t + 1000), "d2t does not lead"),
        (changed("d2t", lambda t: t - 1000), "d2t does not lead"),
        (changed("d2t", lambda t: t - torch.arange(len(t))), "d2t does not lead"),
        (cut_off, ""),
        (lambda folder: (folder / WEIGHTS).unlink(), "No such file"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    folder: Path, tiny_folder: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(folder)
    path = folder / WEIGHTS
    with pytest.raises(ValueError, match=rf"^drafts\.d: {path} does not fit its config: .*{named}"):
        load_eagle(folder, tiny_folder, "drafts.d")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "'target'"),
        ({"target": None}, "TypeError"),
        ({"target": {"name": "x"}}, "missing 3 required"),
        ({"feature_layers": None}, "feature_layers: Input should be a valid tuple"),
        ({"hidden_size": ...}, "'hidden_size'"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"hidden_size": 16}, "hidden_size 16 is not the target's"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"feature_layers": []}, "not some of 1 to 2"),
        ({"feature_layers": [1, 99]}, "not some of 1 to 2"),
        ({"feature_layers": [2, 2]}, "not some of 1 to 2, each once"),
    ],
    ids=str,
)
def test_a_config_that_is_no_eagle_drafts_is_refused(
    folder: Path, tiny_folder: Path, config: Any, named: str
) -> None:
    path = folder / CONFIG
    if isinstance(config, dict):
        saved = json.loads(path.read_text(encoding="utf-8")) | config
        config = json.dumps({name: value for name, value in saved.items() if value is not ...})
    path.write_text(config, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{folder}: is no eagle draft .*{named}.*prepare-draft"):
        load_eagle(folder, tiny_folder, "drafts.d")


def test_a_folder_of_another_model_is_no_eagle_draft(tiny_folder: Path, tmp_path: Path) -> None:
    for other in (tiny_folder, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=rf"^{other}: is no eagle draft"):
            read_eagle_config(other)


# -- what it starts from ---------------------------------------------------------------------------


def test_its_layer_starts_as_the_targets_last(tiny_folder: Path) -> None:
    """With all neurons, the last layer's own input and deaf to embeddings it says what the target
    says: what follows the token that the features stand at.
    """
    wide = {"intermediate_size": 48, "feature_layers": (1,)}
    model = tiny_eagle(tiny_folder, vocabulary=torch.arange(273), **wide)
    model.fc.weight.copy_(torch.eye(HIDDEN))
    model.midlayer.qkv_proj.weight[:, :HIDDEN] = 0
    target = LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    tokens = tuple(range(40, 60))
    with torch.inference_mode():
        told = target(torch.tensor([tokens]), output_hidden_states=True)
    member = EagleMember(model)
    for last in range(1, 20):
        states = told.hidden_states[1][0, :last, None]
        member.commit(DraftUpdate(last, 0, tokens[: last + 1], Features(0, (1,), states)))
    for last, law in member.catch_up(range(1, 20)).items():
        p = told.logits[0, last - 1].softmax(-1)
        assert law.ids == tuple(p.topk(8).indices.tolist())
        assert law.probs == pytest.approx(p.topk(8).values.tolist(), rel=1e-4)


def test_of_a_wider_mlp_it_keeps_the_neurons_that_write_most(tiny_folder: Path) -> None:
    model = tiny_eagle(tiny_folder, intermediate_size=10)
    mlp = LlamaForCausalLM.from_pretrained(tiny_folder).model.layers[1].mlp
    kept = mlp.down_proj.weight.norm(dim=0).topk(10).indices.sort().values
    gate, up = model.midlayer.gate_up_proj.weight.chunk(2)
    assert torch.equal(model.midlayer.down_proj.weight, mlp.down_proj.weight[:, kept])
    assert torch.equal(gate, mlp.gate_proj.weight[kept])
    assert torch.equal(up, mlp.up_proj.weight[kept])


def test_what_has_no_model_in_the_target_starts_small_and_random(tiny_folder: Path) -> None:
    model, other = tiny_eagle(tiny_folder, seed=0), tiny_eagle(tiny_folder, seed=1)
    for part, start in (
        (lambda m: m.midlayer.qkv_proj.weight[:, :HIDDEN], torch.zeros(64, HIDDEN)),
        (lambda m: m.fc.weight, torch.eye(2 * HIDDEN)[HIDDEN:]),
    ):
        assert 0.01 < float((part(model) - start).std()) < 0.03
        assert not torch.equal(part(model), part(other))
        assert torch.equal(part(model), part(tiny_eagle(tiny_folder, seed=0)))


def test_heads_of_another_number_start_at_random(tiny_folder: Path) -> None:
    """The other parts are the target's all the same."""
    ids = torch.arange(100)
    config = eagle_config(100, num_attention_heads=8, num_key_value_heads=1)
    model = new_eagle(tiny_folder, config, ids, torch.Generator().manual_seed(0))
    layer = LlamaForCausalLM.from_pretrained(tiny_folder).model.layers[1]
    assert float(model.midlayer.qkv_proj.weight.detach().abs().max()) < 0.2
    kept = layer.mlp.down_proj.weight.norm(dim=0).topk(32).indices.sort().values
    assert torch.equal(model.midlayer.down_proj.weight, layer.mlp.down_proj.weight[:, kept])


# -- in use ----------------------------------------------------------------------------------------


def test_drafts_of_one_target_share_its_embedding(folder: Path, tiny_folder: Path) -> None:
    one, other = (load_eagle(folder, tiny_folder, "drafts.d") for _ in range(2))
    assert one.embedding.data_ptr() == other.embedding.data_ptr()
