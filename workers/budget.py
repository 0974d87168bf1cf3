"""How large a proposal may be, as users say it. No torch: configuration is read without."""

from typing import Literal

AUTO: Literal["auto"] = "auto"
Budget = int | Literal["auto"]
"""Nodes of a proposal: a number, or as many as pay."""

WIDEST = 32
"""Most nodes that may pay, unless somebody says."""


def spending(budget: Budget, most: int = WIDEST) -> tuple[int, bool]:
    """A `GenerationRequest`'s `budget` and `adaptive`."""
    return (most, True) if budget == AUTO else (budget, False)
