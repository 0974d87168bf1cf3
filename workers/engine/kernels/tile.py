"""Some rows times some blocks of packed weights, with all sums in registers."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import emit_fetch, emit_narrow, generated, pointer
from workers.engine.kernels.terms import FLOATS, INTS, TERMS_OF, VECTORS, spread
from workers.engine.packed_weight import BLOCK

STEP_BYTES = 64
# By a word's parts, and by how many blocks are taken at once: the most rows whose sums are still in
# registers, beside a vector of weights, or its two parts, and a word of a row.
_MOST_ROWS = {
    32: {1: {4: 7, 2: 14, 1: 14}, 2: {4: 6, 2: 12, 1: 12}},
    8: {1: {4: 1, 2: 2, 1: 6}, 2: {4: 1, 2: 2, 1: 5}},
}[VECTORS]

_WORD = np.int32(0)
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _number_of(by_parts: Callable[[int], int]) -> Callable[..., Any]:
    """A function of a kind of weights that says a number."""

    @generated
    def number(_: Any, weights: Any) -> Any:
        def generate(_c: Any, _b: ir.IRBuilder, _s: Any, _v: Any) -> ir.Value:
            return _LONG(by_parts(TERMS_OF[weights].parts))

        return types.int64(weights), generate

    return number


parts_of = _number_of(lambda parts: parts)
"""Parts that a word of a row is taken into, see `in_parts`."""

most_rows = _number_of(lambda parts: _MOST_ROWS[parts][1])
"""Of a tile."""

_most_by_two = _number_of(lambda parts: _MOST_ROWS[parts][2])
_most_by_four = _number_of(lambda parts: _MOST_ROWS[parts][4])


@compiled()
def most_blocks(rows: Any, weights: Any) -> Any:
    """Of a tile with so many rows: 1, 2 or 4."""
    return 4 if rows <= _most_by_four(weights) else 2 if rows <= _most_by_two(weights) else 1


def _part_of(number: int) -> Callable[..., Any]:
    """A function that says a part of a word, see `Terms.parts_of_x`."""

    @generated
    def part(_: Any, word: Any, weights: Any) -> Any:
        def generate(_c: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
            parts = TERMS_OF[weights].parts_of_x(builder, values[0])
            return parts[min(number, len(parts) - 1)]

        return types.int32(word, weights), generate

    return part


_first_part, _second_part = _part_of(0), _part_of(1)


@compiled()
def in_parts(x: Any, words: Any, weights: Any) -> Any:
    """So many words of rows at an address, as tiles take them: whole, where they are, or each as
    two parts. Those are made once for all blocks, and not again for each.
    """
    given = carray(pointer(x, _WORD), (words,))
    if parts_of(weights) == 1:
        return given
    out = np.empty(2 * words, np.int32)
    for i in range(words):
        out[2 * i] = _first_part(given[i], weights)
        out[2 * i + 1] = _second_part(given[i], weights)
    return out


class _Tile:
    """Code for some rows times some blocks, of what `multiply_tile` is given from `w` on."""

    def __init__(
        self, builder: ir.IRBuilder, given: Sequence[ir.Value], weights: Any, element: Any
    ) -> None:
        self._builder = builder
        self._w, self._between, self._ahead, self._rate = given[:4]
        self._x, self._along, self._steps, self._out, self._down = given[4:9]
        self._scales, self._excess, self._row_scales = given[9:]
        self._terms = TERMS_OF[weights]
        self._kind = self._terms.sums
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
        step = builder.mul(k, _LONG(STEP_BYTES))
        starts = [self._at(self._w, self._between, block) for block in range(len(sums[0]))]
        places = [builder.add(start, step) for start in starts]
        slow = builder.shl(builder.lshr(builder.mul(k, self._rate), _LONG(16)), _LONG(6))
        for start in starts:
            emit_fetch(builder, builder.add(builder.add(start, slow), self._ahead))
        weights = [self._load(place, INTS, 64) for place in places]
        parts = zip(*(self._terms.parts_of_w(builder, weight) for weight in weights), strict=True)
        step, ends = builder.mul(k, _LONG(4 * self._terms.parts)), sums
        # Part by part, so that few of them are in registers at a time.
        for number, own in enumerate(parts):
            start = builder.add(step, _LONG(4 * number))
            ends = [self._add_part(start, row, totals, own) for row, totals in enumerate(ends)]
        return ends

    def _add_part(
        self, start: ir.Value, row: int, totals: list[ir.Value], weights: Sequence[ir.Value]
    ) -> list[ir.Value]:
        builder = self._builder
        place = builder.add(self._at(self._x, self._along, row), start)
        x = spread(builder, self._load(place, _INT, 4))
        both = zip(totals, repeat(x), weights)
        return [self._terms.add(builder, *own) for own in both]

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
def multiply_tile(
    _: Any,
    rows: Any,
    blocks: Any,
    w: Any,
    between: Any,
    ahead: Any,
    rate: Any,
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
    """`rows` rows, up to `most_rows`, times `blocks` blocks, up to `most_blocks`.

    All are int64. w: address of the first block; between: bytes from one to the next; ahead: bytes
    from a weight to the one that is fetched meanwhile, which moves on `rate` / 2**16 vectors a
    step; x: address of rows, in parts if there are any; along: bytes from one to the next; steps:
    vectors of a block; out: address of outputs; down: bytes from a row to the next; scales, excess,
    row_scales: addresses, of the outputs' scales and what their sums have too much, and of the
    rows' scales.
    """

    def generate(context: Any, builder: ir.IRBuilder, _s: Any, values: Any) -> ir.Value:
        done = builder.append_basic_block("done")
        tile = _Tile(builder, values[2:14], weights, like)
        number = builder.add(builder.mul(values[0], _LONG(8)), values[1])
        choice = builder.switch(number, done)
        for own_blocks, most in _MOST_ROWS[TERMS_OF[weights].parts].items():
            for own_rows in range(1, most + 1):
                case = builder.append_basic_block(f"rows{own_rows}blocks{own_blocks}")
                choice.add_case(_LONG(8 * own_rows + own_blocks), case)
                builder.position_at_end(case)
                tile.emit(own_rows, own_blocks)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 14, weights, like), generate
