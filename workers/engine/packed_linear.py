"""Linear layers with weights laid out once for oneDNN: the CPU's fast path.

`F.linear` lays a bf16 weight out anew in every call: doing it once took a one-token pass of
SmolLM2-135M on two cores from 43 to 30 ms. In float32 it goes to another library, whose kernels
for a few rows are slow: all linear layers over 9 rows took 79 ms there, and take 27 ms here.

A row's result has the same bits beside other rows, where `F.linear`'s differ: a batch or a tree
changes no layer's answer. In bfloat16 that is so up to 32 rows; without AMX, beyond them as well.
"""

import torch
from torch import Tensor, nn

# The batch size oneDNN should choose its weight layout for. 16 keeps a row's bits the same for any
# row count from 2 to 32, which other hints do not.
LAYOUT_ROWS = 16


class PackedLinear(nn.Module):
    """A bias-optional linear layer over a weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., rows, in] -> [..., rows, out]"""
        if x.numel() == x.shape[-1]:
            # A row alone takes another kernel, which sums up long rows in another order.
            return self._apply_to(x.expand(*x.shape[:-2], 2, x.shape[-1]))[..., :1, :]
        return self._apply_to(x)

    def _apply_to(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`, in place.

    A weight shared with an embedding (a tied LM head) stays in the embedding as well.
    """
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine runs packed layers of this kind."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
