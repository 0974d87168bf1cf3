"""Steps of a decoder layer, each shared by a team: every thread takes rows or items until there are
none left, and waits for the others.
"""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.attention import attend_items
from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import (
    FLOAT32,
    INT64,
    call,
    count_up,
    narrow,
    pointer,
    widen,
)
from workers.engine.kernels.layer import gate_row, norm_row, rotate_row
from workers.engine.kernels.linear import multiply_items

# What the pass's function takes: int64, of which all but numbers are addresses.
(
    COUNTERS,  # int64 zeros, one for each step that is shared
    BARRIER,  # a C function that waits for the other threads; 0 where there are none
    THREADS,
    LAYERS,  # [layers + 1, LAYER_FIELDS]: the last one has only the norm and the head as QKV
    NUMBER_OF_LAYERS,
    EPSILON,  # float32 [1]
    # What the pass is about.
    ROWS,
    X,  # [rows, hidden]: the embedded tokens; afterwards the last hidden states
    COSINE,  # [rows, head_dim]
    SINE,
    SLOTS,  # int64 [rows]: where the new keys and values go
    ITEMS,  # as `attend_items` has them
    NUMBER_OF_ITEMS,
    SEGMENTS,
    WANTED,  # int64 [number]: rows whose logits are wanted
    NUMBER_WANTED,
    LOGITS,  # [number, vocabulary]
    # Room for what is between the steps: [rows, ..] each.
    NORMAL,  # hidden
    QKV,  # (heads + 2 * kv_heads) * head_dim
    QUERY,  # [heads, rows, head_dim]
    ATTENDED,  # heads * head_dim
    DELTA,  # hidden
    GATE_UP,  # 2 * inner
    GATED,  # inner
    BYTES,  # the widest input of a product, int8 weights' only: else 0
    BYTE_SCALES,  # float32
    # Sizes.
    HIDDEN,
    INNER,
    HEADS,
    KV_HEADS,
    HEAD_DIM,
    POOL,
    VOCABULARY,
    PASS_FIELDS,
) = range(34)

# Of a layer: addresses of weights, of an int8 one's scales and excess, of the layer's keys and
# values, and where its input goes for those who read it, or 0.
(
    BEFORE_ATTENTION,
    BEFORE_MLP,
    TO_QKV,
    TO_OUT,
    TO_GATE_UP,
    TO_DOWN,
) = (0, 1, 2, 5, 8, 11)
KEYS, VALUES, FEATURES, LAYER_FIELDS = 14, 15, 16, 17

# How many steps `finish_layer` has, and `head`.
FINISHING, HEADING = 8, 3
_UINT8 = np.uint8(0)
_NO_FEATURES = np.zeros(LAYER_FIELDS, np.int64)


@compiled()
def wait(work: Any) -> None:
    if work[BARRIER]:
        call(work[BARRIER])


@compiled()
def next_of(work: Any, step: Any) -> Any:
    """The next row or item of a step."""
    return count_up(work[COUNTERS] + 8 * step)


@compiled("contract")
def _to_bytes(row: Any, out: Any, scales: Any, number: Any) -> None:
    """A row as unsigned bytes around 128, and its scale: no number if something in it is none."""
    most = spoilt = np.float32(0)
    for i in range(len(row)):
        value = widen(row[i])
        spoilt += value * np.float32(0)
        most = abs(value) if abs(value) > most else most
    scales[number] = most / np.float32(127) + spoilt
    factor = np.float32(127) / most if most > np.float32(0) else np.float32(0)
    for i in range(len(row)):
        out[i] = np.uint8(np.int32(widen(row[i]) * factor + np.float32(128.5)))


@compiled()
def settle(work: Any, given: Any, row: Any, size: Any, rows: Any, like: Any) -> None:
    """A row of given [rows, size] is there: have it in the kind that the next weights want."""
    if work[BYTES]:
        own = carray(pointer(given, like), (rows, size))[row]
        out = carray(pointer(work[BYTES], _UINT8), (rows, size))[row]
        _to_bytes(own, out, carray(pointer(work[BYTE_SCALES], FLOAT32), (rows,)), row)


@compiled()
def _add(work: Any, layer: Any, delta: Any, row: Any, like: Any) -> None:
    """x += delta, and x to those who read a layer's input."""
    shape = work[ROWS], work[HIDDEN]
    x = carray(pointer(work[X], like), shape)[row]
    if delta:
        more = carray(pointer(delta, like), shape)[row]
        for i in range(len(x)):
            x[i] = narrow(widen(x[i]) + widen(more[i]), x[i])
    if layer[FEATURES]:
        out = carray(pointer(layer[FEATURES], like), shape)[row]
        for i in range(len(x)):  # `out[:] = x` compiles the text of its error too: 5 s
            out[i] = x[i]


@compiled()
def norm(work: Any, weight: Any, row: Any, to: Any, rows: Any, like: Any) -> None:
    """Of x's row, to row `to` of NORMAL, which has `rows`."""
    hidden, eps = work[HIDDEN], carray(pointer(work[EPSILON], FLOAT32), (1,))[0]
    x = carray(pointer(work[X], like), (work[ROWS], hidden))[row]
    out = carray(pointer(work[NORMAL], like), (rows, hidden))[to]
    norm_row(x, carray(pointer(weight, like), (hidden,)), out, eps)
    settle(work, work[NORMAL], to, hidden, rows, like)


# -- steps, which all threads share ----------------------------------------------------------------


