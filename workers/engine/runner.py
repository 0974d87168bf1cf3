"""One packed forward pass: a pack of segments in, logits out, and hidden states if wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore, PoolCache
from workers.engine.model import kv_shape
from workers.engine.pack import Pack, Segment


@dataclass(frozen=True, slots=True)
class PassOutput:
    """logits: of the pack's rows, [rows, vocabulary]; features: hidden states of all its tokens
    after each feature layer, [tokens, feature layers, hidden].
    """

    logits: Tensor
    features: Tensor


class Runner:
    """A model and the KV store it reads and writes.

    `shards`: by how many ranks the KV heads are divided; `feature_layers`: hidden states to return,
    by how many layers they have passed. Raises ValueError for a model that this engine cannot run,
    saying why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        *,
        shards: int = 1,
        feature_layers: Sequence[int] = (),
    ) -> None:
        layers, kv_heads, head_dim = kv_shape(model.config)
        if kv_heads % shards:
            raise ValueError(
                f"tensor_parallel: {shards} ranks cannot share the target's {kv_heads} KV heads "
                "evenly; choose a divisor"
            )
        heads = model.config.get_text_config().num_attention_heads
        self._model = model
        self._groups = heads // kv_heads
        self.store = KVStore(
            layers, slots, kv_heads // shards, head_dim, dtype=model.dtype, device=model.device
        )
        self._taps = _Taps(model, feature_layers)
        self._probe()

    def _probe(self) -> None:
        """Run one token: what a model cannot do shows at load, not in somebody's request."""
        try:
            self.forward(Pack((Segment((0,), 0, (-1,), ((0, 1),), (0,)),)))
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"target: {type(self._model).__name__} does not run on this engine "
                f"({type(error).__name__}: {error}); use a Llama, Qwen, Mistral or the like"
            ) from error

    @torch.inference_mode()
    def forward(self, pack: Pack) -> PassOutput:
        """Run every token of the pack.

        Keys and values of all tokens are in the store afterwards, at the pack's slots.
        """
        device = self._model.device
        plan = AttentionPlan.build(pack, self._groups, self._model.dtype, device)
        output = self._model(
            input_ids=torch.tensor([pack.tokens()], device=device),
            position_ids=torch.tensor([pack.positions()], device=device),
            cache=PoolCache(self.store, plan.new_slots),
            use_cache=False,
            logits_to_keep=torch.tensor(pack.rows(), dtype=torch.long, device=device),
            plan=plan,
        )
        return PassOutput(output.logits[0], self._taps.features(len(pack.tokens())))


class _Taps:
    """Catches hidden states on their way through the model; what a failed pass has left is
    overwritten by the next.
    """

    def __init__(self, model: PreTrainedModel, feature_layers: Sequence[int]) -> None:
        self._order = feature_layers
        self._caught: dict[int, Tensor] = {}
        self._nothing = torch.empty(0, dtype=model.dtype, device=model.device)
        if feature_layers:
            self._tap(model.get_decoder().layers, feature_layers)

    def _tap(self, layers: Any, feature_layers: Sequence[int]) -> None:
        bad = [layer for layer in feature_layers if not 1 <= layer <= len(layers)]
        if bad:
            raise ValueError(f"feature_layers: the target has 1 to {len(layers)}, not {bad}")
        for layer in feature_layers:
            layers[layer - 1].register_forward_hook(partial(self._catch, layer))

    def _catch(self, layer: int, _module: Any, _inputs: Any, output: Any) -> None:
        self._caught[layer] = output[0] if isinstance(output, Tensor) else output[0][0]

    def features(self, tokens: int) -> Tensor:
        """What one pass left: [tokens, feature layers, hidden]."""
        caught, self._caught = self._caught, {}
        if not caught:
            return self._nothing.new_empty(tokens, 0, 0)
        return torch.stack([caught[layer] for layer in self._order], 1)
