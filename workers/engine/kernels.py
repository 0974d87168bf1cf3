"""What lies between the matrix products of a Llama's layer, compiled for this CPU by numba.

torch runs each of these as five to ten operations, of which every one costs some microseconds to
start and a pass over the memory. A kernel costs half a microsecond to call, given the addresses of
contiguous tensors as integers: numba unwraps an integer in nanoseconds, an array in microseconds.

Every kernel takes the rows one by one or side by side in a vector's lanes, in one thread: a row has
the same bits in any company. A second pool of threads would fight torch's for the cores.

Of two dtypes a kernel is told by `like`, FLOAT32 or BFLOAT16, and compiled for each at its first
call. numba knows bfloat16 as uint16 only.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

FLOAT32, BFLOAT16 = np.float32(0), np.uint16(0)
_SLOT = np.int64(0)

# Rows in a vector's lanes, and the rows of the other matrix that a tile of a product has.
LANES = 16
_TILE = 8
# Values widened at a time, to be in the nearest cache when they are used.
_CHUNK = 64

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(*freedoms: str) -> Callable[[_Function], _Function]:
    """Compile at the first call, and keep the code on the disk. freedoms: what LLVM may do to float
    operations, by its own names; NaN and infinity keep their sense in any case.
    """
    compiler: Any = njit(cache=True, fastmath=set(freedoms), error_model="numpy")
    return cast(Callable[[_Function], _Function], compiler)


def _generated(generator: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kernels can call, of which `generator` makes the code."""
    return intrinsic(generator)


# -- elements --------------------------------------------------------------------------------------


@_generated
def _pointer(_: Any, address: types.Type, like: types.Type) -> Any:
    """An address as one of elements like another, which `carray` takes."""
    kind = types.CPointer(like)

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    return kind(address, like), generate


