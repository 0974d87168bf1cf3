"""Compiled steps beside torch's own: the same numbers, and each row as if it were alone."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from workers.engine import layer_steps
from workers.engine.attention import AttentionPlan, SegmentPlan
from workers.engine.layer_steps import (
    CompiledSteps,
    HeadShape,
    LayerSteps,
    TorchSteps,
    open_steps,
)
from workers.engine.pack import Pack, Segment, chain_parents

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(layer_steps.layer is None, reason="nothing is compiled here"),
]

CPU = torch.device("cpu")
SHAPE = HeadShape(6, 2, 24)  # neither a whole number of vectors nor of tiles
POOL = 200
EPS = 1e-5
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
each_rows = pytest.mark.parametrize("rows", [0, 1, 2, 7, 33])
each_size = pytest.mark.parametrize("size", [1, 15, 16, 37, 576])


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


# -- which -----------------------------------------------------------------------------------------


def test_other_dtypes_and_devices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_steps(SHAPE, torch.bfloat16, CPU), CompiledSteps)
    assert isinstance(open_steps(SHAPE, torch.float16, CPU), TorchSteps)
    assert isinstance(open_steps(SHAPE, torch.float32, torch.device("cuda")), TorchSteps)
    monkeypatch.setattr(layer_steps, "layer", None)
    assert isinstance(open_steps(SHAPE, torch.float32, CPU), TorchSteps)


def test_a_tensor_with_strides_is_no_kernels_business() -> None:
    with pytest.raises(AssertionError):
        CompiledSteps(SHAPE).gate(some(8, 4, dtype=torch.float32).T)


# -- residual and norm -----------------------------------------------------------------------------


def both_norms(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The compiled step's result beside torch's; their residuals are compared."""
    by_torch, compiled = x.clone(), x.clone()
    theirs = TorchSteps(SHAPE).add_norm(by_torch, delta, weight, EPS)
    ours = CompiledSteps(SHAPE).add_norm(compiled, delta, weight, EPS)
    torch.testing.assert_close(compiled, by_torch, rtol=0, atol=0, equal_nan=True)
    return ours, theirs


@each_dtype
@each_rows
@each_size
def test_the_norm_is_torchs(dtype: torch.dtype, rows: int, size: int) -> None:
    x, delta = (some(rows, size, dtype=dtype, seed=seed) for seed in (1, 2))
    check(*both_norms(x, delta, some(size, dtype=dtype, seed=3)))


@each_dtype
def test_the_norm_of_what_is_no_number_is_torchs(dtype: torch.dtype) -> None:
    x = special(dtype)
    x[:, 3] = 1
    check(*both_norms(x, torch.zeros_like(x), some(20, dtype=dtype)))


def test_a_sum_between_two_elements_goes_to_the_even_one() -> None:
    """bfloat16 has 8 bits: 256 + 1 is halfway to 258, and 258 + 1 halfway to 260."""
    x = torch.tensor([[256.0, 258.0, -256.0, 258.0]]).bfloat16()
    CompiledSteps(SHAPE).add_norm(x, torch.ones_like(x), x[0].clone(), EPS)
    assert x.tolist() == [[256.0, 260.0, -255.0, 260.0]]


