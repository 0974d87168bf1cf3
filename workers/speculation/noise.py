"""Counter-based noise: the only randomness of a request, and all of it a function of its seed.

A generator has a state, and whoever shares it changes what the next one draws. Here the value for
a token is a pure function of (seed, position, stream, id): no batch, no tree, no restart and no
other draft can change it, and nobody has to ask in order. The function is SplitMix64 (Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the first three words are
hashed into the state of one generator, of which token `id` takes output number `id`.

The bits are the same on every CPU and GPU. Integer arithmetic is exact everywhere; of floats
only + - * / are used, which IEEE 754 rounds in one way, and one kernel each, so that none is
contracted. Every library's `log` errs in its own way, so the logarithm is ours.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

TARGET = 0
"""Stream of the target's own choice, recovered and bonus tokens under `ratio` included."""
RATIO = 1
"""Stream of the uniforms that decide the ratio test."""

_WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # (shift, multiplier)

_MANTISSA = 2**52 - 1
_ONE = 0x3FF0000000000000  # the bits of 1.0
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
LOG_TERMS = 8  # of the series below: its rest is under 3e-14 of the value


def noise(seed: int, position: int, ids: Tensor | int, stream: int = TARGET) -> Tensor:
    """Exponential variates E > 0 with mean 1, float64 [K], for the tokens `ids` (int64 [K]).

    An int stands for all ids below it. Taking argmax(p / E) is the Gumbel-max trick: it draws from
    p, and whoever knows the seed can guess with the same E.
    """
    steps = _steps_below(ids) if isinstance(ids, int) else ids.add(1).mul_(_signed(GOLDEN))
    return _negative_log(_to_unit(_mix_(steps + _signed(key_of(seed, position, stream)))))


def uniform(seed: int, position: int, count: int, stream: int) -> list[float]:
    """`count` uniforms strictly between 0 and 1; number k is the one behind `noise` for id k."""
    key = key_of(seed, position, stream)
    words = (_mix(key + (number + 1) * GOLDEN) for number in range(count))
    return [((word >> 12) + 0.5) * 2.0**-52 for word in words]


def key_of(seed: int, position: int, stream: int = TARGET) -> int:
    """The generator state for one position of one stream: 64 bits."""
    key = 0
    for word in (seed, position, stream):
        assert 0 <= word <= _WORD, f"{word} in {seed, position, stream} is not in [0, 2**64)"
        key = _mix((key ^ word) + GOLDEN)
    return key


def _mix(word: int) -> int:
    """SplitMix64's finaliser on a Python int (taken modulo 2**64)."""
    word &= _WORD
    for shift, multiplier in MIX:
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word


def _mix_(words: Tensor) -> Tensor:
    """The same in place, int64 [K]; torch shifts signs in, so they are masked out."""
    for shift, multiplier in MIX:
        words.bitwise_xor_((words >> shift).bitwise_and_(_WORD >> shift))
        if multiplier != 1:
            words.mul_(_signed(multiplier))
    return words


@lru_cache(maxsize=8)
def _steps_below(count: int) -> Tensor:
    """How far each of `count` outputs is from the state, int64 [count]; never written to."""
    return torch.arange(1, count + 1).mul_(_signed(GOLDEN))


def _to_unit(words: Tensor) -> Tensor:
    """(top 52 bits + 1/2) / 2**52 of int64 [K], in place: float64 [K], never 0 or 1."""
    bits = words.bitwise_right_shift_(12).bitwise_and_(_MANTISSA).bitwise_or_(_ONE)
    return bits.view(torch.float64).sub_(1.0 - 2.0**-53)  # from [1, 2); exact


def _negative_log(u: Tensor) -> Tensor:
    """-log(u) of float64 [K] in (0, 1).

    u = 2**k * m with m in [sqrt(1/2), sqrt(2)), and -log(m) = 2 artanh(s), s = (1 - m) / (1 + m),
    as in fdlibm's e_log.c, but with the plain series 2 artanh(s) = s * sum of 2 s**2n / (2n + 1).
    """
    bits = u.view(torch.int64) - _SQRT_HALF
    k = (bits >> 52).to(torch.float64)
    m = bits.bitwise_and_(_MANTISSA).add_(_SQRT_HALF).view(torch.float64)
    s = (1.0 - m).div_(m.add_(1.0))
    square = s * s
    series = torch.full_like(s, 2.0 / (2 * LOG_TERMS - 1))
    for n in reversed(range(LOG_TERMS - 1)):
        series.mul_(square).add_(2.0 / (2 * n + 1))
    return series.mul_(s).sub_(k.mul_(math.log(2.0)))


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - 2**64 if word >= 2**63 else word