@_generated
def _widen(_: Any, stored: types.Type) -> Any:
    """An element as float32."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        if stored == types.float32:
            return values[0]
        bits = builder.shl(builder.zext(values[0], _INT), _INT(16))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(stored), generate


@_generated
def _narrow(_: Any, value: types.Type, like: types.Type) -> Any:
    """A float32 as an element like another one: rounded to nearest even, NaN stays NaN."""

    def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        if like == types.float32:
            return values[0]
        bits = builder.bitcast(values[0], _INT)
        odd = builder.and_(builder.lshr(bits, _INT(16)), _INT(1))
        rounded = builder.lshr(builder.add(builder.add(bits, odd), _INT(0x7FFF)), _INT(16))
        nan = builder.fcmp_unordered("uno", values[0], values[0])
        return builder.trunc(builder.select(nan, _INT(0x7FC0), rounded), ir.IntType(16))

    return like(value, like), generate


@_generated
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
_INFINITY = np.float32(np.inf)
_FAR = np.float32(110)  # exp(-_FAR) is 0, exp(_FAR) infinite


@_compiled("contract")
def _exp(x: Any) -> Any:
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


# -- norm, gate, rotation --------------------------------------------------------------------------


# The sum may be taken in any order, the same for every row.
@_compiled("contract", "reassoc")
def _sum_of_squares(row: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        value = _widen(row[i])
        total += value * value
    return total


@_compiled("contract")
def _norm_row(row: Any, weight: Any, out: Any, eps: Any) -> None:
    mean = _sum_of_squares(row) / np.float32(len(row))
    factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for i in range(len(row)):
        normal = _widen(_narrow(_widen(row[i]) * factor, row[i]))
        out[i] = _narrow(normal * _widen(weight[i]), row[i])


@_compiled("contract")
def add_norm(
    x: int, delta: int, weight: int, out: int, rows: int, size: int, eps: float, like: Any
) -> None:
    """x += delta; out = the RMS norm of x, times the weight: x, delta, out [rows, size].

    The sum, the norm and the product are rounded to the element, as torch's would be.
    """
    shape = rows, size
    sums, deltas = carray(_pointer(x, like), shape), carray(_pointer(delta, like), shape)
    weights, normals = carray(_pointer(weight, like), (size,)), carray(_pointer(out, like), shape)
    for row in range(rows):
        own, more = sums[row], deltas[row]
        for i in range(size):
            own[i] = _narrow(_widen(own[i]) + _widen(more[i]), own[i])
        _norm_row(own, weights, normals[row], eps)


@_compiled("contract")
def gate(gate_up: int, out: int, rows: int, size: int, like: Any) -> None:
    """out [rows, size] = silu(gate) * up of gate_up [rows, gate and up: 2 * size]."""
    given = carray(_pointer(gate_up, like), (rows, 2 * size))
    result = carray(_pointer(out, like), (rows, size))
    for row in range(rows):
        both, to = given[row], result[row]
        for i in range(size):
            x = _widen(both[i])
            silu = _narrow(x / (np.float32(1) + _exp(-x)), both[i])
            to[i] = _narrow(_widen(silu) * _widen(both[size + i]), both[i])


@_compiled()
def _turn(head: Any, cosine: Any, sine: Any, out: Any) -> None:
    half = len(head) // 2
    for i in range(half):
        left, right = _widen(head[i]), _widen(head[half + i])
        a = _widen(_narrow(left * _widen(cosine[i]), head[i]))
        b = _widen(_narrow(right * _widen(sine[i]), head[i]))
        c = _widen(_narrow(right * _widen(cosine[half + i]), head[i]))
        d = _widen(_narrow(left * _widen(sine[half + i]), head[i]))
        out[i] = _narrow(a - b, head[i])
        out[half + i] = _narrow(c + d, head[i])


@_compiled()
def _keep_finite(given: Any, out: Any) -> None:
    """As `workers.engine.kv_store.finite`."""
    for i in range(len(given)):
        kept = abs(_widen(given[i])) < _INFINITY
        out[i] = given[i] if kept else _narrow(np.float32(0), given[i])


@_compiled()
def _rotate_and_store(
    qkv: Any, cosine: Any, sine: Any, slots: Any, keys: Any, values: Any, query: Any
) -> None:
    heads, kv_heads = len(query), keys.shape[1]
    for row in range(len(slots)):
        own, slot = qkv[row], slots[row]
        for head in range(heads):
            _turn(own[head], cosine[row], sine[row], query[head, row])
        for head in range(kv_heads):
            _turn(own[heads + head], cosine[row], sine[row], keys[slot, head])
            _keep_finite(keys[slot, head], keys[slot, head])
            _keep_finite(own[heads + kv_heads + head], values[slot, head])


@_compiled()
def rotate_and_store(
    qkv: int,
    cosine: int,
    sine: int,
    slots: int,
    keys: int,
    values: int,
    query: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pool: int,
    like: Any,
) -> None:
    """Turn the queries and keys of qkv [rows, heads + 2 * kv_heads, head_dim] by the angles of
    their rows, cosine and sine [rows, head_dim]; queries to query [heads, rows, head_dim], keys and
    values, as far as they are finite, to the rows' slots of keys and values [pool, kv_heads,
    head_dim].
    """
    first, angle = (rows, heads + 2 * kv_heads, head_dim), (rows, head_dim)
    store, turned = (pool, kv_heads, head_dim), (heads, rows, head_dim)
    _rotate_and_store(
        carray(_pointer(qkv, like), first),
        carray(_pointer(cosine, like), angle),
        carray(_pointer(sine, like), angle),
        carray(_pointer(slots, _SLOT), (rows,)),
        carray(_pointer(keys, like), store),
        carray(_pointer(values, like), store),
        carray(_pointer(query, like), turned),
    )


# -- attention -------------------------------------------------------------------------------------


def _product_of(vectors: int) -> Callable[..., Any]:
    """Of c += a @ b the _TILE rows and `vectors` vectors of columns from `row` and `column` on,
    term by term, each sum in a register all the while. All are float32, the columns of b and c
    contiguous.
    """

    @_generated
    def product(
        _: Any, a: types.Array, b: types.Array, c: types.Array, row: Any, column: Any
    ) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
            of_a, of_b, of_c = (
                _Matrix(context, builder, kind, value)
                for kind, value in zip((a, b, c), values[:3], strict=True)
            )
            rows = [builder.add(values[3], _LONG(m)) for m in range(_TILE)]
            columns = [builder.add(values[4], _LONG(v * LANES)) for v in range(vectors)]
            _emit_product(builder, of_a, of_b, of_c, rows, columns)
            return context.get_dummy_value()

        return types.void(a, b, c, types.int64, types.int64), generate

    return product


class _Matrix:
    """A float32 matrix in code that is being generated."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder = builder
        self._data = builder.ptrtoint(array.data, _LONG)
        self._strides = [builder.extract_value(array.strides, axis) for axis in (0, 1)]
        self.width = builder.extract_value(array.shape, 1)

    def place(self, row: ir.Value, column: ir.Value, kind: ir.Type) -> ir.Value:
        """The address of something of a kind."""
        down, along = self._strides
        offset = self._builder.add(self._builder.mul(row, down), self._builder.mul(column, along))
        address = self._builder.add(self._data, offset)
        return self._builder.inttoptr(address, kind.as_pointer())


