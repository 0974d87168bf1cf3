"""What a compiled pass is told: sizes, addresses, and room for what is between its steps.

The order of everything is that of `workers.engine.kernels.steps`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from workers.engine.attention import AttentionPlan
from workers.engine.packed_weight import PackedWeight
from workers.engine.threads import barrier_address, share

try:
    from workers.engine.kernels import steps
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    steps = None  # type: ignore[assignment]

COMPILES = steps is not None
"""Whether there are compiled passes here."""

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}
"""How numba knows elements."""

_LINE = 64  # bytes, at whose multiples vectors are fastest


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Of a decoder layer; inner: of its MLP."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def asked(self) -> int:
        """Numbers in all of a row's queries."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Numbers in all of a row's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class LayerTable:
    """Where the weights of layers are, and the weights themselves. The last row is the head's."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.rows = torch.zeros(layers + 1, steps.LAYER_FIELDS, dtype=torch.int64)
        self._kept: list[Tensor | PackedWeight] = []

    def put(self, layer: int, place: int, weight: Tensor | PackedWeight) -> None:
        """A norm's weight, or a product's."""
        self._kept.append(weight)
        if isinstance(weight, Tensor):
            self.rows[layer, place] = weight.data_ptr()
        else:
            self.rows[layer, place : place + 3] = torch.tensor(weight.addresses())

    def put_store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Where the layer's keys and values are; who gave them keeps them."""
        self.rows[layer, steps.KEYS] = keys.data_ptr()
        self.rows[layer, steps.VALUES] = values.data_ptr()

    def put_features(self, layer: int, states: Tensor) -> None:
        """Where the layer's input goes."""
        self.rows[layer, steps.FEATURES] = states.data_ptr()


@dataclass(frozen=True, slots=True)
class Rows:
    """What a pass is about. x [rows, hidden]; angles: cosine and sine [rows, head_dim]; pool: slots
    in a layer's store; wanted: rows whose logits [number, vocabulary] are asked for.
    """

    x: Tensor
    angles: tuple[Tensor, Tensor]
    plan: AttentionPlan
    pool: int
    wanted: Tensor
    logits: Tensor


def run_pass(
    program: int,
    counted: int,
    table: LayerTable,
    sizes: LayerSizes,
    epsilon: Tensor,
    rows: Rows,
    *,
    fields: int,
    bytes_wide: int,
    more: Sequence[int] = (),
) -> None:
    """Have every thread run a compiled program.

    counted: its steps; epsilon: float32 [1]; fields: how many numbers it takes; bytes_wide: the
    widest input of a product with int8 weights, 0 for others; more: what it takes behind what all
    passes do.
    """
    counters = torch.zeros(counted, dtype=torch.int64)
    room, parts = _room(rows.x, sizes, bytes_wide)
    work = array(
        "q",
        (
            counters.data_ptr(),
            barrier_address(),
            torch.get_num_threads(),
            table.rows.data_ptr(),
            table.layers,
            epsilon.data_ptr(),
            len(rows.x),
            rows.x.data_ptr(),
            rows.angles[0].data_ptr(),
            rows.angles[1].data_ptr(),
            rows.plan.new_slots.data_ptr(),
            rows.plan.items.ctypes.data,
            len(rows.plan.items),
            rows.plan.table.ctypes.data,
            rows.wanted.data_ptr(),
            len(rows.wanted),
            rows.logits.data_ptr(),
            *parts,
            sizes.hidden,
            sizes.inner,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            rows.pool,
            rows.logits.shape[1],
        ),
    )
    assert len(work) == steps.PASS_FIELDS
    work.extend(more)
    assert len(work) == fields
    share(program, work.buffer_info()[0])


def _room(x: Tensor, sizes: LayerSizes, bytes_wide: int) -> tuple[Tensor, list[int]]:
    """For what is between the steps of a pass over x [rows, hidden], and the addresses in it of its
    parts, in the programs' order: 0 for one that is not needed.
    """
    hidden, asked, inner = sizes.hidden, sizes.asked, sizes.inner
    widths = (hidden, sizes.qkv, asked, asked, hidden, 2 * inner, inner)
    in_bytes = [x.itemsize * width for width in widths] + [bytes_wide, torch.float32.itemsize]
    lengths = [-(-len(x) * size // _LINE) * _LINE for size in in_bytes]
    room = torch.empty(sum(lengths), dtype=torch.uint8)
    begins = accumulate(lengths, initial=room.data_ptr())
    return room, [begin if length else 0 for begin, length in zip(begins, lengths, strict=False)]
