"""The pass of a model, by whichever way this machine has for it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.compiled_llama import CompiledLlama, can_compile
from workers.engine.kv_store import KVStore, PoolCache
from workers.engine.packed_linear import can_pack, pack_linears


class ModelPass(Protocol):
    """One forward pass over packed tokens."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, store: KVStore, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """tokens, positions [T], rows: those whose logits are wanted -> logits [rows, vocabulary],
        and the hidden states after each feature layer [T, feature layers, hidden].
        """


def open_pass(
    model: PreTrainedModel, feature_layers: Sequence[int], *, sharded: bool, int8: bool
) -> ModelPass:
    """The fastest there is. It may take the model's weights over; the model is its own from now on.

    feature_layers: hidden states to return, by how many layers they have passed; sharded: whether
    other ranks hold the rest of each layer; int8: whether weights are to be rounded to that. Raises
    ValueError for a layer that the model has not, or a model that does not run in int8.
    """
    if feature_layers:
        layers = len(model.get_decoder().layers)
        bad = [layer for layer in feature_layers if not 1 <= layer <= layers]
        if bad:
            raise ValueError(f"feature_layers: the target has 1 to {layers}, not {bad}")
    if can_compile(model) and not sharded:
        assert isinstance(model, LlamaForCausalLM)
        return CompiledLlama(model, feature_layers, int8=int8)
    if int8:
        raise ValueError(
            "target.dtype: int8 is for models of Llama's kind in one process on a CPU that numba "
            "knows; use bfloat16"
        )
    if sharded:
        return GenericPass(model, feature_layers)
    if can_pack(model.dtype, model.device):
        pack_linears(model)
    return GenericPass(model, feature_layers)


class GenericPass:
    """Any model as transformers runs it, with our attention over the pool."""

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int]) -> None:
        self._model = model
        self._feature_layers = tuple(feature_layers)
        self._caught: dict[int, Tensor] = {}
        for layer in feature_layers:
            model.get_decoder().layers[layer - 1].register_forward_hook(self._catcher(layer))

    def __call__(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, store: KVStore, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        self._caught = {}
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            cache=PoolCache(store, plan.new_slots),
            use_cache=False,
            logits_to_keep=rows,
            plan=plan,
        )
        logits: Tensor = output.logits[0]
        if not self._feature_layers:
            hidden = self._model.config.get_text_config().hidden_size
            return logits, logits.new_empty(len(tokens), 0, hidden)
        return logits, torch.stack([self._caught[layer] for layer in self._feature_layers], 1)

    def _catcher(self, layer: int) -> Any:
        def catch(_module: Any, _inputs: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            self._caught[layer] = states[0]

        return catch
