"""What the pass of an `eagle` draft is given and gives back, whoever computes it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from workers.engine.attention import AttentionPlan
from workers.engine.eagle_store import EagleStore

LIKELIEST = 8
"""Tokens that are told of what may follow a row; fewer where the draft knows fewer."""


@dataclass(frozen=True, slots=True)
class EagleBatch:
    """New rows of some sequences. tokens, positions [rows]; given: what stands in for the target's
    hidden states before them [rows, hidden], or with `fuse` the features that it is made of
    [rows, layers * hidden]; wanted [number]: rows of which is asked what may follow.
    """

    tokens: Tensor
    positions: Tensor
    given: Tensor
    fuse: bool
    plan: AttentionPlan
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class EagleAnswer:
    """states [rows, hidden]; for wanted rows the likeliest of the draft's own tokens, likeliest
    first: places in its vocabulary and probabilities, [number, LIKELIEST or fewer] each. Where
    scores are no numbers, so are the probabilities.
    """

    states: Tensor
    places: Tensor
    probabilities: Tensor


class EagleCompute(Protocol):
    """What `EagleModel` computes. The rows' keys and values are in the store afterwards."""

    def __call__(self, batch: EagleBatch, store: EagleStore) -> EagleAnswer: ...
