"""Products of two vectors, added up lane by lane: float32, pairs of bfloat16, or four bytes."""

from collections.abc import Callable

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
FLOATS, INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_NOTHING = ir.Constant(INTS, ir.Undefined)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not know."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_BFLOATS = ir.VectorType(_BFloat(), 2 * LANES)


def _has(feature: str) -> bool:
    """Whether numba compiles for a CPU with it: this one, unless its settings name another."""
    wanted: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if wanted is not None:
        return f"+{feature}" in wanted.split(",")
    return bool(binding.get_host_cpu_features().get(feature))


def _dot(
    builder: ir.IRBuilder, name: str, kind: ir.Type, total: ir.Value, *parts: ir.Value
) -> ir.Value:
    """An instruction of the CPU's own: total plus the products of two vectors of a kind."""
    signature = ir.FunctionType(total.type, [total.type, kind, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.x86.{name}")
    return builder.call(function, [total, *(builder.bitcast(part, kind) for part in parts)])


def float_terms(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    floats = [builder.bitcast(part, FLOATS) for part in (x, w)]
    return builder.call(fma, [*floats, total])


def _bfloat_terms(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    if _has("avx512bf16"):
        return _dot(builder, "avx512bf16.dpbf16ps.512", _BFLOATS, total, x, w)
    total = float_terms(builder, total, *(builder.shl(part, _all(16)) for part in (x, w)))
    return float_terms(builder, total, *(builder.and_(part, _all(-65536)) for part in (x, w)))


def _byte_terms(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    if _has("avx512vnni"):
        return _dot(builder, "avx512.vpdpbusd.512", _BYTES, total, x, w)
    for left in (24, 16, 8, 0):
        up = [builder.shl(part, _all(left)) for part in (x, w)]
        own = builder.mul(builder.lshr(up[0], _all(24)), builder.ashr(up[1], _all(24)))
        total = builder.add(total, own)
    return total


def spread(builder: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """An int32 in all lanes."""
    first = builder.insert_element(_NOTHING, word, _INT(0))
    return builder.shuffle_vector(first, _NOTHING, _all(0))


def _all(value: int) -> ir.Value:
    return ir.Constant(INTS, [value] * LANES)


TERMS_OF: dict[types.Type, tuple[ir.Type, Callable[..., ir.Value]]] = {
    types.float32: (FLOATS, float_terms),
    types.uint16: (FLOATS, _bfloat_terms),
    types.int8: (INTS, _byte_terms),
}
