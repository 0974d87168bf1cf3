"""Between the matrix products of a layer: norms, gates and rotations, row by row."""

from typing import Any

import numpy as np

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import exp, narrow, widen

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
    """The RMS norm, times the weight. Norm and product are rounded to the element, as torch's."""
    mean = _sum_of_squares(row) / np.float32(len(row))
    factor = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for i in range(len(row)):
        normal = widen(narrow(widen(row[i]) * factor, row[i]))
        out[i] = narrow(normal * widen(weight[i]), row[i])


@compiled("contract")
def gate_row(both: Any, out: Any) -> None:
    """silu(gate) * up of both [gate and up: 2 * size]."""
    size = len(out)
    for i in range(size):
        x = widen(both[i])
        silu = narrow(x / (np.float32(1) + exp(-x)), both[i])
        out[i] = narrow(widen(silu) * widen(both[size + i]), both[i])


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
    """Turn the queries and keys of a row, heads [heads + 2 * kv_heads, head_dim], by the angles'
    cosine and sine [head_dim]: queries to query [heads, rows, head_dim]; keys and values, as far as
    they are finite, to keys and values [kv_heads, head_dim] of its slot.
    """
    asked, kept = len(query), len(keys)
    for head in range(asked):
        _turn(heads[head], cosine, sine, query[head, row])
    for head in range(kept):
        _turn(heads[asked + head], cosine, sine, keys[head])
        _keep_finite(keys[head], keys[head])
        _keep_finite(heads[asked + kept + head], values[head])
