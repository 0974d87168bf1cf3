"""Weights of linear layers as `workers.engine.kernels.linear` reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 16
"""Outputs side by side in a vector. A weight that does not fill its last block is filled up."""

# Input terms of one output in a vector's lane.
_TERMS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_VECTOR_BYTES = 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """data: the weights in the kernels' order, [blocks, steps, BLOCK, terms]; of int8 ones, scales
    [blocks * BLOCK] float32: what a unit of each output's sum is worth, and excess [blocks * BLOCK]
    int32: what the sum has too much, because a row's bytes are 128 too large.
    """

    data: Tensor
    scales: Tensor | None = None
    excess: Tensor | None = None

    @property
    def outputs(self) -> int:
        """Those that fill the last block included."""
        return BLOCK * len(self.data)

    def addresses(self) -> tuple[int, int, int]:
        """Of data, scales and excess, 0 for what is not there."""
        parts = (self.data, self.scales, self.excess)
        return tuple(0 if part is None else part.data_ptr() for part in parts)  # type: ignore[return-value]


def pack(weight: Tensor) -> PackedWeight:
    """weight [N, K], float32 or bfloat16, K a multiple of 2."""
    return PackedWeight(_reorder(_filled(weight)))


def quantise(weight: Tensor) -> PackedWeight:
    """weight [N, K], K a multiple of 4, as int8: to the nearest multiple of a 127th of each
    output's largest weight.
    """
    floats = _filled(weight.float())
    scales = (floats.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    values = (floats / scales[:, None]).round()
    excess = 128 * values.sum(1)
    return PackedWeight(_reorder(values.to(torch.int8)), scales, excess.to(torch.int32))


def _filled(weight: Tensor) -> Tensor:
    """With outputs of zeros behind its own, to the end of the last block."""
    return pad(weight, (0, 0, 0, -len(weight) % BLOCK))


def _reorder(weight: Tensor) -> Tensor:
    """[N / BLOCK, K / terms, BLOCK, terms], beginning where a vector may."""
    outputs, inputs = weight.shape
    terms = _TERMS[weight.dtype]
    blocks = weight.view(outputs // BLOCK, BLOCK, inputs // terms, terms).transpose(1, 2)
    room = weight.new_empty(weight.numel() + _VECTOR_BYTES // weight.itemsize)
    begin = -room.data_ptr() % _VECTOR_BYTES // weight.itemsize
    data = room[begin : begin + weight.numel()].view(blocks.shape)
    data.copy_(blocks)
    return data
