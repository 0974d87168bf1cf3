"""Rows times packed weights: every output sums up its terms in their order, in one accumulator, so
a row has the same bits at any number of rows.

oneDNN's products, which torch has, read a weight at half of what two cores of an EPYC get out of
the memory, and take twice as long for a few rows (SmolLM2-135M in bfloat16, all products of a pass:
12.0 ms for one row, here 6.2; 17 rows 18.1, here 16.0).

Weights [N, K] are packed as blocks of 16 outputs, [N / 16, K / terms, 16, terms]: what one vector
holds are `terms` weights of each of 16 outputs. Terms are 1 in float32, 2 in bfloat16, 4 in int8.

In int8 a row is given as unsigned bytes around 128 with a scale, a weight as signed bytes with a
scale for each output: the sum of products is a whole number, and exact.
"""

from collections.abc import Sequence
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import c_function, compiled
from workers.engine.kernels.elements import (
    count_up,
    emit_fetch,
    emit_narrow,
    generated,
    size_of,
)
from workers.engine.kernels.terms import FLOATS, INTS, TERMS_OF, spread
from workers.engine.packed_weight import BLOCK

# What tells kernels the kind of weights, beside FLOAT32 and BFLOAT16.
INT8 = np.int8(0)

# What `linear_worker` reads.
WORK_FIELDS = 11
# Blocks that a thread takes at once: enough for the memory to be read ahead.
_BLOCKS = 16

# Of a tile: its rows, and by these the blocks that it takes at once: 28 of 32 registers are sums.
_MOST_ROWS = 14
_STEP_BYTES = 64
# So far ahead of their use weights are fetched. The CPU does so by itself within a block, but such
# a one takes microseconds, and it waits for the next. (SmolLM2-135M in bfloat16, 9 rows: 2.0e9
# vectors a second and core, with this 2.5e9, and 3.3e9 where all is in the second cache.)
_AHEAD_BYTES = 4096

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _wide(rows: int) -> int:
    return 4 if rows <= _MOST_ROWS // 2 else 2


# -- a tile ----------------------------------------------------------------------------------------


class _Tile:
    """Code for some rows times some blocks. Of `given`, all are int64: addresses of packed weights
    and bytes between blocks, of rows and bytes between them, steps, addresses of outputs and bytes
    between rows, of the outputs' scales and what their sums have too much, and of the rows' scales.
    """

    def __init__(
        self, builder: ir.IRBuilder, given: Sequence[ir.Value], weights: Any, element: Any
    ) -> None:
        self._builder = builder
        self._w, self._between, self._x, self._along, self._steps = given[:5]
        self._out, self._down, self._scales, self._excess, self._row_scales = given[5:]
        self._kind, self._terms = TERMS_OF[weights]
        self._element = element

    def emit(self, rows: int, blocks: int) -> None:
        """Branch to `done` in the end."""
        builder = self._builder
        before = builder.block
        step, after = (builder.append_basic_block(name) for name in ("step", "after"))
        builder.branch(step)
        builder.position_at_end(step)
        k = builder.phi(_LONG)
        sums = [[builder.phi(self._kind) for _ in range(blocks)] for _ in range(rows)]
        ends = self._add_terms(k, sums)
        following = builder.add(k, _LONG(1))
        k.add_incoming(_LONG(0), before)
        k.add_incoming(following, step)
        nothing = ir.Constant(self._kind, [0] * BLOCK)
        for own, own_ends in zip(sums, ends, strict=True):
            for total, end in zip(own, own_ends, strict=True):
                total.add_incoming(nothing, before)
                total.add_incoming(end, step)
        builder.cbranch(builder.icmp_signed("<", following, self._steps), step, after)
        builder.position_at_end(after)
        for row, own_ends in enumerate(ends):
            for block, end in enumerate(own_ends):
                self._store(row, block, end)

    def _add_terms(self, k: ir.Value, sums: list[list[ir.Value]]) -> list[list[ir.Value]]:
        builder = self._builder
        step = builder.mul(k, _LONG(_STEP_BYTES))
        starts = (self._at(self._w, self._between, block) for block in range(len(sums[0])))
        places = [builder.add(start, step) for start in starts]
        for place in places:
            emit_fetch(builder, builder.add(place, _LONG(_AHEAD_BYTES)))
        weights = [self._load(place, INTS, 64) for place in places]
        step, ends = builder.mul(k, _LONG(4)), []
        for row, own in enumerate(sums):
            start = self._at(self._x, self._along, row)
            one = self._load(builder.add(start, step), _INT, 4)
            x = spread(builder, one)
            ends.append([self._terms(builder, *both) for both in zip(own, repeat(x), weights)])
        return ends

    def _store(self, row: int, block: int, total: ir.Value) -> None:
        """A vector of sums as elements."""
        builder = self._builder
        if self._kind is INTS:
            excess = self._load(self._at(self._excess, _LONG(64), block), INTS, 4)
            scale = self._load(self._at(self._scales, _LONG(64), block), FLOATS, 4)
            row_scale = self._load(self._at(self._row_scales, _LONG(4), row), _INT, 4)
            total = builder.sitofp(builder.sub(total, excess), FLOATS)
            total = builder.fmul(total, scale)
            total = builder.fmul(total, builder.bitcast(spread(builder, row_scale), FLOATS))
        if self._element is types.uint16:
            total = emit_narrow(builder, total)
        size = BLOCK * (2 if self._element is types.uint16 else 4)
        place = builder.add(self._at(self._out, self._down, row), _LONG(size * block))
        builder.store(total, builder.inttoptr(place, total.type.as_pointer()), align=2)

    def _at(self, start: ir.Value, stride: ir.Value, number: int) -> ir.Value:
        return self._builder.add(start, self._builder.mul(stride, _LONG(number)))

    def _load(self, place: ir.Value, kind: ir.Type, align: int) -> ir.Value:
        return self._builder.load(self._builder.inttoptr(place, kind.as_pointer()), align=align)


