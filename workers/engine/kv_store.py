"""Where keys and values live: one pair of tensors per layer, indexed by slot.

Which slot belongs to whom is decided by `cache.kv_pool`; every rank of a tensor-parallel target
holds a store of its own heads and obeys the same slot numbers.
"""

from math import prod
from mmap import mmap
from typing import Any

import torch
from torch import Tensor


class KVStore:
    """Keys and values of `slots` token positions for every layer, and room on the host for
    `host_slots` more, which no pass reads.

    keys[layer], values[layer]: [slots, kv_heads, head_dim].
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        host_slots: int = 0,
    ) -> None:
        # Zeros, not empty: a slot never written must not hold a NaN that a masked score would keep.
        self._all = _zeros((2 * layers, slots, kv_heads, head_dim), dtype, device)
        self.keys = list(self._all[:layers])
        self.values = list(self._all[layers:])
        self._host = _host_zeros((2 * layers, host_slots, kv_heads, head_dim), dtype, device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim] of one layer at slots [T]."""
        self.keys[layer].index_copy_(0, slots, finite(keys))
        self.values[layer].index_copy_(0, slots, finite(values))

    def move(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
        """Copy slots; everything is read before anything is written."""
        device = self._all.device
        src, dst = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        self._all.index_copy_(1, dst, self._all.index_select(1, src))

    def swap(
        self, pages: tuple[int, ...], places: tuple[int, ...], page_size: int, *, back: bool
    ) -> None:
        """Copy pages of so many slots to places on the host, or back; all are counted in pages."""
        ours, host = (slots.unflatten(1, (-1, page_size)) for slots in (self._all, self._host))
        page = torch.tensor(pages, device=ours.device)
        place = torch.tensor(places, device=host.device)
        if back:
            ours.index_copy_(1, page, host.index_select(1, place).to(ours.device))
        else:
            host.index_copy_(1, place, ours.index_select(1, page).to(host.device))


def finite(x: Tensor) -> Tensor:
    """Keys or values with 0 for what is no number.

    A key that is not to be seen weighs 0, and 0 times what is no number is none: a wrong guess must
    not spoil the rest of its tree. The logits of its own token tell all the same.
    """
    return x.nan_to_num(0.0, 0.0, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take memory on a CPU only where they are written: a pool is rarely full."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap(-1, prod(shape) * dtype.itemsize)  # anonymous: the kernel maps zeros
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the CPU, and where another device copies from there, in memory that it can read."""
    if device.type == "cpu":
        return _zeros(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, pin_memory=True)


class PoolCache:
    """What a transformers attention layer sees as its cache during one pass.

    It stores the new keys and values at the pack's slots and hands the layer's whole store to the
    attention function, which picks each segment's own extents from it.
    """

    def __init__(self, store: KVStore, slots: Tensor) -> None:
        self._store = store
        self._slots = slots

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """keys, values: [1, kv_heads, T, head_dim] -> the layer's [slots, kv_heads, head_dim]."""
        self._store.write(layer, self._slots, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        return self._store.keys[layer], self._store.values[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Never used for positions, which the pack gives explicitly."""
        return 0
