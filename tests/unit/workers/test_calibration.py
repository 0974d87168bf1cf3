"""Pools of opinions: what they say, and that they come back from the disk as they were."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.calibration import (
    CALIBRATION,
    FARTHEST,
    FLOOR,
    UNCALIBRATED,
    Calibration,
    Pool,
    Regime,
    log_odds,
)
from workers.training.ngram_table import ORDER

PROBABILITY = st.floats(0, 1)
LEVEL = st.integers(0, 9)
POOLS = st.builds(
    Pool,
    bias=st.floats(-3, 3),
    ngram=st.floats(0, 2),
    neural=st.floats(0, 2),
    surer=st.floats(0, 2),
    farther=st.floats(-1, 0),
)


@given(POOLS, PROBABILITY, PROBABILITY, PROBABILITY, LEVEL)
def test_the_surer_a_member_the_likelier_the_guess(
    pool: Pool, one: float, other: float, third: float, level: int
) -> None:
    low, high = sorted((one, other))
    assert pool.confidence(low, third, level) <= pool.confidence(high, third, level)
    assert pool.confidence(third, low, level) <= pool.confidence(third, high, level)
    assert pool.confidence(one, other, level + 1) <= pool.confidence(one, other, level)
    assert 0 < pool.confidence(one, other, level) <= 1


def test_a_pool_adds_up_weighted_log_odds() -> None:
    pool = Pool(bias=0.3, ngram=0.8, neural=0.5, surer=0.1, farther=-0.2)
    odds = 0.3 + (0.8 + 0.1) * math.log(0.6 / 0.4) + 0.5 * math.log(0.2 / 0.8) - 0.2 * 3
    assert pool.confidence(0.6, 0.2, 3) == pytest.approx(1 / (1 + math.exp(-odds)))
    assert pool.confidence(0.6, 0.2, FARTHEST + 5) == pool.confidence(0.6, 0.2, FARTHEST)


def test_nobody_is_ever_quite_sure() -> None:
    """A table that saw a token every time must not outweigh all others for ever."""
    assert log_odds(0.0) == log_odds(FLOOR) == pytest.approx(-log_odds(1.0))
    assert math.isfinite(log_odds(0.0))
    assert Pool(ngram=1.0).confidence(1.0, 0.0, 0) == pytest.approx(1 - FLOOR)


@given(st.floats(FLOOR, 1 - FLOOR), st.integers(0, ORDER))
def test_uncalibrated_a_member_is_taken_at_its_word(probability: float, order: int) -> None:
    regime = UNCALIBRATED.at(0.7)
    assert regime.ngram[order].confidence(probability, 0.0, 0) == pytest.approx(probability)
    assert regime.neural.confidence(0.0, probability, 2) == pytest.approx(probability)
    assert regime.both[order].confidence(probability, probability, 0) == pytest.approx(probability)


def regime(bias: float) -> Regime:
    pools = tuple(Pool(bias + order, 0.25, 1 / 3, 0.2, -0.1) for order in range(ORDER + 1))
    return Regime(ngram=pools, both=pools[::-1], neural=Pool(neural=bias))


def test_a_request_gets_the_regime_nearest_to_its_temperature() -> None:
    calibration = Calibration({0.0: regime(0), 0.8: regime(1), 1.2: regime(2)})
    for temperature, bias in ((0.0, 0), (0.39, 0), (0.41, 1), (0.9, 1), (1.1, 2), (5.0, 2)):
        assert calibration.at(temperature) == regime(bias)


def test_a_saved_calibration_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = Calibration({0.0: regime(1 / 7), 0.8: regime(-1e-9)})
    saved.save(tmp_path)
    assert Calibration.load(tmp_path) == saved


def spoiled(tmp_path: Path, change: Any) -> str:
    Calibration({0.0: regime(0)}).save(tmp_path)
    saved = json.loads((tmp_path / CALIBRATION).read_text(encoding="utf-8"))
    change(saved)
    return json.dumps(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved.clear(),
        lambda saved: saved.update(warm=saved["0.0"]),
        lambda saved: saved.update({"0.8": None}),
        lambda saved: saved["0.0"].pop("neural"),
        lambda saved: saved["0.0"]["neural"].update(image=1.0),
        lambda saved: saved["0.0"]["ngram"].pop(),
        lambda saved: saved["0.0"]["both"].append({}),
        lambda saved: saved["0.0"]["neural"].update(bias="0.5"),
        lambda saved: saved["0.0"]["neural"].update(bias=None),
        lambda saved: saved["0.0"]["neural"].update(bias=float("nan")),
        lambda saved: saved["0.0"]["ngram"][2].update(farther=float("-inf")),
        lambda saved: saved["0.0"]["both"][2].update(bias=-1000.0),
        lambda saved: saved.update(nan=saved["0.0"]),
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path: Path, change: Any) -> None:
    text = spoiled(tmp_path, change)
    (tmp_path / CALIBRATION).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"^{tmp_path / CALIBRATION}: is no calibration \(\w+: "):
        Calibration.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", None])
def test_what_is_no_calibration_at_all_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / CALIBRATION).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no calibration .*make the draft anew with `outrider"):
        Calibration.load(tmp_path)
