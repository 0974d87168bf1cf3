"""What a Llama's layer does between its matrix products, by whichever way this machine has for it.

Steps keep no state between calls: several passes may use one.
"""

from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from workers.engine.attention import AttentionPlan, attend, rotate
from workers.engine.kv_store import finite
from workers.engine.threads import share

try:
    from workers.engine.kernels import attention, elements, layer
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    layer = None  # type: ignore[assignment]

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
    if layer is not None and device.type == "cpu" and dtype in _COMPILED:
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

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `LayerSteps` has it."""
        out = torch.empty_like(x)
        rows, size = x.shape
        layer.add_norm(
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
        layer.gate(_address(gate_up), _address(out), rows, size, _element(out))
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
        layer.rotate_and_store(
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
        counter = array("q", (0,))
        work = array(
            "q",
            (
                counter.buffer_info()[0],
                _address(plan.items),
                len(plan.items),
                _address(plan.table),
                _address(query),
                _address(keys),
                _address(values),
                _address(out),
                rows,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                len(keys),
            ),
        )
        kind: Any = type(_element(qkv))
        share(attention.attention_worker(kind), work.buffer_info()[0])
        return out.view(rows, -1)


def _element(x: Tensor) -> Any:
    """What a kernel is to take a tensor's elements for."""
    return elements.FLOAT32 if x.dtype == torch.float32 else elements.BFLOAT16


def _address(x: Tensor) -> int:
    """For a kernel, which sees no strides."""
    assert x.is_contiguous()
    return x.data_ptr()