@each_dtype
def test_a_normed_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, delta = (some(33, 37, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, steps = some(37, dtype=dtype), CompiledSteps(SHAPE)
    together = steps.add_norm(x.clone(), delta, weight, EPS)
    for row in range(33):
        alone = steps.add_norm(x[row : row + 1].clone(), delta[row : row + 1], weight, EPS)
        assert torch.equal(alone[0], together[row])


# -- gate ------------------------------------------------------------------------------------------


@each_dtype
@each_rows
@each_size
def test_the_gate_is_torchs(dtype: torch.dtype, rows: int, size: int) -> None:
    gate_up = 4 * some(rows, 2 * size, dtype=dtype)
    ours = CompiledSteps(SHAPE).gate(gate_up)
    check(ours, TorchSteps(SHAPE).gate(gate_up))
    for row in range(rows):
        assert torch.equal(CompiledSteps(SHAPE).gate(gate_up[row : row + 1])[0], ours[row])


@each_dtype
def test_the_gate_of_any_size_of_number_is_torchs(dtype: torch.dtype) -> None:
    gates = torch.cat([torch.linspace(-120, 120, 4001).to(dtype), special(dtype)[:, 0]])
    ours = CompiledSteps(SHAPE).gate(torch.cat([gates, torch.ones_like(gates)])[None])[0]
    check(ours, silu(gates))


# -- rotation, storing, attention ------------------------------------------------------------------


def plan_of(slots: Tensor, seen: Tensor, dtype: torch.dtype, extent: bool = False) -> AttentionPlan:
    whole = (int(slots[0]), int(slots[-1]) + 1) if extent else None
    segment = SegmentPlan(slots, whole, seen, SHAPE.heads // SHAPE.kv_heads, dtype)
    return AttentionPlan((segment,), slots[-len(seen) :])


def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Queries, keys and values in one; angles; and a store's keys and values."""
    wide = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    angle = some(rows, SHAPE.head_dim, dtype=torch.float32, seed=5)
    keys, values = (
        some(POOL, SHAPE.kv_heads, SHAPE.head_dim, dtype=dtype, seed=seed) for seed in (6, 7)
    )
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
    by_torch, compiled = ([part.clone() for part in store] for _ in range(2))
    theirs = TorchSteps(SHAPE).attend(qkv, angles, by_torch[0], by_torch[1], plan)
    ours = CompiledSteps(SHAPE).attend(qkv, angles, compiled[0], compiled[1], plan)
    for own, other in zip(compiled, by_torch, strict=True):
        assert torch.equal(own, other)
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
    steps = CompiledSteps(SHAPE)
    together = steps.attend(qkv, angles, store[0], store[1], both)
    for plan, own in zip(parts, (slice(0, 4), slice(4, 12)), strict=True):
        turns = angles[0][own], angles[1][own]
        assert torch.equal(steps.attend(qkv[own], turns, *store, plan), together[own])


@each_dtype
def test_an_attending_row_has_the_same_bits_in_a_tree_and_alone(dtype: torch.dtype) -> None:
    """Alone, its ancestors are context, and what it did not see is not there."""
    rows, context = 33, 70
    qkv, angles, *store = inputs(rows, dtype)
    seen, slots, steps = tree_of(rows), torch.arange(5, 5 + context + rows), CompiledSteps(SHAPE)
    together = steps.attend(qkv, angles, *store, plan_of(slots, seen, dtype))
    for row in range(rows):
        own = torch.cat([slots[:context], slots[context:][seen[row]]])
        turns = angles[0][row : row + 1], angles[1][row : row + 1]
        plan = plan_of(own, torch.ones(1, 1, dtype=torch.bool), dtype)
        alone = steps.attend(qkv[row : row + 1], turns, *store, plan)
        assert torch.equal(alone[0], together[row])


@each_dtype
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    qkv, angles, *store = inputs(3, dtype)
    plan = plan_of(torch.arange(10), tree_of(3), dtype)
    clean = CompiledSteps(SHAPE).attend(qkv, angles, *(part.clone() for part in store), plan)
    qkv[2, : SHAPE.head_dim] = float("nan")  # one query head
    spoilt = CompiledSteps(SHAPE).attend(qkv, angles, *store, plan)
    assert spoilt[2, : SHAPE.head_dim].isnan().all()
    assert torch.equal(spoilt[2, SHAPE.head_dim :], clean[2, SHAPE.head_dim :])
    assert torch.equal(spoilt[:2], clean[:2])


@each_dtype
@pytest.mark.parametrize("steps", [TorchSteps(SHAPE), CompiledSteps(SHAPE)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_whose_keys_are_no_numbers_spoils_none_that_does_not_see_it(
    steps: LayerSteps, dtype: torch.dtype, value: float
) -> None:
    qkv, angles, *store = inputs(3, dtype)
    seen = torch.tensor([[True, False, False], [False, True, False], [True, False, True]])
    plan = plan_of(torch.arange(10), seen, dtype)
    clean = steps.attend(qkv, angles, store[0].clone(), store[1].clone(), plan)
    qkv[1, SHAPE.heads * SHAPE.head_dim :] = value
    spoilt = steps.attend(qkv, angles, store[0], store[1], plan)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    assert all(part.isfinite().all() for part in store)


@each_dtype
@pytest.mark.parametrize("steps", [TorchSteps(SHAPE), CompiledSteps(SHAPE)])
def test_a_prompt_has_the_same_bits_with_a_tree_behind_it(
    steps: LayerSteps, dtype: torch.dtype
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
        plan = AttentionPlan.build(Pack((segment,)), SHAPE.heads // SHAPE.kv_heads, dtype, CPU)
        turns = angles[0][own], angles[1][own]
        return steps.attend(qkv[own], turns, keys, values, plan)

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
