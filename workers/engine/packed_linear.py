"""Linear layers with weights laid out once for oneDNN: the CPU's fast path for bfloat16.

`F.linear` lays a bf16 weight out anew in every call. Doing it once took a one-token pass of
SmolLM2-135M on two cores from 43 to 30 ms.
"""

import torch
from torch import Tensor, nn

# The batch size oneDNN should choose its weight layout for. 16 keeps a row's bits the same for any
# row count from 1 to 32, which larger hints do not.
LAYOUT_ROWS = 16


class PackedLinear(nn.Module):
    """A bias-optional linear layer over a weight in oneDNN's own layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
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
    """Whether this machine runs packed bfloat16 layers."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
