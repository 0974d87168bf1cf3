"""One packed forward pass: a pack of segments in, logits out, and hidden states if wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore
from workers.engine.model import kv_shape
from workers.engine.pack import Pack, Segment
from workers.engine.passes import open_pass


@dataclass(frozen=True, slots=True)
class PassOutput:
    """logits: of the pack's rows, [rows, vocabulary]; features: hidden states of all its tokens
    after each feature layer, [tokens, feature layers, hidden].
    """

    logits: Tensor
    features: Tensor


class Runner:
    """A model and the KV store it reads and writes.

    `shards`: by how many ranks the KV heads are divided; `host_slots`: of the store, on the host;
    `feature_layers`: hidden states to return, by how many layers they have passed; `int8`: whether
    weights are rounded to that. Raises ValueError for a model that this engine cannot run, saying
    why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        *,
        shards: int = 1,
        host_slots: int = 0,
        feature_layers: Sequence[int] = (),
        int8: bool = False,
    ) -> None:
        layers, kv_heads, head_dim = kv_shape(model.config)
        if kv_heads % shards:
            raise ValueError(
                f"tensor_parallel: {shards} ranks cannot share the target's {kv_heads} KV heads "
                "evenly; choose a divisor"
            )
        heads = model.config.get_text_config().num_attention_heads
        self._model = model
        self._pass = open_pass(model, feature_layers, sharded=shards > 1, int8=int8)
        self._groups = heads // kv_heads
        self.store = KVStore(
            layers,
            slots,
            kv_heads // shards,
            head_dim,
            dtype=model.dtype,
            device=model.device,
            host_slots=host_slots,
        )
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
        logits, features = self._pass(
            torch.tensor(pack.tokens(), device=device),
            torch.tensor(pack.positions(), device=device),
            torch.tensor(pack.rows(), dtype=torch.long, device=device),
            self.store,
            AttentionPlan.build(pack, self._groups, self._model.dtype, device),
        )
        return PassOutput(logits, features)
