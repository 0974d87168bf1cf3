"""Attention of a packed pass over the KV pool, registered with transformers as `outrider`.

transformers calls it once a layer with the queries of the whole pack. Each segment attends to its
own extents of the pool: all committed tokens, and of the segment itself only its ancestors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.engine.pack import Pack, Segment

IMPLEMENTATION = "outrider"

# Two vectors of lanes, which a compiled product takes at once.
_ITEM_QUERIES = 32


@dataclass(frozen=True)
class SegmentPlan:
    """One segment, or a part of one, ready for attention in every layer.

    slots: of all keys; extent: the range that they are, if they are one; seen [T, n]: which of
    the last n keys each query sees, all of the keys before; groups: query heads per KV head.
    """

    slots: Tensor
    extent: tuple[int, int] | None
    seen: NDArray[np.bool_]
    groups: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """T, the number of queries."""
        return len(self.seen)

    @cached_property
    def bias(self) -> Tensor | None:
        """[1, 1, groups * T, keys]: 0 where a query sees a key, -inf elsewhere, the T rows
        repeated once per query head of a KV head; None when every query sees every key.
        """
        if self.seen.all():
            return None
        bias = torch.zeros(self.size, len(self.slots), dtype=self.dtype)
        bias[:, -self.seen.shape[1] :].masked_fill_(torch.from_numpy(~self.seen), float("-inf"))
        return bias.repeat(self.groups, 1).to(self.slots.device)[None, None]

    @cached_property
    def unseen(self) -> NDArray[np.float32]:
        """Of the last keys alone, below each other: [n, T], 0 or -inf."""
        return np.where(np.ascontiguousarray(self.seen.T), np.float32(0), np.float32("-inf"))

    def items(self, number: int) -> Iterator[tuple[int, int, int, int]]:
        """Its queries in groups, as `AttentionPlan.items` has them; `number`: its own."""
        # The last that it sees is the first from behind.
        ends = (len(self.slots) - self.seen[:, ::-1].argmax(1)).tolist() * self.groups
        for begin in range(0, len(ends), _ITEM_QUERIES):
            own = ends[begin : begin + _ITEM_QUERIES]
            yield number, begin, len(own), max(own)

    def gather(self, store: Tensor) -> Tensor:
        """[slots, kv_heads, head_dim] -> [1, kv_heads, keys, head_dim], a view if it can."""
        if self.extent is not None:
            own = store[self.extent[0] : self.extent[1]]
        else:
            own = store.index_select(0, self.slots)
        return own.transpose(0, 1)[None]


@dataclass(frozen=True)
class AttentionPlan:
    """What the attention function needs for one pass, made once and used by every layer."""

    segments: tuple[SegmentPlan, ...]
    new_slots: Tensor  # [T of the pack] slots that receive this pass's keys and values

    @cached_property
    def items(self) -> NDArray[np.int64]:
        """Groups of queries for threads to take in turn, the largest first: [n, 4]. Segment;
        number of the first query, where number n is row n % T of the segment and group n // T of
        query heads; how many; and how many keys, all of what some of them see.
        """
        found = [item for number, own in enumerate(self.segments) for item in own.items(number)]
        return np.array(sorted(found, key=_work, reverse=True))

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """Of each segment, the addresses of `slots` and `unseen`, its first row in the pack, its
        rows, keys, and how many of these `unseen` is about: [segments, 6].
        """
        rows, first = [], 0
        for own in self.segments:
            sizes = first, own.size, len(own.slots), len(own.unseen)
            rows.append((own.slots.data_ptr(), own.unseen.ctypes.data, *sizes))
            first += own.size
        return np.array(rows)

    @classmethod
    def build(
        cls, pack: Pack, groups: int, dtype: torch.dtype, device: torch.device
    ) -> "AttentionPlan":
        """`groups`: query heads per KV head."""
        plans = tuple(
            plan for segment in pack.segments for plan in _plans_of(segment, groups, dtype, device)
        )
        new = [plan.slots[-plan.size :] for plan in plans]
        return cls(plans, new[0] if len(new) == 1 else torch.cat(new))


def _work(item: tuple[int, int, int, int]) -> int:
    _, _, queries, keys = item
    return queries * keys


def _plans_of(
    segment: Segment, groups: int, dtype: torch.dtype, device: torch.device
) -> Iterator[SegmentPlan]:
    """One for a prompt's chunk and one for the tree behind it, one for anything else: a chunk is
    computed as it would be without a tree, so that its keys and values have the same bits.
    """
    slots, seen = segment.slots().to(device), segment.visible()
    begin = segment.extents[0][0] if len(segment.extents) == 1 else None
    own = segment.rows[0] + 1 if segment.rows else len(segment.tokens)
    ends = [own, len(seen)] if 1 < own < len(seen) else [len(seen)]
    for first, last in pairwise([0, *ends]):
        keys = slots[: segment.start + last]
        extent = None if begin is None else (begin, begin + len(keys))
        yield SegmentPlan(keys, extent, seen[first:last, :last], groups, dtype)


def pool_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim]; key, value: the layer's store -> [1, T, heads, head_dim].

    Raises ValueError for models whose attention asks for what this function does not compute
    (soft-capped scores, attention sinks, sliding windows).
    """
    for name in ("softcap", "s_aux", "sliding_window"):
        if kwargs.get(name) is not None:
            raise ValueError(f"target: attention with {name!r} is not supported; use another model")
    return attend(query, key, value, plan, scaling), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float | None = None
) -> Tensor:
    """query [1, heads, T, head_dim]; key, value: the layer's store -> [1, T, heads, head_dim].

    scaling: of the scores; None for one over the root of head_dim.
    """
    parts = query.split([segment.size for segment in plan.segments], dim=2)
    outputs = [
        grouped_attention(part, segment.gather(key), segment.gather(value), segment.bias, scaling)
        for segment, part in zip(plan.segments, parts, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float | None = None
) -> Tensor:
    """[1, heads, T, head_dim] against [1, kv_heads, S, head_dim] -> [1, T, heads, head_dim].

    bias: as `SegmentPlan` has it.

    The query heads that share a KV head are folded into query rows, so that no key is repeated:
    5 times faster than `enable_gqa` for one bf16 token on a CPU, where that copies the context.
    """
    heads, size, width = query.shape[1:]
    folded = query.reshape(1, keys.shape[1], -1, width)
    out = scaled_dot_product_attention(folded, keys, values, bias, scale=scaling)
    return out.reshape(1, heads, size, width).transpose(1, 2)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """[..., heads, head_dim] turned by each position's cosine and sine [..., 1, head_dim]."""
    left, right = x.chunk(2, -1)
    cosine, sine = angles
    return x * cosine.to(x.dtype) + torch.cat([-right, left], -1) * sine.to(x.dtype)


AttentionInterface.register(IMPLEMENTATION, pool_attention)
