"""Keys and values of the pairs that an `eagle` draft has seen, of all its sequences."""

import numpy as np
import torch
from numpy.typing import NDArray

from workers.engine.attention import SegmentPlan
from workers.engine.pass_work import LayerSizes

BLOCK_SLOTS = 64
_FIRST_BLOCKS = 8


class EagleStore:
    """keys, values: [slots, kv_heads, head_dim], doubled when no block of slots is left, and never
    made smaller.
    """

    def __init__(self, sizes: LayerSizes, dtype: torch.dtype, device: torch.device) -> None:
        shape = _FIRST_BLOCKS * BLOCK_SLOTS, sizes.kv_heads, sizes.head_dim
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.groups = sizes.heads // sizes.kv_heads
        self._free = list(range(_FIRST_BLOCKS))

    def take_block(self) -> int:
        """The number of a block that is nobody's."""
        if not self._free:
            blocks = len(self.keys) // BLOCK_SLOTS
            # All or nothing: memory may be short, and a kernel does not look where it writes.
            keys, values = (torch.cat([x, torch.zeros_like(x)]) for x in (self.keys, self.values))
            self.keys, self.values = keys, values
            self._free = list(range(blocks, 2 * blocks))
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """They are nobody's from now on."""
        self._free.extend(blocks)


class Pairs:
    """Those of one sequence: `committed`, and behind them the tree's `nodes` in the order of
    asking.
    """

    def __init__(self, store: EagleStore) -> None:
        self.committed = self.nodes = 0
        self._store = store
        self._blocks: list[int] = []
        self._slots = torch.empty(0, dtype=torch.int64, device=store.keys.device)

    def append(self, seen: NDArray[np.bool_]) -> SegmentPlan:
        """Room behind all there is for new rows, which see all that is committed and of the nodes,
        old and new, what `seen` [rows, nodes] says. The last slots are the new ones.
        """
        self.nodes += len(seen)
        size = self.committed + self.nodes
        while size > len(self._slots):
            self._add_block()
        return SegmentPlan(
            self._slots[:size], None, seen, self._store.groups, self._store.keys.dtype
        )

    def drop(self) -> None:
        """Forget all of it."""
        self._store.give_back(self._blocks)
        self._blocks, self._slots = [], self._slots[:0]
        self.committed = self.nodes = 0

    def _add_block(self) -> None:
        block = self._store.take_block()
        self._blocks.append(block)
        own = torch.arange(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS)
        self._slots = torch.cat([self._slots, own.to(self._store.keys.device)])
