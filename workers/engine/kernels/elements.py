"""Elements, and what all kernels are made of.

Of two dtypes a kernel is told by `like`, FLOAT32 or BFLOAT16, and compiled for each. numba knows
bfloat16 as uint16 only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.engine.kernels.compiling import compiled

FLOAT32, BFLOAT16, INT64 = np.float32(0), np.uint16(0), np.int64(0)

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_ADDRESS = ir.IntType(8).as_pointer()


def generated(generator: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels can call, of which `generator` makes the code."""
    return intrinsic(generator)


@generated
def pointer(_: Any, address: types.Type, like: types.Type) -> Any:
    """An address as one of elements like another, which `carray` takes."""
    kind = types.CPointer(like)

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(address, like), generate


@generated
def count_up(_: Any, address: types.Type) -> Any:
    """Add 1 to the int64 at an address, whatever other threads do, and say what it was."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        place = builder.inttoptr(values[0], _LONG.as_pointer())
        return builder.atomic_rmw("add", place, _LONG(1), "monotonic")

    return types.int64(address), generate


@generated
def size_of(_: Any, like: Any) -> Any:
    """Bytes of an element like another one."""

    def generate(_c: Any, _b: ir.IRBuilder, _s: Any, _v: Any) -> ir.Value:
        return _LONG(like.bitwidth // 8)

    return types.int64(like), generate


@generated
def call(_: Any, address: types.Type) -> Any:
    """Call a C function without arguments or a result."""
    kind = ir.FunctionType(ir.VoidType(), [])

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(address), generate


def emit_fetch(builder: ir.IRBuilder, place: ir.Value) -> None:
    """Code that has the CPU bring what is at an address to the core's second cache, to be read.
    Harmless where nothing is.
    """
    to_read, second_cache, data = _INT(0), _INT(2), _INT(1)
    kind = ir.FunctionType(ir.VoidType(), [_ADDRESS, _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    address = builder.inttoptr(place, _ADDRESS)
    builder.call(function, [address, to_read, second_cache, data])


@generated
def fetch(_: Any, address: types.Type) -> Any:
    """See `emit_fetch`."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        emit_fetch(builder, values[0])
        return context.get_dummy_value()

    return types.void(address), generate


@generated
def widen(_: Any, stored: types.Type) -> Any:
    """An element as float32."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        if stored == types.float32:
            return values[0]
        bits = builder.shl(builder.zext(values[0], _INT), _INT(16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(stored), generate


def _flipped(builder: ir.IRBuilder, bits: ir.Value, mask: int) -> ir.Value:
    """The bits of a negative number turned over, but for its sign; done twice, nothing."""
    return builder.xor(bits, builder.and_(builder.ashr(bits, _INT(31)), _INT(mask)))


@generated
def rank_of(_: Any, stored: types.Type) -> Any:
    """An element as an int32 that is as large among others as it is: integers are compared many at
    a time, where floats are not for fear of NaN, which is beyond infinity here.
    """

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        if stored == types.float32:
            return _flipped(builder, builder.bitcast(values[0], _INT), 0x7FFFFFFF)
        return _flipped(builder, builder.sext(values[0], _INT), 0x7FFF)

    return types.int32(stored), generate


@generated
def of_rank(_: Any, rank: types.Type, like: types.Type) -> Any:
    """The element that has a rank, as float32."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        if like == types.float32:
            return builder.bitcast(_flipped(builder, values[0], 0x7FFFFFFF), _FLOAT)
        bits = builder.shl(_flipped(builder, values[0], 0x7FFF), _INT(16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(rank, like), generate


def emit_narrow(builder: ir.IRBuilder, floats: ir.Value) -> ir.Value:
    """Code for what `narrow` does to one float32, or to a vector of them, for bfloat16."""
    lanes = floats.type.count if isinstance(floats.type, ir.VectorType) else 0

    def kind(one: ir.Type) -> ir.Type:
        return ir.VectorType(one, lanes) if lanes else one

    def number(value: int) -> ir.Value:
        return ir.Constant(kind(_INT), [value] * lanes if lanes else value)

    bits = builder.bitcast(floats, kind(_INT))
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.lshr(builder.add(builder.add(bits, odd), number(0x7FFF)), number(16))
    nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.trunc(builder.select(nan, number(0x7FC0), rounded), kind(ir.IntType(16)))


@generated
def narrow(_: Any, value: types.Type, like: types.Type) -> Any:
    """A float32 as an element like another one: rounded to nearest even, NaN stays NaN."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        return values[0] if like == types.float32 else emit_narrow(builder, values[0])

    return like(value, like), generate


@generated
def _scaled(_: Any, value: types.Type, power: types.Type) -> Any:
    """value * 2**n for the whole n in -250..250 that `power` is above _MAGIC."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        n = builder.sub(builder.bitcast(values[1], _INT), _INT(_MAGIC_BITS))
        half = builder.ashr(n, _INT(1))
        result = values[0]
        for part in (half, builder.sub(n, half)):  # by halves: 2**n itself may be out of range
            bits = builder.shl(builder.add(part, _INT(127)), _INT(23))
            result = builder.fmul(result, builder.bitcast(bits, _FLOAT))
        return result

    return types.float32(value, power), generate


# Added to a small float32, it leaves the nearest whole number in the last bits.
_MAGIC, _MAGIC_BITS = np.float32(3 << 22), 0x4B400000
_LOG2E = np.float32(1.4426950408889634)
# ln 2 in two parts, of which whole multiples of the first are exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_FAR = np.float32(110)  # exp(-_FAR) is 0, exp(_FAR) infinite


@compiled("contract")
def exp(x: Any) -> Any:
    """Within about an ulp (Cephes' polynomial), in operations that a loop around it vectorises."""
    x = _FAR if x > _FAR else x
    x = -_FAR if x < -_FAR else x
    power = x * _LOG2E + _MAGIC
    n = power - _MAGIC
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    return _scaled(p * (r * r) + r + np.float32(1), power)


@compiled("contract")
def up_to(size: Any, step: Any) -> Any:
    """The next multiple."""
    return -(-size // step) * step
