"""Between the matrix products of a layer: norms, gates and rotations, row by row."""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import (
    INT64,
    exp,
    narrow,
    pointer,
    widen,
)

_INFINITY = np.float32(np.inf)


# The sum may be taken in any order, the same for every row.
@compiled("contract", "reassoc")
def _sum_of_squares(row: Any) -> Any:
    total = np.float32(0)
    for i in range(len(row)):
        value = widen(row[i])
        total += value * value
    return total


@compiled("contract")
def norm_row(row: Any, weight: Any, out: Any, eps: Any) -> None:
    mean = _sum_of_squares(row) / np.float32(len(row))
    factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for i in range(len(row)):
        normal = widen(narrow(widen(row[i]) * factor, row[i]))
        out[i] = narrow(normal * widen(weight[i]), row[i])


@compiled("contract")
def add_norm(
    x: int, delta: int, weight: int, out: int, rows: int, size: int, eps: float, like: Any
) -> None:
    """x += delta; out = the RMS norm of x, times the weight: x, delta, out [rows, size].

    The sum, the norm and the product are rounded to the element, as torch's would be.
    """
    shape = rows, size
    sums, deltas = carray(pointer(x, like), shape), carray(pointer(delta, like), shape)
    weights, normals = carray(pointer(weight, like), (size,)), carray(pointer(out, like), shape)
    for row in range(rows):
        own, more = sums[row], deltas[row]
        for i in range(size):
            own[i] = narrow(widen(own[i]) + widen(more[i]), own[i])
        norm_row(own, weights, normals[row], eps)


@compiled("contract")
def gate_row(both: Any, out: Any) -> None:
    size = len(out)
    for i in range(size):
        x = widen(both[i])
        silu = narrow(x / (np.float32(1) + exp(-x)), both[i])
        out[i] = narrow(widen(silu) * widen(both[size + i]), both[i])


@compiled("contract")
def gate(gate_up: int, out: int, rows: int, size: int, like: Any) -> None:
    """out [rows, size] = silu(gate) * up of gate_up [rows, gate and up: 2 * size]."""
    given = carray(pointer(gate_up, like), (rows, 2 * size))
    result = carray(pointer(out, like), (rows, size))
    for row in range(rows):
        gate_row(given[row], result[row])


@compiled()
def _turn(head: Any, cosine: Any, sine: Any, out: Any) -> None:
    half = len(head) // 2
    for i in range(half):
        left, right = widen(head[i]), widen(head[half + i])
        a = widen(narrow(left * widen(cosine[i]), head[i]))
        b = widen(narrow(right * widen(sine[i]), head[i]))
        c = widen(narrow(right * widen(cosine[half + i]), head[i]))
        d = widen(narrow(left * widen(sine[half + i]), head[i]))
        out[i] = narrow(a - b, head[i])
        out[half + i] = narrow(c + d, head[i])


@compiled()
def _keep_finite(given: Any, out: Any) -> None:
    """As `workers.engine.kv_store.finite`."""
    for i in range(len(given)):
        kept = abs(widen(given[i])) < _INFINITY
        out[i] = given[i] if kept else narrow(np.float32(0), given[i])


@compiled()
def rotate_row(
    heads: Any, cosine: Any, sine: Any, keys: Any, values: Any, query: Any, row: Any
) -> None:
    """heads [heads + 2 * kv_heads, head_dim] of a row; keys, values [kv_heads, head_dim]: those of
    its slot; query [heads, rows, head_dim].
    """
    asked, kept = len(query), len(keys)
    for head in range(asked):
        _turn(heads[head], cosine, sine, query[head, row])
    for head in range(kept):
        _turn(heads[asked + head], cosine, sine, keys[head])
        _keep_finite(keys[head], keys[head])
        _keep_finite(heads[asked + kept + head], values[head])


@compiled()
def _rotate_and_store(
    qkv: Any, cosine: Any, sine: Any, slots: Any, keys: Any, values: Any, query: Any
) -> None:
    for row in range(len(slots)):
        slot = slots[row]
        rotate_row(qkv[row], cosine[row], sine[row], keys[slot], values[slot], query, row)


@compiled()
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
        carray(pointer(qkv, like), first),
        carray(pointer(cosine, like), angle),
        carray(pointer(sine, like), angle),
        carray(pointer(slots, INT64), (rows,)),
        carray(pointer(keys, like), store),
        carray(pointer(values, like), store),
        carray(pointer(query, like), turned),
    )
