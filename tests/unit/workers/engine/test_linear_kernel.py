"""Packed products beside torch's in float64, and each row as if it were alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="nothing is compiled here")

from workers.engine.kernels.elements import BFLOAT16, FLOAT32
from workers.engine.kernels.linear import INT8, multiply
from workers.engine.packed_weight import BLOCK, PackedWeight, pack, quantise

LIKE = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
DTYPES = [torch.float32, torch.bfloat16]


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(
    x: Tensor, weight: PackedWeight, dtype: torch.dtype, scales: Tensor | None = None
) -> Tensor:
    """x [rows, K] times a packed weight [N, K], as `dtype`; scales: of int8 rows."""
    blocks, steps = weight.data.shape[:2]
    out = torch.full((len(x), BLOCK * blocks), 7.0, dtype=dtype)
    multiply(
        weight.addresses()[0],
        x.data_ptr(),
        len(x),
        x.shape[1] * x.itemsize,
        out.shape[1] * out.itemsize,
        out.data_ptr(),
        *weight.addresses()[1:],
        0 if scales is None else scales.data_ptr(),
        0,
        blocks,
        steps,
        LIKE[weight.data.dtype],
        LIKE[dtype],
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 14, 15, 29])
def test_it_is_the_product(dtype: torch.dtype, blocks: int, rows: int) -> None:
    x, weight = some(rows, 36, dtype=dtype), some(BLOCK * blocks, 36, dtype=dtype, seed=1)
    expected = x.double() @ weight.double().T
    close = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    ours = product(x, pack(weight), dtype)
    torch.testing.assert_close(ours.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_beside_any_number_of_others(dtype: torch.dtype) -> None:
    x, weight = some(40, 192, dtype=dtype), pack(some(112, 192, dtype=dtype, seed=1))
    together = product(x, weight, dtype)
    for rows in (1, 2, 3, 7, 8, 13, 14, 15, 28, 39):
        assert torch.equal(product(x[:rows].clone(), weight, dtype), together[:rows])
        assert torch.equal(product(x[-rows:].clone(), weight, dtype), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_bytes_sum_up_exactly(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(1, 256, (rows, 64), generator=generator, dtype=torch.uint8)
    scales = some(rows, seed=3).abs()
    weight = some(80, 64, seed=4)
    packed = quantise(weight)
    assert packed.scales is not None
    whole = (weight.double() / packed.scales.double()[:, None]).round()
    sums = (x.double() - 128) @ whole.T
    expected = (sums.float() * packed.scales) * scales[:, None]
    assert torch.equal(product(x, packed, dtype, scales), expected.to(dtype))


def test_a_weight_is_never_more_than_half_a_step_from_its_byte() -> None:
    weight = some(32, 40, seed=5)
    weight[3] = 0
    packed = quantise(weight)
    assert packed.scales is not None
    values = packed.data.transpose(1, 2).reshape(32, 40).double()
    steps = packed.scales.double()[:, None]
    assert ((values * steps - weight.double()).abs() <= steps * 0.5001).all()
    assert values.abs().amax(1).tolist() == [127.0] * 3 + [0.0] + [127.0] * 28


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, value: float) -> None:
    x, weight = some(3, 64, dtype=dtype), pack(some(48, 64, dtype=dtype, seed=1))
    clean = product(x, weight, dtype)
    x[1, 5] = value
    spoilt = product(x, weight, dtype)
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("packing", [pack, quantise])
def test_what_does_not_fill_a_block_is_filled_up(packing: Callable[[Tensor], PackedWeight]) -> None:
    x, scales, weight = some(2, 8), some(2).abs(), some(19, 8, seed=1)
    ragged, whole = packing(weight), packing(torch.cat([weight, torch.zeros(13, 8)]))
    assert ragged.outputs == whole.outputs == 32
    if packing is quantise:
        x = torch.arange(16, dtype=torch.uint8).view(2, 8)
    found = product(x, ragged, torch.float32, scales)
    assert torch.equal(found, product(x, whole, torch.float32, scales))
    assert not found[:, 19:].any()


_ON_ANOTHER_CPU = """
from tests.unit.workers.engine import test_linear_kernel as own
from workers.engine.kernels.terms import _has
for dtype in own.DTYPES:
    own.test_it_is_the_product(dtype, blocks=3, rows=9)
    own.test_bytes_sum_up_exactly(dtype, rows=9)
print(_has("avx512bf16"), _has("avx512vnni"))
"""


def on_cpu(name: str, features: str, code: str, cache: Path) -> list[str]:
    """The words that code prints in a process of its own: numba is told once what to compile for.
    Nothing that is compiled may be called for a CPU that this one is not.
    """
    settings = {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": str(Path(__file__).resolve().parents[4]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("name", "features"), [("x86-64-v3", "+avx2,+fma"), ("x86-64", "+sse2")])
def test_a_cpu_without_instructions_for_it_computes_the_same(
    name: str, features: str, tmp_path: Path
) -> None:
    assert on_cpu(name, features, _ON_ANOTHER_CPU, tmp_path) == ["False", "False"]


_FOR_ANOTHER_CPU = """
from numba import types
from workers.engine.kernels.linear import multiply
for weights in (types.uint16, types.int8):
    multiply.compile((*[types.int64] * 12, weights, types.uint16))
code = "".join(multiply.inspect_asm().values())
print(*(instruction in code for instruction in ("vdpbf16ps", "vpdpbusd")))
"""


def test_a_cpu_with_instructions_for_it_is_given_them(tmp_path: Path) -> None:
    features = "+avx512f,+avx512bw,+avx512vl,+avx512bf16,+avx512vnni,+avx2,+fma"
    assert on_cpu("znver4", features, _FOR_ANOTHER_CPU, tmp_path) == ["True", "True"]
