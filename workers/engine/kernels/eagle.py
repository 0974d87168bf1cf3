"""A round of questions to an eagle draft in one call, which every thread of a team makes: its layer
over new rows, its head, and the likeliest tokens after each of them.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import c_function, compiled
from workers.engine.kernels.draw import ranks
from workers.engine.kernels.elements import (
    FLOAT32,
    INT64,
    exp,
    of_rank,
    pointer,
    size_of,
    widen,
)
from workers.engine.kernels.layer import norm_row
from workers.engine.kernels.linear import multiply_items
from workers.engine.kernels.steps import (
    BEFORE_ATTENTION,
    COUNTERS,
    EPSILON,
    FINISHING,
    HEAD_DIM,
    HEADING,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_FIELDS,
    LAYERS,
    LOGITS,
    NUMBER_WANTED,
    PASS_FIELDS,
    QKV,
    ROWS,
    THREADS,
    TO_QKV,
    VOCABULARY,
    X,
    finish_layer,
    head,
    linear,
    next_of,
    settle,
    wait,
)

# Behind those of any pass, of which the first layer is the draft's and the second one the head.
(
    TOKENS,  # int64 [rows]
    EMBEDDING,  # [the target's vocabulary, hidden]
    NORM_OF_EMBEDDED,  # [hidden]; the layer's own norm is that of what stands in for hidden states
    BOTH,  # [rows, 2 * hidden]
    TO_FUSE,  # a weight's three addresses
    _SCALES,
    _EXCESS,
    FEATURES,  # [rows, FEATURE_SIZE], which become x; 0 where x is there
    FEATURE_SIZE,
    SCORED,  # tokens that the draft knows: logits behind them are none
    IDS,  # int64 [number wanted, LIKELIEST]: the draft's numbers of tokens, likeliest first
    PROBABILITIES,  # float32, of these
    LIKELIEST,
    ROUND_FIELDS,
) = range(PASS_FIELDS, PASS_FIELDS + 14)

# Of a round, each with a counter of its own: to fuse, both norms and their product, the layer's
# rest, the head, and the likeliest.
_NORMS = 1
_FINISH = _NORMS + 2
_HEAD = _FINISH + FINISHING
_CHOICE = _HEAD + HEADING
NUMBER_OF_STEPS = _CHOICE + 1

# Scores that are looked at together.
_BLOCK = 64


@compiled()
def _fuse(work: Any, like: Any) -> None:
    size, hidden = work[FEATURE_SIZE], work[HIDDEN]
    weight, rows, given, out = work[TO_FUSE : TO_FUSE + 3], work[ROWS], work[FEATURES], work[X]
    counter, no_scales = work[COUNTERS], 0
    multiply_items(
        counter, work[THREADS], weight, given, no_scales, rows, size, out, hidden, like, like
    )
    wait(work)


@compiled()
def _norm_both(work: Any, layer: Any, like: Any) -> None:
    """Of the token's embedding and of x, side by side."""
    rows, hidden = work[ROWS], work[HIDDEN]
    eps = carray(pointer(work[EPSILON], FLOAT32), (1,))[0]
    tokens = carray(pointer(work[TOKENS], INT64), (rows,))
    x = carray(pointer(work[X], like), (rows, hidden))
    both = carray(pointer(work[BOTH], like), (rows, 2 * hidden))
    of_embedded = carray(pointer(work[NORM_OF_EMBEDDED], like), (hidden,))
    of_x = carray(pointer(layer[BEFORE_ATTENTION], like), (hidden,))
    while True:
        row = next_of(work, _NORMS)
        if row >= rows:
            break
        at = work[EMBEDDING] + tokens[row] * hidden * size_of(like)
        embedded = carray(pointer(at, like), (hidden,))
        norm_row(embedded, of_embedded, both[row, :hidden], eps)
        norm_row(x[row], of_x, both[row, hidden:], eps)
        settle(work, work[BOTH], row, 2 * hidden, rows, like)
    wait(work)


@compiled("contract", "reassoc")
def _summed(scores: Any, most: Any) -> Any:
    """Of exp(score - most)."""
    total = np.float32(0)
    for i in range(len(scores)):
        total += exp(widen(scores[i]) - most)
    return total


@compiled()
def _insert(score: Any, token: Any, ids: Any, best: Any) -> None:
    """Where it belongs among the best, the last of which leaves."""
    place = len(best) - 1
    while place > 0 and best[place - 1] < score:
        best[place], ids[place] = best[place - 1], ids[place - 1]
        place -= 1
    best[place], ids[place] = score, token


@compiled()
def likeliest(scores: Any, ids: Any, best: Any) -> None:
    """The best of a row of scores, likeliest first, of equal ones the first; their probabilities
    to best [number]. If a score is no number, neither is any probability.
    """
    size = len(scores)
    best[:] = -np.float32(np.inf)
    ids[:] = 0
    for first in range(0, size, _BLOCK):
        last = min(first + _BLOCK, size)
        _, high = ranks(scores[first:last])
        if of_rank(high, scores[0]) <= best[-1]:
            continue
        for token in range(first, last):
            score = widen(scores[token])
            if score > best[-1]:
                _insert(score, token, ids, best)
    most = best[0]
    total = _summed(scores, most)
    for place in range(len(best)):
        best[place] = exp(best[place] - most) / total


@compiled()
def _choose(work: Any, like: Any) -> None:
    number, vocabulary, most = work[NUMBER_WANTED], work[VOCABULARY], work[LIKELIEST]
    logits = carray(pointer(work[LOGITS], like), (number, vocabulary))
    ids = carray(pointer(work[IDS], INT64), (number, most))
    probabilities = carray(pointer(work[PROBABILITIES], FLOAT32), (number, most))
    while True:
        place = next_of(work, _CHOICE)
        if place >= number:
            break
        likeliest(logits[place, : work[SCORED]], ids[place], probabilities[place])


@compiled()
def _round(work: Any, weights: Any, like: Any) -> None:
    layers = carray(pointer(work[LAYERS], INT64), (2, LAYER_FIELDS))
    layer, rows, hidden = layers[0], work[ROWS], work[HIDDEN]
    to_qkv, qkv = layer[TO_QKV : TO_QKV + 3], (work[HEADS] + 2 * work[KV_HEADS]) * work[HEAD_DIM]
    if work[FEATURES]:
        _fuse(work, like)
    _norm_both(work, layer, like)
    given, out = work[BOTH], work[QKV]
    linear(work, _NORMS + 1, to_qkv, given, rows, 2 * hidden, qkv, out, weights, like)
    finish_layer(work, _FINISH, layer, weights, like)
    head(work, _HEAD, layers[1], weights, like)
    _choose(work, like)


@cache
def eagle_round(weights: Any, kind: Any) -> int:
    """The address of a C function that takes the address of ROUND_FIELDS int64, for every thread of
    a team to call: weights of a kind, those that read features and all else of another one.
    """
    weight, like = weights(0), kind(0)

    def run(work: Any) -> None:
        _round(carray(work, (ROUND_FIELDS,), np.int64), weight, like)

    return c_function(run)
