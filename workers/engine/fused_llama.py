"""A Llama's pass on a CPU in as few operations as it takes.

transformers' own takes half of a small pass's time between its matrix products: seven of them a
layer, modules within modules, and each head's rotation by itself. Here the products of one input
are one, queries and keys are rotated together, and there are no modules. Each number is computed by
the same operations in the same order, so nothing else changes: a test asserts equal bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.engine.attention import AttentionPlan, attend, rotate
from workers.engine.kv_store import KVStore
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
        self._head_dim = model.model.layers[0].self_attn.head_dim
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads or config.num_attention_heads
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
        cosine, sine = (part[0][:, None] for part in self._rotary(x[None], positions[None]))
        angles = cosine, sine
        features = {}
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, x, angles, store, plan)
            gate, up = layer.gate_up.forward(self._norm(x, layer.before_mlp)).chunk(2, -1)
            x = x + layer.down.forward(silu(gate) * up)
            if number + 1 in self._feature_layers:
                features[number + 1] = x
        return self._head.forward(self._norm(x[rows], self._final_norm)), features

    def _attention(
        self,
        number: int,
        layer: _Layer,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        store: KVStore,
        plan: AttentionPlan,
    ) -> Tensor:
        qkv = layer.qkv.forward(self._norm(x, layer.before_attention))
        heads = qkv.view(len(x), -1, self._head_dim)
        turned = rotate(heads[:, : self._heads + self._kv_heads], angles)
        store.write(
            number,
            plan.new_slots,
            turned[:, self._heads :],
            heads[:, self._heads + self._kv_heads :],
        )
        query = turned[:, : self._heads].transpose(0, 1)[None]
        attended = attend(query, store.keys[number], store.values[number], plan)
        return layer.out.forward(attended.reshape(len(x), -1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """In float32, as transformers has it, but for the weight."""
        return weight * rms_norm(x.float(), weight.shape, None, self._eps).to(x.dtype)


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
