"""int8 as it is meant: rounded weights and inputs, multiplied without another error."""

import torch
from torch import Tensor, nn


def round_weights(linear: nn.Linear) -> None:
    """To 255 steps an output, in place."""
    steps = linear.weight.abs().amax(1, keepdim=True) / 127
    with torch.no_grad():
        linear.weight.copy_((linear.weight / steps).round() * steps)


def rounded_input(_: nn.Module, given: tuple[Tensor]) -> Tensor:
    """To 255 steps a row: for a layer's `register_forward_pre_hook`."""
    steps = given[0].abs().amax(-1, keepdim=True) / 127
    return (given[0] / steps + 0.5).floor() * steps
