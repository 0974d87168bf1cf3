"""An eagle draft's pass as torch computes it: any sizes, any device."""

from torch import Tensor

from workers.engine.attention import AttentionPlan, attend
from workers.engine.eagle import EagleModel, angle_table
from workers.engine.eagle_batch import LIKELIEST, EagleAnswer, EagleBatch
from workers.engine.eagle_store import EagleStore
from workers.engine.kv_store import finite


class TorchEagle:
    """`workers.engine.eagle_batch.EagleCompute` with the model's own modules."""

    def __init__(self, model: EagleModel) -> None:
        self._model = model
        self._angles = angle_table(model)

    def __call__(self, batch: EagleBatch, store: EagleStore) -> EagleAnswer:
        """As `EagleCompute` has it."""
        model = self._model
        hidden = model.fuse(batch.given) if batch.fuse else batch.given
        cosine, sine = self._angles.at(batch.positions)
        query, key, value = model.midlayer.project(
            model.embed(batch.tokens), hidden, (cosine[:, None], sine[:, None])
        )
        attended = _attend(query, key, value, store, batch.plan)
        states = model.midlayer.finish(hidden, attended)
        probabilities = model.logits(states[batch.wanted]).float().softmax(-1)
        best = probabilities.topk(min(LIKELIEST, probabilities.shape[-1]), -1)
        return EagleAnswer(states, best.indices, best.values)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, store: EagleStore, plan: AttentionPlan
) -> Tensor:
    """Keys and values to their slots, then each sequence to its own: [rows, heads * head_dim]."""
    store.keys.index_copy_(0, plan.new_slots, finite(key))
    store.values.index_copy_(0, plan.new_slots, finite(value))
    read = attend(query.transpose(0, 1)[None], store.keys, store.values, plan)
    return read.reshape(len(query), -1)
