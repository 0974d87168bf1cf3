"""Single tensors of a folder, and which model it is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.tiny import make_target
from workers.engine.weights import TargetIdentity, Weights, identity_of

WEIGHTS = "model.safetensors"


def copy_of(folder: Path, to: Path, dtype: torch.dtype, shard: str = "5GB") -> Path:
    """The same model saved by transformers in another form."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(to, max_shard_size=shard)
    return to


def test_its_tensors_are_those_of_the_model(tiny_folder: Path) -> None:
    model, weights = LlamaForCausalLM.from_pretrained(tiny_folder), Weights(tiny_folder)
    assert weights.names() == sorted(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert name in weights
        assert torch.equal(weights.read(name), tensor)
    assert torch.equal(weights.embedding(), model.get_input_embeddings().weight)
    assert torch.equal(weights.head(), model.get_output_embeddings().weight)
    assert not torch.equal(weights.head(), weights.embedding())


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    weights = Weights(make_target(tmp_path / "tied", tie_word_embeddings=True))
    assert "lm_head.weight" not in weights
    assert torch.equal(weights.head(), weights.embedding())


def test_what_is_missing_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tiny_folder}: its weights hold no model\.nothing$"):
        Weights(tiny_folder).read("model.nothing")
    with pytest.raises(ValueError, match=rf"^{tmp_path}: holds no \*\.safetensors$"):
        Weights(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"0 of its tensors are called \*embed_tokens\.weight$"):
        Weights(tmp_path).embedding()


# -- which model it is -----------------------------------------------------------------------------


def test_a_model_is_the_same_in_any_file_and_dtype(tiny_folder: Path, tmp_path: Path) -> None:
    own = identity_of(tiny_folder, "tiny")
    assert (own.name, own.hidden_size, own.layers) == ("tiny", 32, 2)
    sharded = copy_of(tiny_folder, tmp_path / "sharded", torch.float32, shard="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert identity_of(sharded, "tiny") == own
    assert torch.equal(Weights(sharded).head(), Weights(tiny_folder).head())
    halved = copy_of(tiny_folder, tmp_path / "bfloat16", torch.bfloat16)
    assert Weights(halved).head().dtype == torch.bfloat16
    assert identity_of(halved, "tiny") == own
    own.check_same(identity_of(halved, "another name"), "a draft")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_any_tensor_that_was_trained_on_makes_it_another(
    tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    tensors = load_file(tiny_folder / WEIGHTS)
    tensors[name] *= 1.02
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    own, other = identity_of(tiny_folder, "tiny"), identity_of(tmp_path, "tiny")
    assert other.weights != own.weights
    with pytest.raises(ValueError, match=r"^drafts\.d: was made for the target 'tiny' \(2 layers"):
        own.check_same(other, "drafts.d")


def test_the_shape_alone_tells_models_apart() -> None:
    own = TargetIdentity("a", 32, 2, "f00")
    for other in (TargetIdentity("a", 64, 2, "f00"), TargetIdentity("a", 32, 3, "f00")):
        with pytest.raises(ValueError, match=r"not for this one \(2 layers of 32, weights f00\)"):
            own.check_same(other, "d")


def test_the_text_model_of_a_larger_one_is_what_counts(tiny_folder: Path, tmp_path: Path) -> None:
    save_file(load_file(tiny_folder / WEIGHTS), tmp_path / WEIGHTS)
    config = json.loads((tiny_folder / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 7, "text_config": config}))
    assert identity_of(tmp_path, "tiny") == identity_of(tiny_folder, "tiny")