@compiled()
def add_norm(work: Any, step: Any, layer: Any, weight: Any, delta: Any, like: Any) -> None:
    while True:
        row = next_of(work, step)
        if row >= work[ROWS]:
            break
        _add(work, layer, delta, row, like)
        norm(work, weight, row, row, work[ROWS], like)
    wait(work)


@compiled()
def _rotate(work: Any, step: Any, layer: Any, like: Any) -> None:
    """Queries, keys and values to where attention finds them."""
    rows, heads, kept, size = work[ROWS], work[HEADS], work[KV_HEADS], work[HEAD_DIM]
    qkv = carray(pointer(work[QKV], like), (rows, heads + 2 * kept, size))
    cosine = carray(pointer(work[COSINE], like), (rows, size))
    sine = carray(pointer(work[SINE], like), (rows, size))
    slots = carray(pointer(work[SLOTS], INT64), (rows,))
    store = work[POOL], kept, size
    keys = carray(pointer(layer[KEYS], like), store)
    values = carray(pointer(layer[VALUES], like), store)
    query = carray(pointer(work[QUERY], like), (heads, rows, size))
    while True:
        row = next_of(work, step)
        if row >= rows:
            break
        slot = slots[row]
        rotate_row(qkv[row], cosine[row], sine[row], keys[slot], values[slot], query, row)
    wait(work)


@compiled(inlined=True)
def _attend(work: Any, step: Any, layer: Any, like: Any) -> None:
    attend_items(
        work[COUNTERS] + 8 * step,
        work[ITEMS],
        work[NUMBER_OF_ITEMS],
        work[SEGMENTS],
        work[QUERY],
        layer[KEYS],
        layer[VALUES],
        work[ATTENDED],
        work[ROWS],
        work[HEADS],
        work[KV_HEADS],
        work[HEAD_DIM],
        work[POOL],
        like,
    )
    wait(work)


@compiled()
def _settle_attended(work: Any, step: Any, like: Any) -> None:
    if work[BYTES]:
        while True:
            row = next_of(work, step)
            if row >= work[ROWS]:
                break
            size = work[HEADS] * work[HEAD_DIM]
            settle(work, work[ATTENDED], row, size, work[ROWS], like)
        wait(work)


@compiled()
def _gate(work: Any, step: Any, like: Any) -> None:
    rows, inner = work[ROWS], work[INNER]
    both = carray(pointer(work[GATE_UP], like), (rows, 2 * inner))
    out = carray(pointer(work[GATED], like), (rows, inner))
    while True:
        row = next_of(work, step)
        if row >= rows:
            break
        gate_row(both[row], out[row])
        settle(work, work[GATED], row, inner, rows, like)
    wait(work)


@compiled()
def linear(
    work: Any,
    step: Any,
    weight: Any,
    given: Any,
    rows: Any,
    size: Any,
    outputs: Any,
    out: Any,
    weights: Any,
    like: Any,
) -> None:
    """out [rows, outputs] = given [rows, size] times a weight."""
    x = work[BYTES] if work[BYTES] else given
    multiply_items(
        work[COUNTERS] + 8 * step,
        work[THREADS],
        weight,
        x,
        work[BYTE_SCALES],
        rows,
        size,
        out,
        outputs,
        weights,
        like,
    )
    wait(work)


@compiled(inlined=True)
def finish_layer(work: Any, first: Any, layer: Any, weights: Any, like: Any) -> None:
    """From queries, keys and values in QKV on: what attention says is added to x, what the MLP says
    is in DELTA.
    """
    rows, hidden, inner = work[ROWS], work[HIDDEN], work[INNER]
    asked, kinds = work[HEADS] * work[HEAD_DIM], (weights, like)
    to_out, to_down = layer[TO_OUT : TO_OUT + 3], layer[TO_DOWN : TO_DOWN + 3]
    to_gate_up = layer[TO_GATE_UP : TO_GATE_UP + 3]
    _rotate(work, first, layer, like)
    _attend(work, first + 1, layer, like)
    _settle_attended(work, first + 2, like)
    linear(work, first + 3, to_out, work[ATTENDED], rows, asked, hidden, work[DELTA], *kinds)
    add_norm(work, first + 4, _NO_FEATURES, layer[BEFORE_MLP], work[DELTA], like)
    linear(
        work, first + 5, to_gate_up, work[NORMAL], rows, hidden, 2 * inner, work[GATE_UP], *kinds
    )
    _gate(work, first + 6, like)
    linear(work, first + 7, to_down, work[GATED], rows, inner, hidden, work[DELTA], *kinds)


@compiled(inlined=True)
def head(work: Any, first: Any, last: Any, weights: Any, like: Any) -> None:
    """Logits of the rows that are wanted."""
    number, vocabulary = work[NUMBER_WANTED], work[VOCABULARY]
    wanted = carray(pointer(work[WANTED], INT64), (number,))
    while True:
        row = next_of(work, first)
        if row >= work[ROWS]:
            break
        _add(work, last, work[DELTA], row, like)
    wait(work)
    while True:
        place = next_of(work, first + 1)
        if place >= number:
            break
        norm(work, last[BEFORE_ATTENTION], wanted[place], place, number, like)
    wait(work)
    given, to_head = work[NORMAL], last[TO_QKV : TO_QKV + 3]
    hidden, logits = work[HIDDEN], work[LOGITS]
    linear(work, first + 2, to_head, given, number, hidden, vocabulary, logits, weights, like)
