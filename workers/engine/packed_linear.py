"""Linear layers over packed weights: the CPU's fast path, and every row for itself.

A row's result has the same bits beside any other rows, where torch's own differ: a batch or a tree
changes no layer's answer.
"""

from array import array

import numpy as np
import torch
from torch import Tensor, nn

from workers.engine.packed_weight import pack
from workers.engine.threads import share

try:
    from workers.engine.kernels import linear as kernel
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    kernel = None  # type: ignore[assignment]

# How numba knows elements.
_ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class PackedLinear(nn.Module):
    """A bias-optional linear layer; inputs must be even in number."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self._weight = pack(linear.weight.detach())
        self._worker = kernel.linear_worker(_ELEMENTS[linear.weight.dtype])
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., rows, in] -> [..., rows, out]"""
        x = x.contiguous()
        size, outputs = x.shape[-1], self._weight.outputs
        out = x.new_empty(*x.shape[:-1], outputs)
        counter = array("q", (0,))
        work = array(
            "q",
            (
                counter.buffer_info()[0],
                torch.get_num_threads(),
                x.data_ptr(),
                0,
                x.numel() // size,
                size,
                out.data_ptr(),
                outputs,
                *self._weight.addresses(),
            ),
        )
        share(self._worker, work.buffer_info()[0])
        own = out[..., : self.out_features]
        return own if self.bias is None else own + self.bias


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`, in place.

    A weight shared with an embedding (a tied LM head) stays in the embedding as well.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if child.in_features % 2 == 0:
                setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine runs packed layers of this kind."""
    return kernel is not None and device.type == "cpu" and dtype in _ELEMENTS
