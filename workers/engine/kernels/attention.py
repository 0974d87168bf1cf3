"""Attention, cut into items that threads take in turn. All sums are float32."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.np.numpy_support import carray

from workers.engine.kernels.elements import (
    FLOAT32,
    INT64,
    compiled,
    count_up,
    exp,
    generated,
    narrow,
    pointer,
    up_to,
    widen,
)

# What `attention_worker` reads.
WORK_FIELDS, ITEM_FIELDS, SEGMENT_FIELDS = 13, 4, 6

# Queries in a vector's lanes, and the rows of the other matrix that a tile of a product has.
LANES = 16
_TILE = 8
# Values widened at a time, to be in the nearest cache when they are used.
_CHUNK = 64

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)


def _product_of(vectors: int) -> Callable[..., Any]:
    """Of c += a @ b the _TILE rows and `vectors` vectors of columns from `row` and `column` on,
    term by term, each sum in a register all the while. All are float32, the columns of b and c
    contiguous.
    """

    @generated
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


@compiled("contract")
def _add_product(a: Any, b: Any, c: Any) -> None:
    """c += a @ b, where a has a multiple of _TILE rows and b a multiple of LANES columns."""
    width = c.shape[1]
    for row in range(0, len(c), _TILE):
        for column in range(0, width - LANES, 2 * LANES):
            _product_2(a, b, c, row, column)
        if width % (2 * LANES):
            _product_1(a, b, c, row, width - LANES)


@compiled("contract")
def _gather(store: Any, slots: Any, head: Any, first: Any, size: Any, out: Any) -> None:
    """The slots first to first + size of a head of store [pool, kv_heads, head_dim], widened."""
    for key in range(size):
        own, to = store[slots[first + key], head], out[key]
        for i in range(len(own)):
            to[i] = widen(own[i])


@compiled("contract")
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
            own[lane] = exp(own[lane] - most[lane])
        for lane in range(len(most)):
            total[lane] += own[lane]


@compiled("contract")
def _attend(
    query: Any,
    keys: Any,
    values: Any,
    slots: Any,
    unseen: Any,
    first: Any,
    head: Any,
    begin: Any,
    size: Any,
    out: Any,
) -> None:
    """Of one KV head, `size` queries from the one numbered `begin` on: query n is row n % rows of
    group n // rows. Scores stand keys below each other and queries side by side in lanes, padded
    with zeros.
    """
    head_dim, kv_heads, count = query.shape[2], keys.shape[1], len(slots)
    fresh, rows = unseen.shape
    groups = len(query) // kv_heads
    scaling = np.float32(1 / np.sqrt(head_dim))
    lanes, wide = up_to(size, LANES), up_to(head_dim, LANES)
    asked = np.zeros((wide, lanes), np.float32)
    scores = np.zeros((up_to(count, _TILE), lanes), np.float32)
    chunk = np.zeros((_CHUNK, wide), np.float32)
    sums = np.zeros((lanes, wide), np.float32)
    most, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for lane in range(size):
        group, row = divmod(begin + lane, rows)
        own = query[head * groups + group, first + row]
        for i in range(head_dim):
            asked[i, lane] = widen(own[i]) * scaling
    for key in range(0, count, _CHUNK):
        part = min(_CHUNK, count - key)
        _gather(keys, slots, head, key, part, chunk)
        padded = up_to(part, _TILE)
        _add_product(chunk[:padded], asked, scores[key : key + padded])
    for key in range(fresh):
        own = scores[count - fresh + key]
        for lane in range(size):
            own[lane] += unseen[key, (begin + lane) % rows]
    _softmax(scores[:count], most, total)
    for key in range(0, count, _CHUNK):
        part = min(_CHUNK, count - key)
        _gather(values, slots, head, key, part, chunk)
        used = up_to(size, _TILE)
        _add_product(scores[key : key + part, :used].T, chunk, sums[:used])
    for lane in range(size):
        group, row = divmod(begin + lane, rows)
        own, to = sums[lane], out[first + row, head * groups + group]
        for i in range(head_dim):
            to[i] = narrow(own[i] / total[lane], to[i])


@compiled()
def attend_items(
    counter: Any,
    items: Any,
    number_of_items: Any,
    segments: Any,
    query: Any,
    keys: Any,
    values: Any,
    out: Any,
    rows: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    pool: Any,
    like: Any,
) -> None:
    """One thread's share of an attention: items until there are none left.

    counter: of an int64 that is 0, at which threads count the items that they take; items [number,
    ITEM_FIELDS] and segments [.., SEGMENT_FIELDS], as `AttentionPlan` has them; query [heads, rows,
    head_dim], keys and values [pool, kv_heads, head_dim], out [rows, heads, head_dim]: addresses.

    Keys are taken one after the other, and one that is not seen changes no bit: a row has the same
    bits in a tree, in a prompt and alone, wherever its keys lie, whatever it shares an item with.
    """
    store = pool, kv_heads, head_dim
    asked = carray(pointer(query, like), (heads, rows, head_dim))
    own_keys, own_values = carray(pointer(keys, like), store), carray(pointer(values, like), store)
    given = carray(pointer(out, like), (rows, heads, head_dim))
    while True:
        number = count_up(counter)
        if number >= number_of_items * kv_heads:
            return
        item = carray(pointer(items, INT64), (number_of_items, ITEM_FIELDS))[number // kv_heads]
        segment, begin, size, count = item[0], item[1], item[2], item[3]
        own = carray(pointer(segments, INT64), (segment + 1, SEGMENT_FIELDS))[segment]
        first, own_rows, there, fresh = own[2], own[3], own[4], own[5]
        slots = carray(pointer(own[0], INT64), (there,))[:count]
        unseen = carray(pointer(own[1], FLOAT32), (fresh, own_rows))[: fresh - there + count]
        head = number % kv_heads
        _attend(asked, own_keys, own_values, slots, unseen, first, head, begin, size, given)


@compiled()
def _attend_work(work: Any, like: Any) -> None:
    attend_items(
        work[0],
        work[1],
        work[2],
        work[3],
        work[4],
        work[5],
        work[6],
        work[7],
        work[8],
        work[9],
        work[10],
        work[11],
        work[12],
        like,
    )


@cache
def attention_worker(kind: Any) -> int:
    """The address of a C function for elements of a kind, for one thread or several at once. It
    takes the address of WORK_FIELDS int64: what `attend_items` takes.
    """
    like = kind(0)

    def attend(work: Any) -> None:
        _attend_work(carray(work, (WORK_FIELDS,), np.int64), like)

    compiled: Any = cfunc(types.void(types.voidptr), cache=True)(attend)
    return int(compiled.address)