@generated
def _multiply_tile(
    _: Any,
    rows: Any,
    blocks: Any,
    w: Any,
    between: Any,
    x: Any,
    along: Any,
    steps: Any,
    out: Any,
    down: Any,
    scales: Any,
    excess: Any,
    row_scales: Any,
    weights: Any,
    like: Any,
) -> Any:
    """`rows` rows, up to _MOST_ROWS, times `blocks` blocks: 1, 2, or 4 for half as many rows."""

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        done = builder.append_basic_block("done")
        tile = _Tile(builder, values[2:12], weights, like)
        number = builder.add(builder.mul(values[0], _LONG(8)), values[1])
        choice = builder.switch(number, done)
        for own_rows in range(1, _MOST_ROWS + 1):
            for own_blocks in (1, 2, 4):
                if own_blocks <= _wide(own_rows):
                    case = builder.append_basic_block(f"rows{own_rows}blocks{own_blocks}")
                    choice.add_case(_LONG(8 * own_rows + own_blocks), case)
                    builder.position_at_end(case)
                    tile.emit(own_rows, own_blocks)
                    builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12, weights, like), generate


@compiled()
def multiply(
    w: Any,
    x: Any,
    rows: Any,
    width: Any,
    outputs: Any,
    out: Any,
    scales: Any,
    excess: Any,
    row_scales: Any,
    first: Any,
    blocks: Any,
    steps: Any,
    weights: Any,
    like: Any,
) -> None:
    """Of `out`, rows of `outputs` bytes, the blocks `first` to `first + blocks`: x, rows of `width`
    bytes, times w, which has `steps` vectors a block. All but numbers are addresses.
    """
    between = steps * _STEP_BYTES
    block_bytes = BLOCK * size_of(like)
    parts = -(-rows // _MOST_ROWS)
    row = 0
    for part in range(parts):
        size = -(-(rows - row) // (parts - part))
        wide = 4 if 2 * size <= _MOST_ROWS else 2
        block = first
        while block < first + blocks:
            left = first + blocks - block
            own = wide if left >= wide else (2 if left >= 2 else 1)
            _multiply_tile(
                size,
                own,
                w + block * between,
                between,
                x + row * width,
                width,
                steps,
                out + row * outputs + block * block_bytes,
                outputs,
                scales + block * 64,
                excess + block * 64,
                row_scales + row * 4,
                weights,
                like,
            )
            block += own
        row += size


@compiled()
def multiply_items(
    counter: Any,
    threads: Any,
    weight: Any,
    x: Any,
    row_scales: Any,
    rows: Any,
    size: Any,
    out: Any,
    outputs: Any,
    weights: Any,
    like: Any,
) -> None:
    """One thread's share of out [rows, outputs] = x [rows, size] times a weight, of which data,
    scales and excess are given: outputs until there are none left.

    counter: of an int64 that is 0, at which `threads` threads count the items that they take.
    """
    blocks, terms = outputs // BLOCK, 4 // size_of(weights)
    items = -(-blocks // _BLOCKS)
    items = -(-items // threads) * threads  # so that all end at once
    while True:
        item = count_up(counter)
        if item >= items:
            return
        first, last = item * blocks // items, (item + 1) * blocks // items
        multiply(
            weight[0],
            x,
            rows,
            size * size_of(weights),
            outputs * size_of(like),
            out,
            weight[1],
            weight[2],
            row_scales,
            first,
            last - first,
            size // terms,
            weights,
            like,
        )


@compiled()
def _multiply_work(work: Any, like: Any) -> None:
    rows, size, out, outputs = work[4], work[5], work[6], work[7]
    weight = work[8:11]
    multiply_items(work[0], work[1], weight, work[2], work[3], rows, size, out, outputs, like, like)


@cache
def linear_worker(kind: Any) -> int:
    """The address of a C function for elements of a kind, for one thread or several at once. It
    takes the address of WORK_FIELDS int64: counter, threads, x, 0, rows, size, out and outputs as
    `multiply_items` has them, and the three addresses of the weight.
    """
    like = kind(0)

    def run(work: Any) -> None:
        _multiply_work(carray(work, (WORK_FIELDS,), np.int64), like)

    return c_function(run)