def _emit_product(
    builder: ir.IRBuilder,
    a: _Matrix,
    b: _Matrix,
    c: _Matrix,
    rows: list[ir.Value],
    columns: list[ir.Value],
) -> None:
    """Code for one tile of c, given by its rows and where its vectors of columns begin."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    nothing, zeros = ir.Constant(_VECTOR, ir.Undefined), ir.VectorType(_INT, LANES)([0] * LANES)
    before = builder.block
    step, after = (builder.append_basic_block(name) for name in ("step", "after"))
    places = [c.place(row, column, _VECTOR) for row in rows for column in columns]
    starts = [builder.load(place, align=4) for place in places]
    builder.branch(step)
    builder.position_at_end(step)
    k = builder.phi(_LONG)
    sums = [builder.phi(_VECTOR) for _ in places]
    own = [builder.load(b.place(k, column, _VECTOR), align=4) for column in columns]
    ends: list[ir.Value] = []
    for row in rows:
        one = builder.insert_element(nothing, builder.load(a.place(row, k, _FLOAT)), _INT(0))
        spread = builder.shuffle_vector(one, nothing, zeros)
        for vector in own:
            ends.append(builder.call(fma, [spread, vector, sums[len(ends)]]))
    following = builder.add(k, _LONG(1))
    k.add_incoming(_LONG(0), before)
    k.add_incoming(following, step)
    for total, start, end in zip(sums, starts, ends, strict=True):
        total.add_incoming(start, before)
        total.add_incoming(end, step)
    builder.cbranch(builder.icmp_signed("<", following, a.width), step, after)
    builder.position_at_end(after)
    for place, end in zip(places, ends, strict=True):
        builder.store(end, place, align=4)


_product_1, _product_2 = _product_of(1), _product_of(2)


@_compiled("contract")
def _add_product(a: Any, b: Any, c: Any) -> None:
    """c += a @ b, where a has a multiple of _TILE rows and b a multiple of LANES columns."""
    width = c.shape[1]
    for row in range(0, len(c), _TILE):
        for column in range(0, width - LANES, 2 * LANES):
            _product_2(a, b, c, row, column)
        if width % (2 * LANES):
            _product_1(a, b, c, row, width - LANES)


@_compiled("contract")
def _up_to(size: Any, step: Any) -> Any:
    """The next multiple."""
    return -(-size // step) * step


@_compiled("contract")
def _gather(store: Any, slots: Any, head: Any, first: Any, size: Any, out: Any) -> None:
    """The slots first to first + size of a head of store [pool, kv_heads, head_dim], widened."""
    for key in range(size):
        own, to = store[slots[first + key], head], out[key]
        for i in range(len(own)):
            to[i] = _widen(own[i])


@_compiled("contract")
def _softmax(scores: Any, most: Any, total: Any) -> None:
    """Over the first axis of scores [keys, lanes], but for the division by `total`."""
    most[:] = scores[0]
    for key in range(1, len(scores)):
        own = scores[key]
        for lane in range(len(most)):
            most[lane] = own[lane] if own[lane] > most[lane] else most[lane]
    total[:] = 0
    for key in range(len(scores)):
        own = scores[key]
        for lane in range(len(most)):
            own[lane] = _exp(own[lane] - most[lane])
        for lane in range(len(most)):
            total[lane] += own[lane]


@_compiled("contract")
def _attend(
    query: Any, keys: Any, values: Any, slots: Any, unseen: Any, first: Any, scaling: Any, out: Any
) -> None:
    """One KV head after the other. Scores stand keys below each other and query rows side by side
    in lanes, padded with zeros.
    """
    heads, head_dim = len(query), query.shape[2]
    kv_heads, count = keys.shape[1], len(slots)
    fresh, rows = unseen.shape
    groups = heads // kv_heads
    lanes = _up_to(groups * rows, LANES)
    wide = _up_to(head_dim, LANES)
    asked = np.zeros((wide, lanes), np.float32)
    scores = np.empty((_up_to(count, _TILE), lanes), np.float32)
    chunk = np.zeros((_CHUNK, wide), np.float32)
    sums = np.empty((lanes, wide), np.float32)
    most, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for head in range(kv_heads):
        for lane in range(groups * rows):
            own = query[head * groups + lane // rows, first + lane % rows]
            for i in range(head_dim):
                asked[i, lane] = _widen(own[i]) * scaling
        scores[:] = 0
        for key in range(0, count, _CHUNK):
            size = min(_CHUNK, count - key)
            _gather(keys, slots, head, key, size, chunk)
            padded = _up_to(size, _TILE)
            _add_product(chunk[:padded], asked, scores[key : key + padded])
        for key in range(fresh):
            own = scores[count - fresh + key]
            for lane in range(groups * rows):
                own[lane] += unseen[key, lane % rows]
        _softmax(scores[:count], most, total)
        sums[:] = 0
        for key in range(0, count, _CHUNK):
            size = min(_CHUNK, count - key)
            _gather(values, slots, head, key, size, chunk)
            used = _up_to(groups * rows, _TILE)
            _add_product(scores[key : key + size, :used].T, chunk, sums[:used])
        for lane in range(groups * rows):
            own = sums[lane]
            to = out[first + lane % rows, head * groups + lane // rows]
            for i in range(head_dim):
                to[i] = _narrow(own[i] / total[lane], to[i])


@_compiled("contract")
def attend(
    query: int,
    keys: int,
    values: int,
    slots: int,
    unseen: int,
    out: int,
    total_rows: int,
    first: int,
    rows: int,
    count: int,
    fresh: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pool: int,
    scaling: float,
    like: Any,
) -> None:
    """Rows first to first + rows of query [heads, total_rows, head_dim] against keys and values
    [pool, kv_heads, head_dim] at slots [count], into those rows of out [total_rows, heads,
    head_dim]. Of the last keys, unseen [fresh, rows] float32 is 0 where a row sees one and -inf
    elsewhere; all before are seen.

    Keys are taken one after the other, and one that is not seen changes no bit: a row has the same
    bits in a tree as alone, wherever its keys lie.
    """
    store = pool, kv_heads, head_dim
    asked, given = (heads, total_rows, head_dim), (total_rows, heads, head_dim)
    _attend(
        carray(_pointer(query, like), asked),
        carray(_pointer(keys, like), store),
        carray(_pointer(values, like), store),
        carray(_pointer(slots, _SLOT), (count,)),
        carray(_pointer(unseen, FLOAT32), (fresh, rows)),
        first,
        np.float32(scaling),
        carray(_pointer(out, like), given),
    )
