"""A Llama's pass on a CPU in as few operations as it takes.

transformers' own takes half of a small pass's time between its matrix products: seven of them a
layer, modules within modules, and each head's rotation by itself. Here the products of one input
are one, there are no modules, and what lies between two products is one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore
from workers.engine.layer_steps import HeadShape, open_steps
from workers.engine.packed_linear import PackedLinear, can_pack


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether it is a Llama like most, on a machine that has packed layers for it."""
    config = model.config
    return (
        type(model) is LlamaForCausalLM
        and can_pack(model.dtype, model.device)
        and not (config.attention_bias or config.mlp_bias)
        and config.hidden_act == "silu"
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    before_attention: Tensor
    qkv: PackedLinear
    out: PackedLinear
    before_mlp: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class FusedLlama:
    """The pass of a model, whose linear layers it takes over: the model is of no use afterwards.

    feature_layers: as `workers.engine.runner.Runner` has it.
    """

    def __init__(self, model: LlamaForCausalLM, feature_layers: Sequence[int]) -> None:
        config = model.config
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        shape = HeadShape(
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
            model.model.layers[0].self_attn.head_dim,
        )
        self._steps = open_steps(shape, model.dtype, model.device)
        self._eps = config.rms_norm_eps
        self._final_norm = model.model.norm.weight
        self._head = PackedLinear(model.lm_head)
        self._layers = [_take_over(layer) for layer in model.model.layers]
        self._feature_layers = tuple(feature_layers)

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, store: KVStore, plan: AttentionPlan
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """tokens, positions [T], rows: those whose logits are wanted -> logits [rows, vocabulary],
        and by feature layer the hidden states [T, hidden].
        """
        x = self._embedding[tokens]
        cosine, sine = self._rotary(x[None], positions[None])
        angles = cosine[0], sine[0]
        steps, eps = self._steps, self._eps
        features = {}
        delta = torch.zeros_like(x)  # what the last product adds to x, which each norm does first
        for number, layer in enumerate(self._layers):
            normal = steps.add_norm(x, delta, layer.before_attention, eps)
            if number in self._feature_layers:
                features[number] = x.clone()
            qkv = layer.qkv.forward(normal)
            attended = steps.attend(qkv, angles, store.keys[number], store.values[number], plan)
            normal = steps.add_norm(x, layer.out.forward(attended), layer.before_mlp, eps)
            delta = layer.down.forward(steps.gate(layer.gate_up.forward(normal)))
        normal = steps.add_norm(x, delta, self._final_norm, eps)
        if len(self._layers) in self._feature_layers:
            features[len(self._layers)] = x
        return self._head.forward(normal[rows]), features


def _take_over(layer: Any) -> _Layer:
    """A layer's weights, packed; its own are dropped as they go, or all would be there twice."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _join(attention, "q_proj", "k_proj", "v_proj")
    out = _join(attention, "o_proj")
    gate_up = _join(mlp, "gate_proj", "up_proj")
    down = _join(mlp, "down_proj")
    return _Layer(
        layer.input_layernorm.weight, qkv, out, layer.post_attention_layernorm.weight, gate_up, down
    )


def _join(module: nn.Module, *names: str) -> PackedLinear:
    """Linear layers of one input as one."""
    weights = [getattr(module, name).weight for name in names]
    joined = nn.Linear(weights[0].shape[1], sum(map(len, weights)), bias=False, device="meta")
    joined.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    for name in names:
        delattr(module, name)
    return PackedLinear(joined)
