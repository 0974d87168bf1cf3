"""Noise: the published generator, bit for bit; exponential; independent along every coordinate.

The statistical bounds are one chance in a thousand or less, and every input is fixed: a test that
passes once passes always.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.speculation import noise as module
from workers.speculation.noise import RATIO, TARGET, noise, uniform

GOLDEN = 0x9E3779B97F4A7C15
WORDS = st.integers(0, 2**64 - 1)

# Outputs of Vigna's splitmix64.c, the reference implementation, from these states.
SPLITMIX64 = {
    0: (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC),
    1234567: (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ),
}

PINNED = [
    ["0x1.057f6771bebd3p+1", "0x1.7fa89533ae6a3p+1", "0x1.9996583f99373p-2"],
    ["0x1.279d8302a9554p-1", "0x1.e971be6a7f023p+0", "0x1.e187fb5a1b015p+0"],
    ["0x1.8eb4892a315f6p-2", "0x1.562fd8c603700p-9"],
]


def signed(word: int) -> int:
    word %= 2**64
    return word - 2**64 if word >= 2**63 else word


# ---------------------------------------------------------------- the generator


@pytest.mark.parametrize("state", SPLITMIX64)
def test_scalar_and_tensor_mixing_are_splitmix64(state: int) -> None:
    expected = SPLITMIX64[state]
    states = [state + (output + 1) * GOLDEN for output in range(len(expected))]
    assert tuple(module._mix(word) for word in states) == expected
    mixed = module._mix_(torch.tensor([signed(word) for word in states]))
    assert [word % 2**64 for word in mixed.tolist()] == list(expected)


@given(st.lists(WORDS, min_size=1, max_size=20))
def test_scalar_and_tensor_mixing_agree(words: list[int]) -> None:
    mixed = module._mix_(torch.tensor([signed(word) for word in words]))
    assert [word % 2**64 for word in mixed.tolist()] == [module._mix(word) for word in words]


def test_the_bits_never_change() -> None:
    """A stream resumed after an upgrade must go on as it began: changing these breaks a promise."""
    assert [value.hex() for value in noise(0, 0, 3).tolist()] == PINNED[0]
    assert [value.hex() for value in noise(2**64 - 1, 8191, 3, 2).tolist()] == PINNED[1]
    assert [value.hex() for value in uniform(42, 7, 2, RATIO)] == PINNED[2]


# ---------------------------------------------------------------- a function of four words


@given(WORDS, st.integers(0, 10**6), st.lists(st.integers(0, 300_000), max_size=40))
def test_a_value_depends_on_its_own_id_only(seed: int, position: int, ids: list[int]) -> None:
    together = noise(seed, position, torch.tensor(ids, dtype=torch.int64))
    alone = [noise(seed, position, torch.tensor([token])).item() for token in ids]
    assert together.tolist() == alone


@pytest.mark.parametrize("count", [0, 1, 7, 8, 33, 49_152])
def test_a_number_of_ids_stands_for_all_below_it(count: int) -> None:
    ids = torch.arange(count)
    expected = noise(5, 6, ids)
    assert torch.equal(noise(5, 6, count), expected)
    assert torch.equal(noise(5, 6, count), expected)  # the cached steps were not overwritten
    assert torch.equal(ids, torch.arange(count))
    assert expected.dtype == torch.float64


def test_some_ids_of_a_vocabulary_get_what_all_would_give_them() -> None:
    ids = torch.tensor([49_151, 3, 17_000, 3])
    assert torch.equal(noise(9, 100, ids), noise(9, 100, 49_152)[ids])
    assert torch.equal(noise(9, 100, 1000), noise(9, 100, 49_152)[:1000])


def test_threads_do_not_change_a_bit() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = noise(1, 2, 200_000)
        torch.set_num_threads(2)
        assert torch.equal(noise(1, 2, 200_000), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_the_same_bits() -> None:
    on_gpu = noise(3, 4, torch.arange(49_152, device="cuda"))
    assert torch.equal(on_gpu.cpu(), noise(3, 4, 49_152))


@pytest.mark.parametrize("words", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_words_out_of_range_are_refused(words: tuple[int, int, int]) -> None:
    seed, position, stream = words
    with pytest.raises(AssertionError, match=r"is not in \[0, 2\*\*64\)"):
        noise(seed, position, 4, stream)
    with pytest.raises(AssertionError, match=r"is not in \[0, 2\*\*64\)"):
        uniform(seed, position, 4, stream)


# ---------------------------------------------------------------- exponential


@given(WORDS, st.integers(0, 10**6), st.sampled_from([TARGET, RATIO, 2]))
@settings(max_examples=50)
def test_noise_is_the_logarithm_of_the_uniform(seed: int, position: int, stream: int) -> None:
    e = noise(seed, position, 50, stream).tolist()
    for value, u in zip(e, uniform(seed, position, 50, stream), strict=True):
        assert 0 < u < 1
        assert value == pytest.approx(-math.log(u), rel=2e-13, abs=0)


def test_the_extreme_words_give_finite_positive_noise() -> None:
    words = torch.tensor([0, -1, 2**12, 2**63 - 1, -(2**63)])
    e = module._negative_log(module._to_unit(words)).tolist()
    units = (2.0**-53, 1 - 2.0**-53, 1.5 * 2.0**-52, 0.5 - 2.0**-53, 0.5 + 2.0**-53)
    assert e == pytest.approx([-math.log(u) for u in units], rel=2e-13, abs=0)
    assert min(e) > 0


def test_the_logarithm_is_good_around_its_seams() -> None:
    seams = [2.0**-k * seam for k in range(1, 53) for seam in (1.0, math.sqrt(0.5), 1.9999)]
    around = [math.nextafter(seam, towards) for seam in seams for towards in (0.0, seam, 1.0)]
    units = [u for u in around if 0 < u < 1]
    logs = module._negative_log(torch.tensor(units, dtype=torch.float64)).tolist()
    assert logs == pytest.approx([-math.log(u) for u in units], rel=2e-13, abs=0)


# ---------------------------------------------------------------- uniform and independent

LENGTH = 20_000
AXES: dict[str, Callable[[int], float]] = {
    "seeds": lambda n: uniform(n, 12, 1, TARGET)[0],
    "distant seeds": lambda n: uniform(n << 40, 12, 1, TARGET)[0],
    "positions": lambda n: uniform(7, n, 1, TARGET)[0],
    "streams": lambda n: uniform(7, 12, 1, n)[0],
    "seeds against positions": lambda n: uniform(LENGTH - n, n, 1, TARGET)[0],
}


def along(axis: str) -> Tensor:
    if axis == "ids":
        return torch.tensor(uniform(7, 12, LENGTH, TARGET), dtype=torch.float64)
    return torch.tensor([AXES[axis](n) for n in range(LENGTH)], dtype=torch.float64)


@pytest.mark.parametrize("axis", ["ids", *AXES])
def test_uniform_along_every_axis_and_neighbours_independent(axis: str) -> None:
    u = along(axis)
    ranks = torch.arange(1, LENGTH + 1, dtype=torch.float64) / LENGTH
    kolmogorov = float((u.sort().values - ranks).abs().max()) * math.sqrt(LENGTH)
    assert kolmogorov < 1.95
    for lag in (1, 2, 3, 64):
        assert independent(u[:-lag], u[lag:])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (noise(7, 12, LENGTH), noise(7, 13, LENGTH)),
        (noise(7, 12, LENGTH), noise(8, 12, LENGTH)),
        (noise(7, 12, LENGTH, TARGET), noise(7, 12, LENGTH, 2)),
        (noise(7, 12, LENGTH, RATIO), noise(7, 13, LENGTH, TARGET)),
        (noise(12, 7, LENGTH), noise(7, 12, LENGTH)),
        (noise(7, 12, LENGTH), noise(7 + 2**63, 12, LENGTH)),
    ],
    ids=["positions", "seeds", "streams", "stream and position", "swapped", "top bit"],
)
def test_neighbouring_vocabularies_are_independent(one: Tensor, other: Tensor) -> None:
    assert independent(torch.exp(-one), torch.exp(-other))


def independent(a: Tensor, b: Tensor) -> bool:
    """Chi-square of the 8 x 8 table of two uniforms against all cells alike: 63 degrees."""
    cells = (a * 8).long().clamp_(max=7) * 8 + (b * 8).long().clamp_(max=7)
    expected = len(a) / 64
    counts = torch.bincount(cells, minlength=64)
    return float(((counts - expected) ** 2 / expected).sum()) < 114  # 1 in 10,000


def test_the_independence_test_can_fail() -> None:
    u = along("ids")
    assert not independent(u, u)
    assert not independent(u, (u + 0.5) % 1)


def test_noise_has_the_moments_of_an_exponential() -> None:
    e = noise(2024, 1, 200_000)
    bound = 4 / math.sqrt(len(e))  # four standard errors, times each statistic's own deviation
    assert abs(float(e.mean()) - 1) < bound
    assert abs(float(e.var()) - 1) < bound * math.sqrt(8)
    assert abs(float((e > 3).double().mean()) - math.exp(-3)) < bound * 0.22


@pytest.mark.parametrize("word", ["seed", "position", "stream"])
def test_every_bit_of_every_word_changes_half_of_the_output(word: str) -> None:
    words = {"seed": 0x0123456789ABCDEF, "position": 77, "stream": 1}
    base = module.key_of(**words)
    flips = [
        (module.key_of(**{**words, word: words[word] ^ (1 << bit)}) ^ base).bit_count()
        for bit in range(64)
    ]
    assert min(flips) > 12
    assert abs(sum(flips) / 64 - 32) < 2
