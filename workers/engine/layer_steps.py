"""What a Llama's layer does between its matrix products, by whichever way this machine has for it.

Steps keep no state between calls: several passes may use one.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from workers.engine.attention import AttentionPlan, SegmentPlan, attend, grouped_attention, rotate
from workers.engine.kv_store import finite

try:
    from workers.engine import kernels
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    kernels = None  # type: ignore[assignment]

# Query rows of one KV head up to which the compiled attention is used. It has one thread where
# torch's has all: on two cores a bfloat16 pass is faster up to a context of about 1000, and slower
# at 2000 (17 tokens: 62 ms, not 52). It is kept there, so that a row's bits depend on no limit.
MOST_ROWS = 128
_COMPILED = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """heads: of the queries; kv_heads: of keys and values."""

    heads: int
    kv_heads: int
    head_dim: int


class LayerSteps(Protocol):
    """Tensors are contiguous, and of one dtype."""

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add delta to x [rows, hidden] in place -> the RMS norm of x, times weight [hidden]."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [rows, gate and up] -> [rows, inner]."""

    def attend(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """Turn queries and keys of qkv [rows, (heads + 2 * kv_heads) * head_dim] by the angles'
        cosine and sine [rows, head_dim], put keys and values into the plan's slots of the layer's
        [slots, kv_heads, head_dim] -> what the queries read there, [rows, heads * head_dim].
        """


def open_steps(shape: HeadShape, dtype: torch.dtype, device: torch.device) -> LayerSteps:
    """The fastest there are."""
    if kernels is not None and device.type == "cpu" and dtype in _COMPILED:
        return CompiledSteps(shape)
    return TorchSteps(shape)


class TorchSteps:
    """As torch has them: any dtype, any device."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `LayerSteps` has it: in float32, as transformers has it, but for the weight."""
        x += delta
        return weight * rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `LayerSteps` has it."""
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up

    def attend(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """As `LayerSteps` has it."""
        shape = self._shape
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        cosine, sine = angles
        turning = shape.heads + shape.kv_heads
        turned = rotate(heads[:, :turning], (cosine[:, None], sine[:, None]))
        keys.index_copy_(0, plan.new_slots, finite(turned[:, shape.heads :]))
        values.index_copy_(0, plan.new_slots, finite(heads[:, turning:]))
        query = turned[:, : shape.heads].transpose(0, 1)[None]
        return attend(query, keys, values, plan).reshape(len(qkv), -1)


class CompiledSteps:
    """As `workers.engine.kernels` has them."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._scaling = shape.head_dim**-0.5

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `LayerSteps` has it."""
        out = torch.empty_like(x)
        rows, size = x.shape
        kernels.add_norm(
            _address(x),
            _address(delta),
            _address(weight),
            _address(out),
            rows,
            size,
            eps,
            _element(x),
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `LayerSteps` has it."""
        rows, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        kernels.gate(_address(gate_up), _address(out), rows, size, _element(out))
        return out

    def attend(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """As `LayerSteps` has it."""
        shape, rows = self._shape, len(qkv)
        cosine, sine = angles
        query = qkv.new_empty(shape.heads, rows, shape.head_dim)
        kernels.rotate_and_store(
            _address(qkv),
            _address(cosine),
            _address(sine),
            _address(plan.new_slots),
            _address(keys),
            _address(values),
            _address(query),
            rows,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            len(keys),
            _element(qkv),
        )
        out = qkv.new_empty(rows, shape.heads, shape.head_dim)
        first = 0
        for segment in plan.segments:
            if segment.size * shape.heads <= MOST_ROWS * shape.kv_heads:
                self._attend_few(query, keys, values, segment, first, out)
            else:
                last = first + segment.size
                own = query[None, :, first:last], segment.gather(keys), segment.gather(values)
                out[first:last] = grouped_attention(*own, segment.bias)[0]
            first += segment.size
        return out.view(rows, -1)

    def _attend_few(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        segment: SegmentPlan,
        first: int,
        out: Tensor,
    ) -> None:
        shape = self._shape
        kernels.attend(
            _address(query),
            _address(keys),
            _address(values),
            _address(segment.slots),
            _address(segment.unseen),
            _address(out),
            len(out),
            first,
            segment.size,
            len(segment.slots),
            len(segment.unseen),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            len(keys),
            self._scaling,
            _element(out),
        )


def _element(x: Tensor) -> Any:
    """What a kernel is to take a tensor's elements for."""
    return kernels.FLOAT32 if x.dtype == torch.float32 else kernels.BFLOAT16


def _address(x: Tensor) -> int:
    """For a kernel, which sees no strides."""
    assert x.is_contiguous()
    return x.data_ptr()
