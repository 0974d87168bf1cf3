"""What may follow a context, by what followed it before: `workers.ngram_member` in compiled form.

Nothing is indexed of the request's own text: to find a context in it anew takes a microsecond.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.engine.kernels.compiling import compiled

LIKELIEST = 8
"""Followers of a context that are told apart."""

# Words of a remembered count: low, high, total, distinct, how many are told apart, their tokens
# and how often each came.
_LOW, _HIGH, _TOTAL, _DISTINCT, _SIZE, _IDS = range(6)
_TIMES = _IDS + LIKELIEST
_COUNT_WORDS = _TIMES + LIKELIEST
_REMEMBERED = 1 << 13
_MULTIPLIER = np.int64(-7046029254386353131)  # 2**64 over the golden ratio


class Text(NamedTuple):
    """Of a domain: `columns` [order, n] and `following` [n] as `NgramTable` sorts them; where each
    token's part of the first column begins [tokens + 1]; and counts that were made before. With
    n = 0 there is no such text.
    """

    begins: NDArray[np.int64]
    columns: NDArray[np.int32]
    following: NDArray[np.int32]
    counts: NDArray[np.int32]  # [_REMEMBERED, _COUNT_WORDS]


class Scratch(NamedTuple):
    """Room for one law after the other, whoever asks.

    keys, times, stamps [a power of 2]: a hash table of tokens, whose entries count only with the
    stamp of now; places: of its entries in the order of their coming. matches [2, n]: a follower in
    the request's own text, and how long its context matches. law: tokens that may follow, with
    their probability by the request's own text and by the domain's. counted: of the request's own.
    """

    keys: NDArray[np.int32]
    times: NDArray[np.int32]
    stamps: NDArray[np.int64]
    places: NDArray[np.int32]
    now: NDArray[np.int64]  # [1]
    matches: NDArray[np.int32]
    counted: NDArray[np.int32]  # [_COUNT_WORDS]
    ids: NDArray[np.int32]
    suffix: NDArray[np.float64]
    table: NDArray[np.float64]


def text_of(columns: NDArray[np.int32], following: NDArray[np.int32]) -> Text:
    """With nothing counted yet."""
    tokens = columns[0].max(initial=-1) + 1
    return Text(
        np.searchsorted(columns[0], np.arange(tokens + 1)),
        columns,
        following,
        np.zeros((_REMEMBERED, _COUNT_WORDS), np.int32),
    )


def scratch_for(tokens: int, order: int, counted: int) -> Scratch:
    """For requests of up to so many tokens, and tables of which `counted` are counted at most."""
    size = 1 << (2 * max(tokens, counted)).bit_length()
    keys, times, places = (np.zeros(size, np.int32) for _ in range(3))
    named = 2 * order * LIKELIEST
    return Scratch(
        keys,
        times,
        np.zeros(size, np.int64),
        places,
        np.zeros(1, np.int64),
        np.zeros((2, max(1, tokens)), np.int32),
        np.zeros(_COUNT_WORDS, np.int32),
        np.zeros(named, np.int32),
        np.zeros(named, np.float64),
        np.zeros(named, np.float64),
    )


# -- counting --------------------------------------------------------------------------------------


@compiled()
def _begin_count(scratch: Any) -> None:
    scratch.now[0] += 1


@compiled()
def _count_token(scratch: Any, token: Any, distinct: Any) -> Any:
    """One more of a token; how many different ones there are now."""
    last, now = len(scratch.keys) - 1, scratch.now[0]
    place = (np.int64(token) * _MULTIPLIER >> 32) & last
    while scratch.stamps[place] == now:
        if scratch.keys[place] == token:
            scratch.times[place] += 1
            return distinct
        place = (place + 1) & last
    scratch.stamps[place], scratch.keys[place], scratch.times[place] = now, token, 1
    scratch.places[distinct] = place
    return distinct + 1


@compiled()
def _end_count(scratch: Any, total: Any, distinct: Any, count: Any) -> None:
    """The sum of what was counted to `count`: of equally frequent tokens the first ones."""
    size = 0
    for number in range(distinct):
        place = scratch.places[number]
        times = scratch.times[place]
        if size == LIKELIEST and times <= count[_TIMES + size - 1]:
            continue
        size = min(size + 1, LIKELIEST)
        at = size - 1
        while at > 0 and count[_TIMES + at - 1] < times:
            count[_TIMES + at] = count[_TIMES + at - 1]
            count[_IDS + at] = count[_IDS + at - 1]
            at -= 1
        count[_TIMES + at], count[_IDS + at] = times, scratch.keys[place]
    count[_TOTAL], count[_DISTINCT], count[_SIZE] = total, distinct, size


# -- the domain's text -----------------------------------------------------------------------------


@compiled()
def _first_not_below(column: Any, token: Any, low: Any, high: Any) -> Any:
    while low < high:
        middle = (low + high) // 2
        if column[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low


@compiled()
def _end_of(column: Any, low: Any, high: Any) -> Any:
    """Where what stands at `low` ends, which is near more often than not."""
    token, step = column[low], 1
    while low + step < high and column[low + step] == token:
        low += step
        step *= 2
    return _first_not_below(column, token + 1, low, min(low + step, high))


@compiled()
def _find(text: Any, context: Any, size: Any, lows: Any, highs: Any) -> Any:
    """Where the last 1, 2, .. of `size` tokens of a context occur; how many of these do."""
    last = context[size - 1]
    if last + 1 >= len(text.begins) or text.begins[last] == text.begins[last + 1]:
        return 0
    low, high, found = text.begins[last], text.begins[last + 1], 1
    lows[0], highs[0] = low, high
    while found < min(size, len(text.columns)):
        column, token = text.columns[found], context[size - 1 - found]
        low = _first_not_below(column, token, low, high)
        if low == high or column[low] != token:
            break
        high = _end_of(column, low, high)
        lows[found], highs[found] = low, high
        found += 1
    return found


@compiled()
def _count_text(text: Any, low: Any, high: Any, counted: Any, scratch: Any) -> Any:
    """What followed a context: at most `counted` evenly spaced occurrences are looked at."""
    mixed = (np.int64(low) * np.int64(len(text.following) + 1) + np.int64(high)) * _MULTIPLIER
    count = text.counts[(mixed >> 32) & (_REMEMBERED - 1)]
    if count[_LOW] == low and count[_HIGH] == high:
        return count
    step = (high - low + counted - 1) // counted
    _begin_count(scratch)
    total = distinct = 0
    for place in range(low, high, step):
        distinct = _count_token(scratch, text.following[place], distinct)
        total += 1
    _end_count(scratch, total, distinct, count)
    count[_LOW], count[_HIGH] = low, high
    return count


# -- the request's own text ------------------------------------------------------------------------


@compiled()
def _match(tokens: Any, context: Any, size: Any, matches: Any) -> Any:
    """Everything that followed the last token of a context, and how long the match is; how many."""
    number, last = 0, context[size - 1]
    for place in range(1, len(tokens)):
        if tokens[place - 1] == last:
            length = 1
            while (
                length < size
                and length < place
                and tokens[place - 1 - length] == context[size - 1 - length]
            ):
                length += 1
            matches[0, number], matches[1, number] = tokens[place], length
            number += 1
    return number


@compiled()
def _count_own(scratch: Any, number: Any, order: Any) -> Any:
    """What followed the last `order` tokens of a context."""
    _begin_count(scratch)
    total = distinct = 0
    for match in range(number):
        if scratch.matches[1, match] >= order:
            distinct = _count_token(scratch, scratch.matches[0, match], distinct)
            total += 1
    _end_count(scratch, total, distinct, scratch.counted)
    return scratch.counted


# -- the law ---------------------------------------------------------------------------------------


@compiled()
def _place_of(ids: Any, size: Any, token: Any) -> Any:
    for place in range(size):
        if ids[place] == token:
            return place
    return size


@compiled()
def _share_out(scratch: Any, size: Any, count: Any, unit: Any, to: Any) -> Any:
    """`unit` for every time of each likeliest token; how many tokens the law has then."""
    for number in range(count[_SIZE]):
        token = count[_IDS + number]
        place = _place_of(scratch.ids, size, token)
        if place == size:
            scratch.ids[size], scratch.suffix[size], scratch.table[size] = token, 0.0, 0.0
            size += 1
        to[place] += unit * count[_TIMES + number]
    return size


@compiled()
def law(
    text: Any,
    tokens: Any,
    context: Any,
    size: Any,
    weight: Any,
    least: Any,
    counted: Any,
    scratch: Any,
) -> Any:
    """What may follow the last `size` tokens of a context: to the scratch's law. How many tokens it
    names, and how long the longest match is.

    weight: what an occurrence in `tokens`, the request's own, counts; least: below which what is
    left to shorter contexts is neglected.
    """
    lows, highs = np.empty(len(text.columns), np.int64), np.empty(len(text.columns), np.int64)
    if size == 0:
        return 0, 0
    in_text = _find(text, context, size, lows, highs)
    number = _match(tokens, context, size, scratch.matches)
    in_own = 0
    for match in range(number):
        in_own = max(in_own, scratch.matches[1, match])
    longest, named, left = max(in_text, in_own), 0, 1.0
    for order in range(longest, 0, -1):
        own, domain = scratch.counted, scratch.counted
        own_total = own_distinct = text_total = text_distinct = 0
        if order <= in_own:
            own = _count_own(scratch, number, order)
            own_total, own_distinct = own[_TOTAL], own[_DISTINCT]
        if order <= in_text:
            domain = _count_text(text, lows[order - 1], highs[order - 1], counted, scratch)
            text_total, text_distinct = domain[_TOTAL], domain[_DISTINCT]
        total = weight * own_total + text_total
        scale = left / (total + own_distinct + text_distinct)
        if order <= in_own:
            named = _share_out(scratch, named, own, scale * weight, scratch.suffix)
        if order <= in_text:
            named = _share_out(scratch, named, domain, scale, scratch.table)
        left -= scale * total
        if left < least:
            break
    return named, longest
