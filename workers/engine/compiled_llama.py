"""A Llama's pass on a CPU as one call of `workers.engine.kernels.llama`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.engine.angles import AngleTable
from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore
from workers.engine.packed_weight import BLOCK, pack, quantise
from workers.engine.pass_work import COMPILES, ELEMENTS, LayerSizes, LayerTable, Rows, run_pass

if COMPILES:
    from workers.engine.kernels import llama, steps


def can_compile(model: PreTrainedModel) -> bool:
    """Whether it is a Llama like most, of sizes that the kernels take."""
    config = model.config
    return (
        COMPILES
        and type(model) is LlamaForCausalLM
        and model.device.type == "cpu"
        and model.dtype in ELEMENTS
        and not (config.attention_bias or config.mlp_bias)
        and config.hidden_act == "silu"
        and all(size % BLOCK == 0 for size in _sizes(model))
    )


class CompiledLlama:
    """The pass of a model, whose linear layers it takes over: the model is of no use afterwards.

    feature_layers: as `workers.engine.runner.Runner` has it; int8: whether weights are rounded to
    that.
    """

    def __init__(
        self, model: LlamaForCausalLM, feature_layers: Sequence[int], *, int8: bool = False
    ) -> None:
        config = model.config
        self._embedding = model.model.embed_tokens.weight
        self._angles = _angle_table(model)
        self._sizes = LayerSizes(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
            model.model.layers[0].self_attn.head_dim,
        )
        sizes = self._sizes
        self._bytes_wide = max(sizes.hidden, sizes.asked, sizes.inner) if int8 else 0
        self._epsilon = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        packing = quantise if int8 else pack
        self._table = LayerTable(config.num_hidden_layers)
        for number, layer in enumerate(model.model.layers):
            self._take_over(number, layer, packing)
        head = packing(model.lm_head.weight)
        self._table.put(self._table.layers, steps.BEFORE_ATTENTION, model.model.norm.weight)
        self._table.put(self._table.layers, steps.TO_QKV, head)
        self._vocabulary, self._outputs = len(model.lm_head.weight), head.outputs
        self._feature_layers = tuple(feature_layers)
        self._store: KVStore | None = None
        weights = torch.int8 if int8 else model.dtype
        self._program = llama.llama_pass(ELEMENTS[weights], ELEMENTS[model.dtype])

    def _take_over(self, number: int, layer: Any, packing: Any) -> None:
        """A layer's weights, packed; its own are dropped, or all would be there twice."""
        attention, mlp = layer.self_attn, layer.mlp
        self._table.put(number, steps.BEFORE_ATTENTION, layer.input_layernorm.weight)
        self._table.put(number, steps.BEFORE_MLP, layer.post_attention_layernorm.weight)
        for place, module, names in (
            (steps.TO_QKV, attention, ("q_proj", "k_proj", "v_proj")),
            (steps.TO_OUT, attention, ("o_proj",)),
            (steps.TO_GATE_UP, mlp, ("gate_proj", "up_proj")),
            (steps.TO_DOWN, mlp, ("down_proj",)),
        ):
            weights = [getattr(module, name).weight for name in names]
            self._table.put(number, place, packing(torch.cat(weights)))
            for name in names:
                delattr(module, name)

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, store: KVStore, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """As `workers.engine.passes.ModelPass` has it."""
        x = self._embedding[tokens]
        features = x.new_empty(len(self._feature_layers), *x.shape)
        self._place(store, features)
        logits = x.new_empty(len(rows), self._outputs)
        run_pass(
            self._program,
            llama.number_of_steps(self._table.layers),
            self._table,
            self._sizes,
            self._epsilon,
            Rows(x, self._angles.at(positions), plan, len(store.keys[0]), rows, logits),
            fields=steps.PASS_FIELDS,
            bytes_wide=self._bytes_wide,
        )
        return logits[:, : self._vocabulary], features.transpose(0, 1)

    def _place(self, store: KVStore, features: Tensor) -> None:
        """Say where keys and values are, and where hidden states go."""
        if store is not self._store:
            for layer, pair in enumerate(zip(store.keys, store.values, strict=True)):
                self._table.put_store(layer, *pair)
            self._store = store
        for layer, states in zip(self._feature_layers, features, strict=True):
            self._table.put_features(layer, states)


def _angle_table(model: LlamaForCausalLM) -> AngleTable:
    rotary, like = model.model.rotary_emb, model.model.embed_tokens.weight[None, :1]

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = rotary(like, positions[None])
        return cosine[0], sine[0]

    return AngleTable(angles, model.device)


def _sizes(model: PreTrainedModel) -> list[int]:
    """What goes into its products, and comes out of all but the head."""
    layer = model.get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
    return [size for linear in linears for size in linear.weight.shape]
