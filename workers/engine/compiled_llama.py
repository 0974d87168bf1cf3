"""A Llama's pass on a CPU as one call of `workers.engine.kernels.llama`."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore
from workers.engine.packed_weight import BLOCK, PackedWeight, pack, quantise
from workers.engine.threads import barrier_address, share

try:
    from workers.engine.kernels import llama as program
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    program = None  # type: ignore[assignment]

# How numba knows elements.
_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}


def can_compile(model: PreTrainedModel) -> bool:
    """Whether it is a Llama like most, of sizes that the kernels take."""
    config = model.config
    return (
        program is not None
        and type(model) is LlamaForCausalLM
        and model.device.type == "cpu"
        and model.dtype in _ELEMENTS
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
        self._rotary = model.model.rotary_emb
        self._int8 = int8
        self._sizes = (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
            model.model.layers[0].self_attn.head_dim,
        )
        self._epsilon = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        packing = quantise if int8 else pack
        self._kept: list[Tensor | PackedWeight] = []  # what the table has addresses of
        self._table = torch.zeros(
            config.num_hidden_layers + 1, program.LAYER_FIELDS, dtype=torch.int64
        )
        for row, layer in zip(self._table, model.model.layers, strict=False):
            self._take_over(row, layer, packing)
        last, norm = self._table[-1], model.model.norm.weight
        self._put(last, program.BEFORE_ATTENTION, norm)
        head = packing(model.lm_head.weight)
        self._put(last, program.TO_QKV, head)
        self._vocabulary, self._outputs = len(model.lm_head.weight), head.outputs
        self._feature_layers = tuple(feature_layers)
        self._store: KVStore | None = None
        weights = torch.int8 if int8 else model.dtype
        self._program = program.llama_pass(_ELEMENTS[weights], _ELEMENTS[model.dtype])

    def _take_over(self, row: Tensor, layer: Any, packing: Any) -> None:
        """A layer's weights, packed; its own are dropped, or all would be there twice."""
        attention, mlp = layer.self_attn, layer.mlp
        self._put(row, program.BEFORE_ATTENTION, layer.input_layernorm.weight)
        self._put(row, program.BEFORE_MLP, layer.post_attention_layernorm.weight)
        for place, module, names in (
            (program.TO_QKV, attention, ("q_proj", "k_proj", "v_proj")),
            (program.TO_OUT, attention, ("o_proj",)),
            (program.TO_GATE_UP, mlp, ("gate_proj", "up_proj")),
            (program.TO_DOWN, mlp, ("down_proj",)),
        ):
            weights = [getattr(module, name).weight for name in names]
            self._put(row, place, packing(torch.cat(weights)))
            for name in names:
                delattr(module, name)

    def _put(self, row: Tensor, place: int, weight: Tensor | PackedWeight) -> None:
        self._kept.append(weight)
        if isinstance(weight, Tensor):
            row[place] = weight.data_ptr()
        else:
            row[place : place + 3] = torch.tensor(weight.addresses())

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, store: KVStore, plan: AttentionPlan
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """tokens, positions [T], rows: those whose logits are wanted -> logits [rows, vocabulary],
        and by feature layer the hidden states [T, hidden].
        """
        x = self._embedding[tokens]
        cosine, sine = self._rotary(x[None], positions[None])
        features = {layer: torch.empty_like(x) for layer in self._feature_layers}
        self._place(store, features)
        logits = x.new_empty(len(rows), self._outputs)
        room = self._room(x)
        layers = len(self._table) - 1
        counters = torch.zeros(layers * program.STEPS + program.STEPS_BEHIND, dtype=torch.int64)
        work = array(
            "q",
            (
                counters.data_ptr(),
                barrier_address(),
                torch.get_num_threads(),
                self._table.data_ptr(),
                layers,
                self._epsilon.data_ptr(),
                len(x),
                x.data_ptr(),
                cosine.data_ptr(),
                sine.data_ptr(),
                plan.new_slots.data_ptr(),
                plan.items.data_ptr(),
                len(plan.items),
                plan.table.data_ptr(),
                rows.data_ptr(),
                len(rows),
                logits.data_ptr(),
                *(part.data_ptr() for part in room),
                *self._sizes,
                len(store.keys[0]),
                self._outputs,
            ),
        )
        assert len(work) == program.PASS_FIELDS
        share(self._program, work.buffer_info()[0])
        return logits[:, : self._vocabulary], features

    def _room(self, x: Tensor) -> list[Tensor]:
        """For what is between the steps of a pass over x [T, hidden], in the program's order."""
        hidden, inner, heads, kv_heads, head_dim = self._sizes
        wide, kept = heads * head_dim, kv_heads * head_dim
        sizes = (hidden, wide + 2 * kept, wide, wide, hidden, 2 * inner, inner)
        widest = max(hidden, wide, inner) if self._int8 else 0
        return [
            *(x.new_empty(len(x), size) for size in sizes),
            torch.empty(len(x), widest, dtype=torch.uint8),
            torch.empty(len(x), dtype=torch.float32),
        ]

    def _place(self, store: KVStore, features: dict[int, Tensor]) -> None:
        """Say where keys and values are, and where hidden states go."""
        if store is not self._store:
            for row, keys, values in zip(self._table, store.keys, store.values, strict=False):
                row[program.KEYS], row[program.VALUES] = keys.data_ptr(), values.data_ptr()
            self._store = store
        for layer, states in features.items():
            self._table[layer, program.FEATURES] = states.data_ptr()


def _sizes(model: PreTrainedModel) -> list[int]:
    """What goes into its products, and comes out of all but the head."""
    layer = model.get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.q_proj, attention.k_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)
    return [size for linear in linears for size in linear.weight.shape]
