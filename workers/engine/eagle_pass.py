"""The pass of an `eagle` draft in use: new rows of any sequences, and what may follow them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention import AttentionPlan
from workers.engine.compiled_eagle import CompiledEagle, can_compile, layer_sizes
from workers.engine.eagle import EagleModel
from workers.engine.eagle_batch import EagleBatch, EagleCompute
from workers.engine.eagle_store import EagleStore, Pairs
from workers.engine.torch_eagle import TorchEagle
from workers.speculation.tree import SparseLaw


@dataclass(frozen=True, slots=True)
class NewRows:
    """Of one sequence: tokens, what is given with them (see `EagleBatch`), positions among pairs,
    which nodes, old and new, each sees [rows, nodes], and of how many of the last rows is asked
    what may follow.
    """

    pairs: Pairs
    tokens: Sequence[int]
    given: Tensor
    positions: Sequence[int]
    seen: NDArray[np.bool_]
    wanted: int


@dataclass(frozen=True, slots=True)
class Told:
    """Of one sequence: states [rows, hidden], and the laws of the last rows, as many as wanted."""

    states: Tensor
    laws: list[SparseLaw]


class EaglePass:
    """What `EagleModel` computes, in the fastest way there is for it.

    int8: whether its weights are rounded to that; only where it compiles.
    """

    def __init__(self, model: EagleModel, *, int8: bool = False) -> None:
        self._device, self._dtype = model.embedding.device, model.dtype
        self._compute: EagleCompute
        if can_compile(model):
            self._compute = CompiledEagle(model, int8=int8)
        else:
            self._compute = TorchEagle(model)
        self._store = EagleStore(layer_sizes(model), model.dtype, self._device)
        self._ids = model.vocabulary.tolist()

    def new_sequence(self) -> Pairs:
        """Nothing yet."""
        return Pairs(self._store)

    @torch.inference_mode()
    def run(self, rows: Sequence[NewRows], *, fuse: bool) -> list[Told]:
        """One pass over all rows; their keys and values are there afterwards."""
        if not rows:
            return []
        answer = self._compute(self._batch(rows, fuse), self._store)
        states = answer.states.split([len(own.tokens) for own in rows])
        laws = iter(
            SparseLaw(tuple(self._ids[place] for place in places), tuple(own))
            for places, own in zip(
                answer.places.tolist(), answer.probabilities.tolist(), strict=True
            )
        )
        return [
            Told(own, [next(laws) for _ in range(asked.wanted)])
            for own, asked in zip(states, rows, strict=True)
        ]

    def _batch(self, rows: Sequence[NewRows], fuse: bool) -> EagleBatch:
        segments = tuple(own.pairs.append(own.seen) for own in rows)
        new_slots = [own.slots[-own.size :] for own in segments]
        given = [own.given for own in rows]
        wanted: list[int] = []
        last = 0
        for own in rows:
            last += len(own.tokens)
            wanted.extend(range(last - own.wanted, last))
        return EagleBatch(
            self._numbers([token for own in rows for token in own.tokens]),
            self._numbers([position for own in rows for position in own.positions]),
            _joined(given).to(self._dtype),
            fuse,
            AttentionPlan(segments, _joined(new_slots)),
            self._numbers(wanted),
        )

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
