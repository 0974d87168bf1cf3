"""Attention, cut into items that threads take in turn. All sums are float32."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import (
    FLOAT32,
    INT64,
    count_up,
    exp,
    fetch,
    generated,
    narrow,
    pointer,
    size_of,
    up_to,
    widen,
)
from workers.engine.kernels.terms import FLOATS, INTS, LANES, TERMS_OF, VECTORS, float_terms, spread

# What `attend_items` reads of each.
ITEM_FIELDS, SEGMENT_FIELDS = 4, 6

# Of a tile, whose sums stay in registers: keys and vectors of queries that are scored, rows and
# vectors of columns of a product.
_KEYS, _QUERIES = (8, 2) if VECTORS == 32 else (4, 1)
_ROWS, _COLUMNS = (4, 4) if VECTORS == 32 else (4, 1)
# Keys and values are fetched so many slots ahead of their use: a head's lie apart from each other,
# which the CPU does not foresee.
_AHEAD, _LINE_BYTES = 32, 64
# Values widened at a time, to be in the nearest cache when they are used.
_CHUNK = 64
_WORD_BYTES, _VECTOR_BYTES = 4, 4 * LANES

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


@generated
def _score_tile(
    _: Any,
    vectors: Any,
    keys: Any,
    between: Any,
    slots: Any,
    left: Any,
    words: Any,
    asked: Any,
    asked_row: Any,
    scores: Any,
    scores_row: Any,
    scaling: Any,
    like: Any,
) -> Any:
    """Of the scores of _KEYS keys, up to _QUERIES vectors of queries from those at `asked` and
    `scores` on.
    All but `vectors` and `left` are addresses, or bytes from one row to the next.

    keys: of the first slot's; slots: of the keys' int64, of which there are `left`, the last one
    taken again and again; asked: queries as words of one float32 or two bfloat16, [words, lanes].
    """

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        done = builder.append_basic_block("done")
        choice = builder.switch(values[0], done)
        for own in range(1, _QUERIES + 1):
            case = builder.append_basic_block(f"vectors{own}")
            choice.add_case(_LONG(own), case)
            builder.position_at_end(case)
            _Scores(builder, values[1:], like, own).emit()
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, types.float32, like), generate


class _Scores:
    """Code for what `_score_tile` says."""

    def __init__(
        self, builder: ir.IRBuilder, given: Sequence[ir.Value], element: Any, vectors: int
    ) -> None:
        self._builder = builder
        self._keys, self._between, self._slots, self._left, self._words = given[:5]
        self._asked, self._asked_row, self._scores, self._scores_row, self._scaling = given[5:10]
        self._terms = TERMS_OF[element]
        self._vectors = range(vectors)

    def emit(self) -> None:
        builder = self._builder
        places = [self._place(key) for key in range(_KEYS)]
        before = builder.block
        step, after = (builder.append_basic_block(name) for name in ("step", "after"))
        builder.branch(step)
        builder.position_at_end(step)
        k = builder.phi(_LONG)
        sums = [[builder.phi(FLOATS) for _ in self._vectors] for _ in places]
        ends = self._add_terms(k, places, sums)
        following = builder.add(k, _LONG(1))
        k.add_incoming(_LONG(0), before)
        k.add_incoming(following, step)
        nothing = ir.Constant(FLOATS, [0.0] * LANES)
        for total, end in zip(chain(*sums), chain(*ends), strict=True):
            total.add_incoming(nothing, before)
            total.add_incoming(end, step)
        builder.cbranch(builder.icmp_signed("<", following, self._words), step, after)
        builder.position_at_end(after)
        self._store(ends)

    def _place(self, key: int) -> ir.Value:
        """Where a key is."""
        builder = self._builder
        last = builder.sub(self._left, _LONG(1))
        beyond = builder.icmp_signed("<", last, _LONG(key))
        number = builder.select(beyond, last, _LONG(key))
        slot = self._load(builder.add(self._slots, builder.mul(number, _LONG(8))), _LONG)
        return builder.add(self._keys, builder.mul(slot, self._between))

    def _add_terms(
        self, k: ir.Value, places: list[ir.Value], sums: list[list[ir.Value]]
    ) -> list[list[ir.Value]]:
        builder = self._builder
        start = builder.add(self._asked, builder.mul(k, self._asked_row))
        step = builder.mul(k, _LONG(_WORD_BYTES))
        asked = [
            self._load(builder.add(start, _LONG(_VECTOR_BYTES * v)), INTS) for v in self._vectors
        ]
        parts = list(zip(*(self._terms.parts_of_w(builder, own) for own in asked), strict=True))
        ends = []
        for place, own in zip(places, sums, strict=True):
            word = spread(builder, self._load(builder.add(place, step), _INT))
            for x, weights in zip(self._terms.parts_of_x(builder, word), parts, strict=True):
                own = [self._terms.add(builder, t, x, w) for t, w in zip(own, weights, strict=True)]
            ends.append(own)
        return ends

    def _store(self, ends: list[list[ir.Value]]) -> None:
        builder = self._builder
        scaling = builder.bitcast(spread(builder, builder.bitcast(self._scaling, _INT)), FLOATS)
        for key, own in enumerate(ends):
            row = builder.add(self._scores, builder.mul(self._scores_row, _LONG(key)))
            for v, total in enumerate(own):
                place = builder.add(row, _LONG(_VECTOR_BYTES * v))
                address = builder.inttoptr(place, FLOATS.as_pointer())
                builder.store(builder.fmul(total, scaling), address, align=4)

    def _load(self, place: ir.Value, kind: ir.Type) -> ir.Value:
        return self._builder.load(self._builder.inttoptr(place, kind.as_pointer()), align=4)


@compiled()
def _fetch_ahead(store: Any, head: Any, slots: Any, key: Any) -> None:
    """What a head has at one of the slots, if there is such a one."""
    if key < len(slots):
        place = store.ctypes.data + slots[key] * store.strides[0] + head * store.strides[1]
        for line in range(0, store.strides[1], _LINE_BYTES):
            fetch(place + line)


@compiled()
def _score(
    asked: Any, store: Any, head: Any, slots: Any, scaling: Any, scores: Any, like: Any
) -> None:
    """scores [keys, lanes] of queries asked [words, lanes, elements of a word] and the keys of a
    head at some slots of store [pool, kv_heads, head_dim].
    """
    words, lanes = asked.shape[:2]
    keys = store.ctypes.data + head * store.strides[1]
    for key in range(0, len(slots), _KEYS):
        for ahead in range(key + _AHEAD, key + _AHEAD + _KEYS):
            _fetch_ahead(store, head, slots, ahead)
        own = slots.ctypes.data + 8 * key
        left = len(slots) - key
        for lane in range(0, lanes, _QUERIES * LANES):
            _score_tile(
                min(_QUERIES, (lanes - lane) // LANES),
                keys,
                store.strides[0],
                own,
                left,
                words,
                asked.ctypes.data + _WORD_BYTES * lane,
                asked.strides[0],
                scores.ctypes.data + key * scores.strides[0] + _WORD_BYTES * lane,
                scores.strides[0],
                scaling,
                like,
            )


def _product_of(vectors: int) -> Callable[..., Any]:
    """Of c += a @ b the _ROWS rows and `vectors` vectors of columns from `row` and `column` on,
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
            rows = [builder.add(values[3], _LONG(m)) for m in range(_ROWS)]
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
    before = builder.block
    step, after = (builder.append_basic_block(name) for name in ("step", "after"))
    places = [c.place(row, column, FLOATS) for row in rows for column in columns]
    starts = [builder.load(place, align=4) for place in places]
    builder.branch(step)
    builder.position_at_end(step)
    k = builder.phi(_LONG)
    sums = [builder.phi(FLOATS) for _ in places]
    own = [builder.load(b.place(k, column, FLOATS), align=4) for column in columns]
    ends: list[ir.Value] = []
    for row in rows:
        one = spread(builder, builder.load(a.place(row, k, _INT)))
        for vector in own:
            ends.append(float_terms(builder, sums[len(ends)], one, vector))
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


