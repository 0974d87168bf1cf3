"""The pass of an `eagle` draft in use, over new rows of any sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.attention import AttentionPlan, SegmentPlan
from workers.engine.eagle import EagleModel, rotary
from workers.engine.layer_steps import HeadShape, open_steps

_FIRST_SLOTS = 256


class KeysAndValues:
    """Of one sequence: committed pairs, and behind them the tree's nodes in the order of asking.

    keys, values: [slots, kv_heads, head_dim], doubled as they fill up.
    """

    def __init__(self, shape: HeadShape, dtype: torch.dtype, device: torch.device) -> None:
        size = _FIRST_SLOTS, shape.kv_heads, shape.head_dim
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.committed = 0
        self.nodes = 0
        self._groups = shape.heads // shape.kv_heads
        self._slots = torch.arange(_FIRST_SLOTS, device=device)

    def append(self, seen: Tensor) -> AttentionPlan:
        """Room behind all there is for new rows, which see all that is committed and of the nodes,
        old and new, what `seen` [rows, nodes] says.
        """
        self.nodes += len(seen)
        size = self.committed + self.nodes
        self._make_room(size)
        slots = self._slots[:size]
        segment = SegmentPlan(slots, (0, size), seen, self._groups, self.keys.dtype)
        return AttentionPlan((segment,), slots[-len(seen) :])

    def _make_room(self, size: int) -> None:
        while size > len(self.keys):
            self.keys = torch.cat([self.keys, torch.zeros_like(self.keys)])
            self.values = torch.cat([self.values, torch.zeros_like(self.values)])
            self._slots = torch.arange(len(self.keys), device=self.keys.device)


@dataclass(frozen=True, slots=True)
class NewRows:
    """Of one sequence: tokens, what stands in for the target's hidden states before them
    [rows, hidden], positions among pairs, and which nodes, old and new, each sees [rows, nodes].
    """

    kv: KeysAndValues
    tokens: Sequence[int]
    hidden: Tensor
    positions: Sequence[int]
    seen: Tensor


class EaglePass:
    """What `EagleModel` computes, in the fewest steps."""

    def __init__(self, model: EagleModel) -> None:
        config = model.config
        self._model = model
        self._device = model.embedding.device
        self._shape = HeadShape(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self._steps = open_steps(self._shape, model.dtype, self._device)
        self._eps = config.rms_norm_eps
        self._angles = self._angles_of(_FIRST_SLOTS)
        self._probe()

    @torch.inference_mode()
    def _probe(self) -> None:
        """Run one row: what is compiled at its first call is not so in somebody's request."""
        hidden = torch.zeros(1, self._model.config.hidden_size, dtype=self._model.dtype)
        seen = torch.ones(1, 1, dtype=torch.bool)
        self.run([NewRows(self.new_sequence(), (0,), hidden.to(self._device), (0,), seen)])

    def new_sequence(self) -> KeysAndValues:
        """Nothing yet."""
        return KeysAndValues(self._shape, self._model.dtype, self._device)

    def run(self, rows: Sequence[NewRows]) -> Tensor:
        """Their keys and values are there afterwards -> their states [all rows, hidden]."""
        model, layer, steps = self._model, self._model.midlayer, self._steps
        tokens = [token for own in rows for token in own.tokens]
        positions = [position for own in rows for position in own.positions]
        embedded = model.embed(torch.tensor(tokens, device=self._device))
        x = torch.cat([own.hidden for own in rows])
        both = [
            self._norm(embedded, layer.input_layernorm.weight),
            self._norm(x, layer.hidden_norm.weight),
        ]
        qkv = layer.qkv_proj(torch.cat(both, -1))
        attended = self._attend(rows, qkv, positions)
        delta = layer.o_proj(attended)
        normal = steps.add_norm(x, delta, layer.post_attention_layernorm.weight, self._eps)
        x += layer.down_proj(steps.gate(layer.gate_up_proj(normal)))
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, draft_vocab_size]"""
        scores: Tensor = self._model.lm_head(self._norm(states, self._model.norm.weight))
        return scores

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._steps.add_norm(x, torch.zeros_like(x), weight, self._eps)

    def _angles_at(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Cosine and sine [rows, head_dim], looked up: computing them took 80 us of a pass."""
        if (last := max(positions)) >= len(self._angles[0]):
            self._angles = self._angles_of(2 * last)
        at = torch.tensor(positions, device=self._device)
        cosine, sine = self._angles
        return cosine[at], sine[at]

    def _angles_of(self, size: int) -> tuple[Tensor, Tensor]:
        """Of all positions below `size`: [size, head_dim] each."""
        cosine, sine = rotary(self._model.config, torch.arange(size, device=self._device))
        return cosine[:, 0].to(self._model.dtype), sine[:, 0].to(self._model.dtype)

    def _attend(self, rows: Sequence[NewRows], qkv: Tensor, positions: Sequence[int]) -> Tensor:
        """Each sequence to its own keys and values."""
        sizes = [len(own.tokens) for own in rows]
        cosine, sine = (part.split(sizes) for part in self._angles_at(positions))
        attended = []
        for own, *parts in zip(rows, qkv.split(sizes), cosine, sine, strict=True):
            plan, (own_qkv, *angles) = own.kv.append(own.seen), parts
            attended.append(
                self._steps.attend(
                    own_qkv, (angles[0], angles[1]), own.kv.keys, own.kv.values, plan
                )
            )
        return attended[0] if len(attended) == 1 else torch.cat(attended)
