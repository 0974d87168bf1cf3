"""Loading a causal language model and refusing, with the reason, what cannot be a target.

A token tree is rolled back by forgetting KV slots. That works only where a layer's whole state is
its keys and values and every token may attend to all before it: full attention.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from workers.engine.attention import IMPLEMENTATION

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.bfloat16,  # all but the weights, which the pass rounds
}


def load_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    tensor_parallel: int = 1,
    layers: Sequence[int] = (),
) -> PreTrainedModel:
    """Load a folder of config and safetensors, ready for `workers.engine.runner.Runner`.

    `layers`: keep only these decoder layers, in this order. Raises ValueError when the model cannot
    be served, saying why.
    """
    kind = parse_dtype(dtype)
    check_config(AutoConfig.from_pretrained(path))
    extra: dict[str, Any] = {}
    if tensor_parallel > 1:
        extra["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=tensor_parallel)
    try:
        with _mesh_on(device):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                path, dtype=kind, attn_implementation=IMPLEMENTATION, **extra
            )
    except KeyError as error:  # older model code has a table of attention classes of its own
        if error.args != (IMPLEMENTATION,):
            raise
        raise ValueError(
            "target: its model code does not let its attention be replaced; use another model"
        ) from error
    if model._is_stateful:
        raise ValueError(
            f"target: {type(model).__name__} carries recurrent state, which cannot be rolled back "
            "when a guess is rejected; use a model with full attention"
        )
    if layers:
        keep_layers(model, layers)
    if tensor_parallel == 1:
        model.to(device)  # type: ignore[arg-type]
    model.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def _mesh_on(device: torch.device) -> Iterator[None]:
    """Has transformers lay the ranks' mesh where they are. By itself it asks what torch was *built*
    for, which is CUDA for PyPI's wheel, also where there is no GPU or it is not to be used.
    """
    built_for = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: device
    try:
        yield
    finally:
        torch._C._get_accelerator = built_for


def check_layers(layers: Sequence[int], there: int) -> None:
    """Raises ValueError when some of `layers` are none of the `there` that a model has."""
    bad = [layer for layer in layers if not 0 <= layer < there]
    if bad:
        raise ValueError(f"layers: the model has layers 0 to {there - 1}, not {bad}")
    if len(set(layers)) < len(layers):
        raise ValueError(f"layers: {list(layers)} names one twice; its KV would be overwritten")


def keep_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Drop all other decoder layers, in place. Raises ValueError as `check_layers` does."""
    text = model.config.get_text_config()
    check_layers(layers, text.num_hidden_layers)
    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList([decoder.layers[layer] for layer in layers])
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index
    text.num_hidden_layers = len(layers)


def parse_dtype(name: str) -> torch.dtype:
    """Raises ValueError naming the choices."""
    if name not in DTYPES:
        raise ValueError(f"dtype: {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model whose layers are not all full attention, before its weights are read."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("target: encoder-decoder models are not supported; use a causal LM")
    # Without a list of kinds, a window is every layer's.
    window = ["sliding_attention"] if getattr(text, "sliding_window", None) else ["full_attention"]
    kinds = set(getattr(text, "layer_types", None) or window) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"target: layers of kind {', '.join(sorted(kinds))} cannot roll back a rejected guess; "
            "use a model with full attention in every layer"
        )
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ValueError(
            f"target: {rope!r} rotary embeddings change with the longest text of the batch, so a "
            "text would depend on its neighbours; use a model with default, linear, yarn or "
            "llama3 scaling"
        )


def kv_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """(layers, KV heads, head dimension) of a model."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.num_hidden_layers, kv_heads, head_dim


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Ids that end an answer, from the generation config or else the model's own."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    if found is None:
        found = model.config.get_text_config().eos_token_id
    return frozenset([found] if isinstance(found, int) else found or [])
