"""A whole pass of a Llama, all layers in one call, which every thread of a team makes.

With a call for each step, a one-token pass of SmolLM2-135M spent a third of its time between them.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import c_function, compiled
from workers.engine.kernels.elements import INT64, pointer
from workers.engine.kernels.steps import (
    BEFORE_ATTENTION,
    DELTA,
    FINISHING,
    HEAD_DIM,
    HEADING,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_FIELDS,
    LAYERS,
    NORMAL,
    NUMBER_OF_LAYERS,
    PASS_FIELDS,
    QKV,
    ROWS,
    TO_QKV,
    add_norm,
    finish_layer,
    head,
    linear,
)

# Steps of a layer.
_STEPS = 2 + FINISHING


def number_of_steps(layers: int) -> int:
    """Of a pass, each with a counter of its own."""
    return layers * _STEPS + HEADING


@compiled(inlined=True)
def _layer(work: Any, first: Any, layer: Any, delta: Any, weights: Any, like: Any) -> None:
    rows, hidden, to_qkv = work[ROWS], work[HIDDEN], layer[TO_QKV : TO_QKV + 3]
    qkv = (work[HEADS] + 2 * work[KV_HEADS]) * work[HEAD_DIM]
    add_norm(work, first, layer, layer[BEFORE_ATTENTION], delta, like)
    linear(work, first + 1, to_qkv, work[NORMAL], rows, hidden, qkv, work[QKV], weights, like)
    finish_layer(work, first + 2, layer, weights, like)


@compiled()
def _pass(work: Any, weights: Any, like: Any) -> None:
    number = work[NUMBER_OF_LAYERS]
    layers = carray(pointer(work[LAYERS], INT64), (number + 1, LAYER_FIELDS))
    for layer in range(number):
        delta = work[DELTA] if layer else 0
        _layer(work, layer * _STEPS, layers[layer], delta, weights, like)
    head(work, number * _STEPS, layers[number], weights, like)


@cache
def llama_pass(weights: Any, kind: Any) -> int:
    """The address of a C function that takes the address of PASS_FIELDS int64, for every thread of
    a team to call: weights of a kind, all else of another one.
    """
    weight, like = weights(0), kind(0)

    def run(work: Any) -> None:
        _pass(carray(work, (PASS_FIELDS,), np.int64), weight, like)

    return c_function(run)
