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

from functools import cache
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import c_function, compiled
from workers.engine.kernels.elements import count_up, size_of
from workers.engine.kernels.tile import (
    STEP_BYTES,
    in_parts,
    most_blocks,
    most_rows,
    multiply_tile,
    parts_of,
)
from workers.engine.packed_weight import BLOCK

# What tells kernels the kind of weights, beside FLOAT32 and BFLOAT16.
INT8 = np.int8(0)

# What `linear_worker` reads.
WORK_FIELDS = 11
# Blocks that a thread takes at once: enough for the memory to be read ahead.
_BLOCKS = 16

# So far ahead of their use weights are fetched. The CPU does so by itself within a block, but such
# a one takes microseconds, and it waits for the next. (SmolLM2-135M in bfloat16, 9 rows: 2.0e9
# vectors a second and core, with this 2.5e9, and 3.3e9 where all is in the second cache.)
_AHEAD_BYTES = 4096
_FULL_RATE = 1 << 16


@compiled(inlined=True)
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
    given = in_parts(x, rows * steps, weights)
    width *= parts_of(weights)
    others = width, outputs, out, scales, excess, row_scales, first, blocks, steps, weights, like
    _multiply(w, given, rows, *others)


@compiled()
def _multiply(
    w: Any,
    given: Any,
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
    """`multiply`, of rows in parts: an array, which lives as long as the call."""
    between, block_bytes, x = steps * STEP_BYTES, BLOCK * size_of(like), given.ctypes.data
    tiles = -(-rows // most_rows(weights))
    wide = most_blocks(-(-rows // max(tiles, 1)), weights)
    block = first
    while block < first + blocks:
        own = min(wide, first + blocks - block)
        own = 2 if own == 3 else own
        row = 0
        for tile in range(tiles):
            size = -(-(rows - row) // (tiles - tile))
            # Each tile fetches its share of the next blocks.
            share = tile * steps // tiles * STEP_BYTES
            multiply_tile(
                size,
                own,
                w + block * between,
                between,
                _AHEAD_BYTES if tiles == 1 else own * between + share,
                _FULL_RATE // tiles,
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
            row += size
        block += own


@compiled(inlined=True)
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
