"""What can be a target, what is refused and why, and drafts made of some of a target's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    BambaConfig,
    Gemma2Config,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    T5Config,
)

from tests.tiny import make_target
from workers.engine.model import (
    check_config,
    eos_token_ids,
    kv_shape,
    load_model,
    parse_dtype,
)
from workers.engine.pack import Pack, Segment, chain_parents
from workers.engine.runner import Runner

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "eos_token_id": 3,
}

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=8), "sliding_attention"),
        (Gemma2Config(), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2), "sliding_attention"),
        (MambaConfig(), "linear_attention|mamba"),
        (BambaConfig(attn_layer_indices=[0]), "cannot roll back"),
        (T5Config(), "encoder-decoder models are not supported"),
        (LlamaConfig(rope_parameters=DYNAMIC), "'dynamic' rotary embeddings change"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else "",
)
def test_what_would_not_be_exact_is_refused_with_the_reason(
    config: PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^target: .*({reason})"):
        check_config(config)


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(), MistralConfig(sliding_window=None), Qwen2Config(), Qwen3Config()],
    ids=lambda config: type(config).__name__,
)
def test_full_attention_is_taken(config: PreTrainedConfig) -> None:
    check_config(config)


def test_it_is_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    MistralConfig(sliding_window=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding_attention"):
        load_model(tmp_path, dtype="float32", device=CPU)


def test_model_code_with_attention_classes_of_its_own_is_refused(tmp_path: Path) -> None:
    config = GPTNeoConfig(
        vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]
    )
    GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not let its attention be replaced"):
        load_model(tmp_path, dtype="float32", device=CPU)


def test_dtypes_have_names() -> None:
    assert parse_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match=r"^dtype: 'int7' is not one of float32, bfloat16"):
        parse_dtype("int7")


def test_the_kv_shape_counts_kv_heads_and_their_own_width(tiny_folder: Path) -> None:
    assert kv_shape(AutoConfig.from_pretrained(tiny_folder)) == (2, 2, 8)
    assert kv_shape(Qwen3Config(**TINY, head_dim=24)) == (3, 1, 24)


def test_eos_ids_are_the_generation_configs_or_else_the_models(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "model", eos_token_id=[4, 5])
    model = load_model(folder, dtype="float32", device=CPU)
    assert eos_token_ids(model) == {4, 5}
    assert model.generation_config is not None
    model.generation_config.eos_token_id = 7
    assert eos_token_ids(model) == {7}
    model.generation_config = None
    assert eos_token_ids(model) == {4, 5}
    model.config.eos_token_id = None
    assert eos_token_ids(model) == frozenset()


# -- some of the layers --------------------------------------------------------------------------


def logits_of(folder: Path, layers: tuple[int, ...] = ()) -> torch.Tensor:
    runner = Runner(load_model(folder, dtype="float32", device=CPU, layers=layers), 16)
    first = Segment((5, 6, 7), 0, chain_parents(3), ((0, 3),), ())
    runner.forward(Pack((first,)))
    return runner.forward(Pack((Segment((8, 9), 3, chain_parents(2), ((0, 5),), (0, 1)),))).logits


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose config lists the kind of every layer."""
    folder = tmp_path_factory.mktemp("qwen")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**TINY, initializer_range=0.3)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (2,), (1, 0)])
def test_layers_are_the_models_own_in_the_order_given(qwen: Path, layers: tuple[int, ...]) -> None:
    whole = Qwen2ForCausalLM.from_pretrained(qwen, attn_implementation="eager").eval()
    kept = torch.nn.ModuleList([whole.model.layers[layer] for layer in layers])
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    whole.model.layers = kept
    whole.config.num_hidden_layers = len(layers)
    with torch.inference_mode():
        expected = whole(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False).logits[0, 3:]
    torch.testing.assert_close(logits_of(qwen, layers), expected, rtol=0, atol=1e-5)


def test_no_layers_named_keeps_them_all(qwen: Path) -> None:
    torch.testing.assert_close(logits_of(qwen), logits_of(qwen, (0, 1, 2)), rtol=0, atol=0)


@pytest.mark.parametrize("layers", [(3,), (0, -1), (0, 28, 29)])
def test_layers_that_are_not_there_are_refused(qwen: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="^layers: the model has layers 0 to 2, not "):
        load_model(qwen, dtype="float32", device=CPU, layers=layers)


def test_a_layer_cannot_stand_twice(qwen: Path) -> None:
    with pytest.raises(ValueError, match=r"^layers: \[1, 1\] names one twice"):
        load_model(qwen, dtype="float32", device=CPU, layers=(1, 1))
