"""Packed layers are the same layers."""

import pytest
import torch
from torch import nn

from workers.engine.packed_linear import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="needs oneDNN's bfloat16"),
]


def linear(bias: bool) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(48, 40, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_it_is_the_linear_layer(bias: bool) -> None:
    plain = linear(bias)
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ plain.weight.float().T + (plain.bias.float() if bias else 0)
    out = PackedLinear(plain)(x)
    assert out.shape == (2, 5, 40)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


@torch.inference_mode()
def test_linears_at_any_depth_are_replaced_and_a_tied_embedding_stays() -> None:
    embedding = nn.Embedding(40, 48, dtype=torch.bfloat16)
    head = linear(False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embed": embedding, "inner": nn.Sequential(linear(True)), "head": head})
    pack_linears(model)
    assert isinstance(model["head"], PackedLinear)
    assert isinstance(model["inner"].get_submodule("0"), PackedLinear)
    rows = model["embed"](torch.tensor([3, 7]))
    expected = rows.float() @ embedding.weight.float().T
    torch.testing.assert_close(model["head"](rows).float(), expected, rtol=1e-2, atol=1e-1)


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.float32, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
