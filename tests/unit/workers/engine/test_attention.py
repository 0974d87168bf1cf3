"""The attention function itself; whole passes are compared in test_runner.py."""

import math

import pytest
import torch
from torch import nn

from workers.engine.attention import AttentionPlan, pool_attention
from workers.engine.pack import Pack, Segment

CPU = torch.device("cpu")


def plan_of(*segments: Segment, groups: int = 2) -> AttentionPlan:
    return AttentionPlan.build(Pack(segments), groups, torch.float32, CPU)


def test_a_contiguous_sequence_is_read_as_a_view_and_a_scattered_one_gathered() -> None:
    store = torch.arange(20.0).reshape(10, 1, 2)
    whole = Segment((1,), 2, (-1,), ((4, 7),), ())
    scattered = Segment((1,), 2, (-1,), ((8, 10), (0, 1)), ())
    plan = plan_of(whole, scattered)
    view = plan.segments[0].gather(store)
    assert view.data_ptr() == store[4].data_ptr()
    assert view[0, 0, :, 0].tolist() == [8, 10, 12]
    assert plan.segments[1].gather(store)[0, 0, :, 0].tolist() == [16, 18, 0]
    assert plan.new_slots.tolist() == [6, 0]


def test_only_ancestors_of_the_same_segment_are_seen() -> None:
    bias = plan_of(Segment((1, 2, 3), 1, (-1, 0, 0), ((0, 4),), ()), groups=2).segments[0].bias
    assert bias is not None
    seen = [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    assert (bias[0, 0] == 0).int().tolist() == seen * 2  # once for each query head of a KV head
    assert plan_of(Segment((1,), 3, (-1,), ((0, 4),), ())).segments[0].bias is None


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_is_softmax_attention_with_shared_kv_heads(scaling: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, width = 4, 2, 3
    keys, values = (torch.randn(6, kv_heads, width, generator=generator) for _ in range(2))
    query = torch.randn(1, heads, 3, width, generator=generator)
    plan = plan_of(
        Segment((1, 2), 2, (-1, -1), ((0, 4),), ()), Segment((3,), 1, (-1,), ((4, 6),), ())
    )
    out, _ = pool_attention(nn.Module(), query, keys, values, None, plan=plan, scaling=scaling)
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    for row, seen in enumerate([[0, 1, 2], [0, 1, 3], [4, 5]]):  # two siblings; another sequence
        for head in range(heads):
            own = keys[seen, head // 2]
            weights = (own @ query[0, head, row] * scale).softmax(0)
            expected = weights @ values[seen, head // 2]
            torch.testing.assert_close(out[0, row, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window"])
def test_what_it_does_not_compute_is_refused(name: str) -> None:
    plan = plan_of(Segment((1,), 0, (-1,), ((0, 1),), ()))
    store = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match=f"^target: attention with '{name}' is not supported"):
        pool_attention(
            nn.Module(), torch.zeros(1, 2, 1, 2), store, store, None, plan=plan, **{name: 30.0}
        )
