"""Kernels of a layer beside torch's own: the same numbers, and each row as if it were alone."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from workers.engine import pass_work
from workers.engine.attention import AttentionPlan, SegmentPlan, attend, rotate
from workers.engine.kv_store import finite
from workers.engine.pack import Pack, Segment, chain_parents

if pass_work.COMPILES:
    from numba import njit

    from workers.engine.kernels.attention import attend_items
    from workers.engine.kernels.eagle import likeliest
    from workers.engine.kernels.elements import BFLOAT16, FLOAT32, narrow, widen
    from workers.engine.kernels.layer import gate_row, norm_row, rotate_row

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(not pass_work.COMPILES, reason="nothing is compiled here"),
]

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 24  # neither a whole number of vectors nor of tiles
POOL = 200
EPS = 1e-5
Attention = Callable[[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, AttentionPlan], Tensor]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_rows = pytest.mark.parametrize("rows", [1, 2, 7, 33])
each_size = pytest.mark.parametrize("size", [1, 15, 16, 37, 576])


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen_by_numba(x: Tensor) -> Any:
    """The same memory; bfloat16 as words."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def check(ours: Tensor, theirs: Tensor) -> None:
    """Equal to a few units in the last place, NaN where the other is NaN."""
    assert ours.dtype == theirs.dtype
    rtol = {torch.float32: 5e-7, torch.bfloat16: 2**-7}[ours.dtype]
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-37, equal_nan=True)


def special(dtype: torch.dtype) -> Tensor:
    """NaN, infinities, numbers that are hardly there, and the largest; one of them a row."""
    tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    values = [
        float("nan"),
        float("inf"),
        -float("inf"),
        0.0,
        -0.0,
        tiny / 4,
        -tiny / 4,
        huge,
        -huge,
    ]
    return torch.tensor(values, dtype=dtype)[:, None].expand(-1, 20).contiguous()


# -- norm ------------------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for row, own in zip(seen_by_numba(x), seen_by_numba(out), strict=True):
        norm_row(row, seen_by_numba(weight), own, EPS)
    return out


def normed_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return weight * rms_norm(x.float(), weight.shape, None, EPS).to(x.dtype)


