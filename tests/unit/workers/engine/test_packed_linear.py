"""Packed layers are the same layers, and a row's answer does not depend on its neighbours."""

import pytest
import torch
from torch import Tensor, nn

from workers.engine.packed_linear import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="nothing is compiled here"),
]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def linear(bias: bool, dtype: torch.dtype, wide: int = 48) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(wide, 40, bias=bias, dtype=dtype)


def rows_of(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@each_dtype
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 5), (1, 1), (1, 7)])
@torch.inference_mode()
def test_it_is_the_linear_layer(bias: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = linear(bias, dtype)
    x = rows_of(*shape, 48, dtype=dtype)
    expected = x.float() @ plain.weight.float().T + (plain.bias.float() if bias else 0)
    out = PackedLinear(plain)(x)
    assert out.shape == (*shape, 40)
    torch.testing.assert_close(out.float(), expected, **tolerance(dtype))


@each_dtype
@pytest.mark.parametrize("wide", [48, 1536])
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(wide: int, dtype: torch.dtype) -> None:
    packed = PackedLinear(linear(False, dtype, wide))
    x = rows_of(1, 100, wide, dtype=dtype)
    together = packed(x)
    for size in (1, 2, 3, 8, 31, 33, 64):
        assert torch.equal(packed(x[:, :size]), together[:, :size]), size
    assert torch.equal(packed(x[:, 20:27]), together[:, 20:27])


@each_dtype
@torch.inference_mode()
def test_linears_at_any_depth_are_replaced_and_a_tied_embedding_stays(dtype: torch.dtype) -> None:
    embedding = nn.Embedding(40, 48, dtype=dtype)
    head = linear(False, dtype)
    head.weight = embedding.weight
    inner = nn.Sequential(linear(True, dtype))
    model = nn.ModuleDict({"embed": embedding, "inner": inner, "head": head})
    pack_linears(model)
    assert isinstance(model["head"], PackedLinear)
    assert isinstance(model["inner"].get_submodule("0"), PackedLinear)
    rows = model["embed"](torch.tensor([3, 7]))
    expected = rows.float() @ embedding.weight.float().T
    torch.testing.assert_close(model["head"](rows).float(), expected, **tolerance(dtype))


def test_float16_and_gpus_are_left_to_torch() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))
