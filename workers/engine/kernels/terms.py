"""Products of two vectors, added up lane by lane: float32, pairs of bfloat16, or four bytes."""

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

LANES = 16

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
FLOATS, INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_NOTHING = ir.Constant(INTS, ir.Undefined)
_BYTES = ir.VectorType(ir.IntType(8), 4 * LANES)
_HALF, _SHORTS = ir.VectorType(_INT, LANES // 2), ir.VectorType(ir.IntType(16), LANES)


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


# Vectors that the CPU's registers hold.
VECTORS = 32 if _has("avx512f") else 8


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
    return _dot(builder, "avx512bf16.dpbf16ps.512", _BFLOATS, total, x, w)


def _byte_terms(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    return _dot(builder, "avx512.vpdpbusd.512", _BYTES, total, x, w)


def _short_terms(builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    """Pairs of 16 bits, by halves of a vector, which is what AVX2 has."""
    signature = ir.FunctionType(_HALF, [_SHORTS, _SHORTS])
    pairs = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.pmadd.wd")
    halves = []
    for number in range(2):
        sums, *own = (_half(builder, part, number) for part in (total, x, w))
        shorts = [builder.bitcast(part, _SHORTS) for part in own]
        halves.append(builder.add(sums, builder.call(pairs, shorts)))
    return builder.shuffle_vector(*halves, ir.Constant(INTS, list(range(LANES))))


def _half(builder: ir.IRBuilder, vector: ir.Value, number: int) -> ir.Value:
    first = number * LANES // 2
    places = ir.Constant(_HALF, list(range(first, first + LANES // 2)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), places)


def _plain_short_terms(
    builder: ir.IRBuilder, total: ir.Value, x: ir.Value, w: ir.Value
) -> ir.Value:
    """The same on any CPU."""
    for left in (16, 0):
        up = [builder.ashr(builder.shl(part, _all(left)), _all(16)) for part in (x, w)]
        total = builder.add(total, builder.mul(*up))
    return total


# -- words of terms, and the parts of those that a CPU cannot multiply whole -----------------------

_Split = Callable[[ir.IRBuilder, ir.Value], list[ir.Value]]


def _whole(_: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    return [word]


def _two_floats(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    return [
        builder.shl(word, _like(word, 16)),
        builder.and_(word, _like(word, -65536)),
    ]


def _unsigned_shorts(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """Of four bytes the first and third one, the second and fourth one."""
    mask = _like(word, 0x00FF00FF)
    return [
        builder.and_(word, mask),
        builder.and_(builder.lshr(word, _like(word, 8)), mask),
    ]


def _signed_shorts(builder: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    shorts = builder.bitcast(word, ir.VectorType(ir.IntType(16), 2 * LANES))
    eight = ir.Constant(shorts.type, [8] * (2 * LANES))
    parts = [
        builder.ashr(builder.shl(shorts, eight), eight),
        builder.ashr(shorts, eight),
    ]
    return [builder.bitcast(part, INTS) for part in parts]


class Terms(NamedTuple):
    """Code that adds up products of words, each of one or more terms.

    sums: the kind of vector they are added up in; add: total plus the products of a part of x, the
    same in all lanes, and one of w; parts_of_x: of a word, or of a vector of them, those that `add`
    takes one after the other; parts_of_w: of a vector.
    """

    sums: ir.Type
    add: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]
    parts_of_x: _Split = _whole
    parts_of_w: _Split = _whole

    @property
    def parts(self) -> int:
        return 1 if self.parts_of_x is _whole else 2


def _bfloats() -> Terms:
    if _has("avx512bf16"):
        return Terms(FLOATS, _bfloat_terms)
    return Terms(FLOATS, float_terms, _two_floats, _two_floats)


def _bytes() -> Terms:
    if _has("avx512vnni"):
        return Terms(INTS, _byte_terms)
    add = _short_terms if _has("avx2") else _plain_short_terms
    return Terms(INTS, add, _unsigned_shorts, _signed_shorts)


TERMS_OF: dict[types.Type, Terms] = {
    types.float32: Terms(FLOATS, float_terms),
    types.uint16: _bfloats(),
    types.int8: _bytes(),
}


def spread(builder: ir.IRBuilder, word: ir.Value) -> ir.Value:
    """An int32 in all lanes."""
    first = builder.insert_element(_NOTHING, word, _INT(0))
    return builder.shuffle_vector(first, _NOTHING, _all(0))


def _all(value: int) -> ir.Value:
    return ir.Constant(INTS, [value] * LANES)


def _like(word: ir.Value, value: int) -> ir.Value:
    """A number for one int32, or for each of a vector of them."""
    return ir.Constant(_INT, value) if word.type == _INT else _all(value)
