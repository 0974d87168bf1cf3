"""Drawing from a whole law by one kernel: the same token as by torch, whatever the scores are."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.engine import drawing
from workers.engine.drawing import draw
from workers.engine.kernels.draw import _bits, _exponential
from workers.engine.sampling import BadLogits, SamplingParams, TokenHistory, law
from workers.speculation.acceptance import choose
from workers.speculation.noise import key_of, noise

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.skipif(drawing.kernel is None, reason="nothing is compiled here"),
]

HISTORY = TokenHistory((1, 2, 3))
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def by_torch(logits: Tensor, params: SamplingParams, position: int) -> int:
    p = law(logits, params, HISTORY)
    return int(p.ids[choose(p.probs, noise(params.seed, position, p.ids))])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 200))
def test_its_noise_has_the_same_bits(seed: int, position: int, size: int) -> None:
    expected = noise(seed, position, size).tolist()
    key = np.uint64(key_of(seed, position))
    assert [_exponential(_bits(key, token)) for token in range(size)] == expected


@each_dtype
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 49_152])
def test_it_draws_what_torch_draws(dtype: torch.dtype, spread: float, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for seed in range(4):
        logits = (spread * torch.randn(size, generator=generator)).to(dtype)
        for temperature in (0.0, 1e-3, 0.3, 0.8, 1.0, 2.0, 50.0):
            params = SamplingParams(seed=seed, temperature=temperature)
            assert draw(logits, params, HISTORY, (), 7 + seed) == by_torch(logits, params, 7 + seed)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32) | st.just(-math.inf), min_size=1, max_size=150),
    st.just(0.0) | st.floats(1e-3, 100),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=300)
def test_any_scores_give_what_torch_draws(
    scores: list[float], temperature: float, seed: int
) -> None:
    logits, params = torch.tensor(scores), SamplingParams(seed=seed, temperature=temperature)
    if max(scores) == -math.inf:
        with pytest.raises(BadLogits):
            draw(logits, params, HISTORY, (), 5)
    else:
        assert draw(logits, params, HISTORY, (), 5) == by_torch(logits, params, 5)


def test_the_lucky_win_against_the_likely() -> None:
    """Far below the best, where only the bits of the noise are looked at, some token wins at times:
    as often as it is drawn by torch.
    """
    logits = torch.full((5000,), -7.0)
    logits[17] = 0.0
    drawn = [draw(logits, SamplingParams(seed=seed), HISTORY, (), 3) for seed in range(300)]
    assert drawn == [by_torch(logits, SamplingParams(seed=seed), 3) for seed in range(300)]
    assert drawn.count(17) < 250
    assert len(set(drawn)) > 50


@each_dtype
def test_penalties_and_bias_come_first(dtype: torch.dtype) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    for seed in range(40):
        params = SamplingParams(
            seed=seed, repetition_penalty=1.8, presence_penalty=1.5, logit_bias=((7, 3.0),)
        )
        p = law(logits, params, HISTORY, (9, 9))
        expected = int(p.ids[choose(p.probs, noise(seed, 13, p.ids))])
        assert draw(logits, params, HISTORY, (9, 9), 11) == expected
    assert torch.equal(logits, before)


@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_what_is_no_number_is_refused(dtype: torch.dtype, bad: float, place: int) -> None:
    logits = torch.zeros(100, dtype=dtype)
    logits[place] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(BadLogits):
            draw(logits, SamplingParams(seed=1, temperature=temperature), HISTORY, (), 0)


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_barred_does_not_come_until_it_may(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.zeros(64, dtype=dtype)
    logits[5:9] = 30
    history = TokenHistory((), ends=(5, 6, 7, 8), min_tokens=3)
    for place in range(20):
        params = SamplingParams(seed=place, temperature=temperature)
        assert draw(logits, params, history, (1, 1), place) not in range(5, 9)
        assert draw(logits, params, history, (1, 1, 1), place) in range(5, 9)
    history.extend([1, 1, 1])
    assert draw(logits, params, history, (), 0) in range(5, 9)
    assert logits[5] == 30
