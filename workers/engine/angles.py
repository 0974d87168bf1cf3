"""Angles of rotary embeddings, looked up: computing them took 80 us of every pass."""

from collections.abc import Callable

import torch
from torch import Tensor

_FIRST = 256

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
"""positions [n] -> their cosine and sine, [n, head_dim] each."""


class AngleTable:
    """Those of all positions so far, and of more once they are asked for."""

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        self._rotary, self._device = rotary, device
        self._make(_FIRST)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cosine and sine, [n, head_dim] each."""
        if (last := int(positions.max())) >= len(self._cosine):
            self._make(2 * last)
        return self._cosine[positions], self._sine[positions]

    def _make(self, size: int) -> None:
        self._cosine, self._sine = self._rotary(torch.arange(size, device=self._device))