_product_1, _product_2, _product_4 = (_product_of(vectors) for vectors in (1, 2, 4))


@compiled("contract")
def _add_product(a: Any, b: Any, c: Any) -> None:
    """c += a @ b, where a has a multiple of _ROWS rows and b a multiple of LANES columns."""
    width = c.shape[1]
    for row in range(0, len(c), _ROWS):
        column = 0
        while column < width:
            left = min(_COLUMNS, (width - column) // LANES)
            if left == 4:
                _product_4(a, b, c, row, column)
                column += 4 * LANES
            elif left >= 2:
                _product_2(a, b, c, row, column)
                column += 2 * LANES
            else:
                _product_1(a, b, c, row, column)
                column += LANES


@compiled("contract")
def _gather(store: Any, slots: Any, head: Any, first: Any, size: Any, out: Any) -> None:
    """The slots first to first + size of a head of store [pool, kv_heads, head_dim], widened."""
    for key in range(size):
        _fetch_ahead(store, head, slots, first + key + _AHEAD)
        own, to = store[slots[first + key], head], out[key]
        for i in range(len(own)):
            to[i] = widen(own[i])


@compiled("contract")
def _softmax(scores: Any, most: Any, total: Any) -> None:
    """Over the first axis of scores [keys, lanes], but for the division by `total`."""
    most[:] = np.float32(-np.inf)
    for key in range(len(scores)):
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
    like: Any,
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
    in_word = _WORD_BYTES // size_of(like)
    asked = np.zeros((head_dim // in_word, lanes, in_word), query.dtype)
    scores = np.empty((up_to(count, _KEYS), lanes), np.float32)
    chunk = np.zeros((_CHUNK, wide), np.float32)
    sums = np.zeros((lanes, wide), np.float32)
    most, total = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for lane in range(size):
        group, row = divmod(begin + lane, rows)
        own = query[head * groups + group, first + row]
        for i in range(head_dim):
            asked[i // in_word, lane, i % in_word] = own[i]
    _score(asked, keys, head, slots, scaling, scores, like)
    for key in range(fresh):
        own = scores[count - fresh + key]
        for lane in range(size):
            own[lane] += unseen[key, (begin + lane) % rows]
    _softmax(scores[:count], most, total)
    for key in range(0, count, _CHUNK):
        part = min(_CHUNK, count - key)
        _gather(values, slots, head, key, part, chunk)
        used = up_to(size, _ROWS)
        _add_product(scores[key : key + part, :used].T, chunk, sums[:used])
    for lane in range(size):
        group, row = divmod(begin + lane, rows)
        own, to = sums[lane], out[first + row, head * groups + group]
        for i in range(head_dim):
            to[i] = narrow(own[i] / total[lane], to[i])


@compiled(inlined=True)
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
        _attend(asked, own_keys, own_values, slots, unseen, first, head, begin, size, given, like)
