"""One token chosen from one row of logits: the best, or one drawn as `law`, `noise` and `choose` do
it together in torch, where nothing of the law is cut off.

Drawing is there some forty operations over the whole vocabulary. Here hardly any noise is computed:
once the likeliest tokens have raced, another one must be luckier than a bound to win, and the bits
of its noise tell that before their logarithm is taken.
"""

import math
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.elements import of_rank, pointer, rank_of, widen
from workers.speculation.noise import GOLDEN, LOG_TERMS, MIX

# Scores so far below the best, in units of the temperature, race first.
_NEAR = 6.0
# Tokens whose luck, and whose scores, are looked at together.
_BLOCK, _STRETCH = 64, 1024
# More than what a bound may err by.
_ROUNDING = 1e-9

_LN_2, _SQRT_HALF = math.log(2.0), math.sqrt(0.5)
_GOLDEN = np.uint64(GOLDEN)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(shift) for shift, _ in MIX)
_FACTOR_1, _FACTOR_2, _ = (np.uint64(factor) for _, factor in MIX)
_UNUSED = np.uint64(12)


@compiled()
def _bits(key: Any, token: Any) -> Any:
    """The 52 random bits of a token, as `noise` has them."""
    word = key + np.uint64(token + 1) * _GOLDEN
    word = (word ^ (word >> _SHIFT_1)) * _FACTOR_1
    word = (word ^ (word >> _SHIFT_2)) * _FACTOR_2
    return (word ^ (word >> _SHIFT_3)) >> _UNUSED


@compiled()
def _exponential(bits: Any) -> Any:
    """The same bits as an exponential variate, operation by operation as `noise` makes it."""
    m, k = math.frexp((float(np.int64(bits)) + 0.5) * 2.0**-52)
    if m < _SQRT_HALF:
        m, k = 2.0 * m, k - 1
    s = (1.0 - m) / (m + 1.0)
    square = s * s
    series = 2.0 / (2 * LOG_TERMS - 1)
    for n in range(LOG_TERMS - 2, -1, -1):
        series = series * square + 2.0 / (2 * n + 1)
    return series * s - k * _LN_2


@compiled()
def ranks(scores: Any) -> Any:
    """The lowest and the highest rank of some scores."""
    low = high = rank_of(scores[0])
    for token in range(len(scores)):
        rank = rank_of(scores[token])
        low, high = min(low, rank), max(high, rank)
    return low, high


@compiled()
def _highest(row: Any) -> Any:
    """The highest score, NaN if any is, and a token from which on it is not far."""
    low, high = ranks(row[:_STRETCH])
    near = 0
    for first in range(_STRETCH, len(row), _STRETCH):
        own_low, own_high = ranks(row[first : first + _STRETCH])
        low = min(low, own_low)
        if own_high > high:
            high, near = own_high, first
    lowest, highest = of_rank(low, row[0]), of_rank(high, row[0])
    return highest if lowest == lowest else lowest, near


@compiled()
def best(logits: int, size: int, like: Any) -> int:
    """The first token with the highest of `size` scores at an address; -1 where they are no
    numbers.
    """
    row = carray(pointer(logits, like), (size,))
    highest, token = _highest(row)
    if not np.isfinite(highest):
        return -1
    while widen(row[token]) != highest:
        token += 1
    return int(token)


@compiled()
def _luckiest(key: Any, first: Any, last: Any) -> Any:
    """The most that the bits of some tokens are."""
    most = np.uint64(0)
    for token in range(first, last):
        own = _bits(key, token)
        most = own if own > most else most
    return most


@compiled()
def draw(logits: int, size: int, temperature: float, key: Any, like: Any) -> int:
    """The token that wins; -1 where the scores are no numbers.

    logits: address of `size` elements; key: of the noise, as uint64.
    """
    row = carray(pointer(logits, like), (size,))
    score, _ = _highest(row)
    highest = np.float64(score)
    if not np.isfinite(highest):
        return -1
    near = highest - _NEAR * temperature
    winner, most = -1, 0.0
    for first in range(0, size, _STRETCH):
        _, high = ranks(row[first : first + _STRETCH])
        if of_rank(high, row[0]) < near:
            continue
        for token in range(first, min(first + _STRETCH, size)):
            score = np.float64(widen(row[token]))
            if score >= near:
                weight = math.exp((score - highest) / temperature)
                reached = weight / _exponential(_bits(key, token))
                if reached > most:
                    winner, most = token, reached
    # Of the others none has more weight than exp(-_NEAR), and to win less noise than this.
    luck = math.exp(-math.exp(-_NEAR) / most) - _ROUNDING
    bound = np.uint64(luck * 2.0**52)
    for first in range(0, size, _BLOCK):
        last = min(first + _BLOCK, size)
        if _luckiest(key, first, last) < bound:
            continue
        for token in range(first, last):
            own, score = _bits(key, token), np.float64(widen(row[token]))
            if own >= bound and score < near:
                reached = math.exp((score - highest) / temperature) / _exponential(own)
                if reached > most or (reached == most and token < winner):
                    winner, most = token, reached
    return winner