@each_dtype
@each_rows
@each_size
def test_the_norm_is_torchs(dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = some(rows, size, dtype=dtype, seed=1), some(size, dtype=dtype, seed=3)
    check(normed(x, weight), normed_by_torch(x, weight))


@each_dtype
def test_the_norm_of_what_is_no_number_is_torchs(dtype: torch.dtype) -> None:
    x, weight = special(dtype), some(20, dtype=dtype)
    x[:, 3] = 1
    check(normed(x, weight), normed_by_torch(x, weight))


def test_a_number_between_two_elements_goes_to_the_even_one() -> None:
    """bfloat16 has 8 bits: 257 is halfway between 256 and 258, and 259 between 258 and 260."""

    @njit  # type: ignore[untyped-decorator]
    def rounded(value: Any) -> Any:
        return widen(narrow(value, BFLOAT16))

    for value, expected in ((257, 256), (259, 260), (-255, -255), (-257, -256)):
        assert rounded(np.float32(value)) == expected


# -- gate ------------------------------------------------------------------------------------------


def gated(both: Tensor) -> Tensor:
    out = both.new_empty(len(both), both.shape[1] // 2)
    for row, own in zip(seen_by_numba(both), seen_by_numba(out), strict=True):
        gate_row(row, own)
    return out


@each_dtype
@each_rows
@each_size
def test_the_gate_is_torchs(dtype: torch.dtype, rows: int, size: int) -> None:
    both = 4 * some(rows, 2 * size, dtype=dtype)
    gate, up = both.chunk(2, -1)
    check(gated(both), silu(gate) * up)


@each_dtype
def test_the_gate_of_any_size_of_number_is_torchs(dtype: torch.dtype) -> None:
    gates = torch.cat([torch.linspace(-120, 120, 4001).to(dtype), special(dtype)[:, 0]])
    check(gated(torch.cat([gates, torch.ones_like(gates)])[None])[0], silu(gates))


# -- the likeliest ---------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("size", [1, 8, 63, 64, 65, 1000])
def test_the_likeliest_are_torchs(dtype: torch.dtype, size: int) -> None:
    scores = 3 * some(size, dtype=torch.float32).to(dtype)
    number = min(8, size)
    places, probabilities = np.zeros(number, np.int64), np.zeros(number, np.float32)
    likeliest(seen_by_numba(scores), places, probabilities)
    order = scores.float().argsort(descending=True, stable=True)[:number]
    assert places.tolist() == order.tolist()
    expected = scores.float().softmax(-1)[order]
    torch.testing.assert_close(torch.from_numpy(probabilities), expected, rtol=1e-5, atol=0)


def test_of_scores_that_are_no_numbers_none_is_likely() -> None:
    places, probabilities = np.zeros(4, np.int64), np.zeros(4, np.float32)
    likeliest(np.full(100, np.nan, np.float32), places, probabilities)
    assert not (probabilities > 0).any()


# -- rotation, storing, attention ------------------------------------------------------------------


def compiled(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """Turn queries and keys of qkv [rows, (HEADS + 2 * KV_HEADS) * SIZE] by the angles, keys and
    values to the plan's slots -> what the queries read there, [rows, HEADS * SIZE].
    """
    rows = len(qkv)
    query, out = qkv.new_empty(HEADS, rows, SIZE), qkv.new_empty(rows, HEADS, SIZE)
    turned, stored, kept = (seen_by_numba(part) for part in (query, keys, values))
    heads = seen_by_numba(qkv.view(rows, -1, SIZE))
    cosine, sine = (seen_by_numba(part) for part in angles)
    for row, slot in enumerate(plan.new_slots.tolist()):
        rotate_row(heads[row], cosine[row], sine[row], stored[slot], kept[slot], turned, row)
    counter = array("q", (0,))
    attend_items(
        counter.buffer_info()[0],
        plan.items.ctypes.data,
        len(plan.items),
        plan.table.ctypes.data,
        *(part.data_ptr() for part in (query, keys, values, out)),
        rows,
        HEADS,
        KV_HEADS,
        SIZE,
        POOL,
        FLOAT32 if qkv.dtype == torch.float32 else BFLOAT16,
    )
    return out.view(rows, -1)


def by_torch(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
) -> Tensor:
    """The same."""
    heads = qkv.view(len(qkv), -1, SIZE)
    cosine, sine = angles
    turned = rotate(heads[:, : HEADS + KV_HEADS], (cosine[:, None], sine[:, None]))
    keys.index_copy_(0, plan.new_slots, finite(turned[:, HEADS:]))
    values.index_copy_(0, plan.new_slots, finite(heads[:, HEADS + KV_HEADS :]))
    query = turned[:, :HEADS].transpose(0, 1)[None]
    return attend(query, keys, values, plan).reshape(len(qkv), -1)


def plan_of(slots: Tensor, seen: Tensor, dtype: torch.dtype, extent: bool = False) -> AttentionPlan:
    whole = (int(slots[0]), int(slots[-1]) + 1) if extent else None
    segment = SegmentPlan(slots, whole, seen.numpy(), HEADS // KV_HEADS, dtype)
    return AttentionPlan((segment,), slots[-len(seen) :])


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Queries, keys and values in one; angles; and a store's keys and values."""
    wide = (HEADS + 2 * KV_HEADS) * SIZE
    angle = some(rows, SIZE, dtype=torch.float32, seed=5)
    keys, values = (some(POOL, KV_HEADS, SIZE, dtype=dtype, seed=seed) for seed in (6, 7))
    return (
        some(rows, wide, dtype=dtype),
        (angle.cos().to(dtype), angle.sin().to(dtype)),
        keys,
        values,
    )


def tree_of(rows: int, older: int = 0) -> Tensor:
    """Every row sees itself and about half of those before it."""
    generator = torch.Generator().manual_seed(8)
    seen = torch.rand(rows, older + rows, generator=generator) > 0.5
    return seen.tril(older - 1) | torch.eye(older + rows, dtype=torch.bool)[older:]


@each_dtype
@pytest.mark.parametrize("context", [0, 1, 63, 64, 130])
@pytest.mark.parametrize(("rows", "older"), [(1, 0), (2, 0), (9, 0), (33, 0), (45, 0), (5, 3)])
def test_attention_is_torchs(dtype: torch.dtype, context: int, rows: int, older: int) -> None:
    """The bits in the store are equal."""
    qkv, angles, *store = inputs(rows, dtype)
    slots = torch.randperm(POOL, generator=torch.Generator().manual_seed(9))
    plan = plan_of(slots[: context + older + rows].clone(), tree_of(rows, older), dtype)
    mine, other = ([part.clone() for part in store] for _ in range(2))
    theirs = by_torch(qkv, angles, other[0], other[1], plan)
    ours = compiled(qkv, angles, mine[0], mine[1], plan)
    for own, other_own in zip(mine, other, strict=True):
        assert torch.equal(own, other_own)
    close = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=close, atol=close)


@each_dtype
def test_segments_of_one_pass_are_as_each_alone(dtype: torch.dtype) -> None:
    qkv, angles, *store = inputs(12, dtype)
    parts = [
        plan_of(torch.arange(20, 34), tree_of(4), dtype, extent=True),
        plan_of(torch.arange(60, 90).flip(0), tree_of(8), dtype),
    ]
    both = AttentionPlan(
        tuple(plan.segments[0] for plan in parts), torch.cat([plan.new_slots for plan in parts])
    )
    together = compiled(qkv, angles, store[0], store[1], both)
    for plan, own in zip(parts, (slice(0, 4), slice(4, 12)), strict=True):
        turns = angles[0][own], angles[1][own]
        assert torch.equal(compiled(qkv[own], turns, *store, plan), together[own])


@each_dtype
def test_an_attending_row_has_the_same_bits_in_a_tree_and_alone(dtype: torch.dtype) -> None:
    """Alone, its ancestors are context, and what it did not see is not there."""
    rows, context = 33, 70
    qkv, angles, *store = inputs(rows, dtype)
    seen, slots = tree_of(rows), torch.arange(5, 5 + context + rows)
    together = compiled(qkv, angles, *store, plan_of(slots, seen, dtype))
    for row in range(rows):
        own = torch.cat([slots[:context], slots[context:][seen[row]]])
        turns = angles[0][row : row + 1], angles[1][row : row + 1]
        plan = plan_of(own, torch.ones(1, 1, dtype=torch.bool), dtype)
        alone = compiled(qkv[row : row + 1], turns, *store, plan)
        assert torch.equal(alone[0], together[row])


@each_dtype
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    qkv, angles, *store = inputs(3, dtype)
    plan = plan_of(torch.arange(10), tree_of(3), dtype)
    clean = compiled(qkv, angles, *(part.clone() for part in store), plan)
    qkv[2, :SIZE] = float("nan")  # one query head
    spoilt = compiled(qkv, angles, *store, plan)
    assert spoilt[2, :SIZE].isnan().all()
    assert torch.equal(spoilt[2, SIZE:], clean[2, SIZE:])
    assert torch.equal(spoilt[:2], clean[:2])


@each_dtype
@pytest.mark.parametrize("reads", [by_torch, compiled])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_whose_keys_are_no_numbers_spoils_none_that_does_not_see_it(
    reads: Attention, dtype: torch.dtype, value: float
) -> None:
    qkv, angles, *store = inputs(3, dtype)
    seen = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    plan = plan_of(torch.arange(10), seen, dtype)
    clean = reads(qkv, angles, store[0].clone(), store[1].clone(), plan)
    qkv[1, HEADS * SIZE :] = value
    spoilt = reads(qkv, angles, store[0], store[1], plan)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    assert all(part.isfinite().all() for part in store)


@each_dtype
@pytest.mark.parametrize("reads", [by_torch, compiled])
def test_a_prompt_has_the_same_bits_with_a_tree_behind_it(
    reads: Attention, dtype: torch.dtype
) -> None:
    """So has the tree, when the prompt is there before it."""
    prompt, context, tree = 80, 7, (-1, 0, 0, -1, 3)
    total = prompt + len(tree)
    qkv, angles, *store = inputs(total, dtype)
    parents = (*chain_parents(prompt), *(prompt + parent for parent in tree))
    extents = ((3, 3 + context + total),)
    rows = tuple(range(prompt - 1, total))
    tokens = (0,) * total

    def run(segment: Segment, own: slice, keys: Tensor, values: Tensor) -> Tensor:
        plan = AttentionPlan.build(Pack((segment,)), HEADS // KV_HEADS, dtype, CPU)
        turns = angles[0][own], angles[1][own]
        return reads(qkv[own], turns, keys, values, plan)

    kept = [part.clone() for part in store]
    whole = run(Segment(tokens, context, parents, extents, rows), slice(0, total), *store)
    chunk = Segment(
        tokens[:prompt], context, parents[:prompt], ((3, 3 + context + prompt),), (prompt - 1,)
    )
    alone = run(chunk, slice(0, prompt), *kept)
    assert torch.equal(alone, whole[:prompt])
    below = Segment(tokens[prompt:], context + prompt, tree, extents, tuple(range(len(tree))))
    later = run(below, slice(prompt, total), *kept)
    assert torch.equal(later, whole[prompt:])
