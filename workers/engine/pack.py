"""A pack: everything one forward pass of the target needs to know, as plain numbers.

One pass runs several sequences at once, each contributing a *segment*: either a chunk of its
prompt or its last token followed by a token tree. A pack holds no tensors, so that it can be sent
to the other ranks of a tensor-parallel target as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Extents = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segment:
    """Tokens of one sequence in one pass.

    tokens:  T token ids, in slot order.
    start:   number of committed tokens before the segment, which is also its first position.
    parents: index of each token's parent within the segment, -1 for a child of the committed
             context. A prompt chunk is the chain (-1, 0, 1, ...).
    extents: half-open slot ranges holding the committed tokens and then the T tokens themselves.
    rows:    indices into `tokens` whose logits are wanted.
    """

    tokens: tuple[int, ...]
    start: int
    parents: tuple[int, ...]
    extents: Extents
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert sum(stop - begin for begin, stop in self.extents) == self.start + len(self.tokens)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position of every token: that of its parent plus one (siblings share a position)."""
        found: list[int] = []
        for parent in self.parents:
            found.append(self.start if parent < 0 else found[parent] + 1)
        return tuple(found)

    def slots(self) -> Tensor:
        """All slots of the sequence in token order: [start + T] int64."""
        return torch.cat([torch.arange(begin, stop) for begin, stop in self.extents])

    def visible(self) -> NDArray[np.bool_]:
        """Which tokens of the segment each one attends to: [T, T], ancestors and itself."""
        size = len(self.tokens)
        if self.parents == tuple(range(-1, size - 1)):
            return np.tri(size, dtype=np.bool_)
        seen = np.eye(size, dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen


@dataclass(frozen=True)
class Pack:
    """The segments of one pass, laid end to end."""

    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.tokens) for segment in self.segments)

    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    def positions(self) -> list[int]:
        return [position for segment in self.segments for position in segment.positions]

    def rows(self) -> list[int]:
        """Indices into the packed tokens whose logits are wanted, segment by segment."""
        wanted: list[int] = []
        offset = 0
        for segment in self.segments:
            wanted.extend(offset + row for row in segment.rows)
            offset += len(segment.tokens)
        return wanted

    def split_rows(self, logits: Tensor) -> list[Tensor]:
        """Cut logits [sum of rows, vocabulary] into one tensor per segment."""
        return list(logits.split([len(segment.rows) for segment in self.segments]))

    def split_tokens(self, states: Tensor) -> list[Tensor]:
        """Cut something of every token [tokens, ...] into one tensor per segment."""
        return list(states.split([len(segment.tokens) for segment in self.segments]))


def chain_parents(size: int) -> tuple[int, ...]:
    """Parents of a prompt chunk of `size` tokens."""
    return tuple(range(-1, size - 1))


def tree_parents(parents: Sequence[int]) -> tuple[int, ...]:
    """Parents of a segment made of one root token and a token tree below it.

    The tree's own parents count from its first node, with -1 for the root.
    """
    return (-1, *(parent + 1 for parent in parents))
