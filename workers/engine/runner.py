"""One packed forward pass: a pack of segments in, logits out."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.engine.attention import AttentionPlan
from workers.engine.kv_store import KVStore, PoolCache
from workers.engine.model import kv_shape
from workers.engine.pack import Pack, Segment


class Runner:
    """A model and the KV store it reads and writes.

    `shards`: by how many ranks the KV heads are divided. Raises ValueError for a model that this
    engine cannot run, saying why.
    """

    def __init__(self, model: PreTrainedModel, slots: int, *, shards: int = 1) -> None:
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
    def forward(self, pack: Pack) -> Tensor:
        """Run every token of the pack; return the logits of its rows: [rows, vocabulary].

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
        logits: Tensor = output.logits[0]
        return logits
