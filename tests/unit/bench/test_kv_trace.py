"""A trace is what it says, and the same for everybody who replays it."""

from itertools import pairwise

import pytest

from bench.kv_trace import DEPTH, WIDTH, Arrival, arrivals


@pytest.fixture(scope="module")
def trace() -> list[Arrival]:
    return arrivals(400, 0.5, 64, seed=3)


def test_the_seed_decides_everything(trace: list[Arrival]) -> None:
    assert arrivals(400, 0.5, 64, seed=3) == trace
    assert arrivals(400, 0.5, 64, seed=4) != trace


def test_arrivals_come_at_the_rate_asked_for(trace: list[Arrival]) -> None:
    steps = [arrival.step for arrival in trace]
    assert len(steps) == 400
    assert all(a <= b for a, b in pairwise(steps))
    assert 400 / steps[-1] == pytest.approx(0.5, rel=0.2)


def test_paths_bring_the_answer_and_no_more(trace: list[Arrival]) -> None:
    for arrival in trace:
        assert 1 <= len(arrival.answer) <= arrival.max_tokens <= 64
        assert sum(len(path) + 1 for path in arrival.paths) == len(arrival.answer)
        for path in arrival.paths:
            assert [node // WIDTH for node in path] == list(range(len(path))), "one in each level"
            assert len(path) <= DEPTH
    assert {len(path) for arrival in trace for path in arrival.paths} == {0, 1, 2, 3, 4}


def test_some_share_a_long_beginning_and_some_leave(trace: list[Arrival]) -> None:
    beginnings = [arrival.prompt[:200] for arrival in trace if len(arrival.prompt) > 200]
    sharing = sum(beginnings.count(beginning) > 1 for beginning in beginnings)
    assert 0.3 < sharing / len(trace) < 0.5
    leaving = [arrival for arrival in trace if arrival.leaves is not None]
    assert 0.05 < len(leaving) / len(trace) < 0.15
    assert all(1 <= (arrival.leaves or 0) <= 2 * len(arrival.paths) for arrival in leaving)


@pytest.mark.parametrize(
    ("requests", "rate", "max_tokens", "message"),
    [
        (0, 1.0, 8, "requests: 0 is not 1 or more"),
        (1, 1.0, 0, "max_tokens: 0 is not 1 or more"),
        (1, 0.0, 8, "rate: 0.0 is no number above 0"),
        (1, float("nan"), 8, "rate: nan is no number above 0"),
        (1, float("inf"), 8, "rate: inf is no number above 0"),
    ],
)
def test_what_cannot_be_is_named(requests: int, rate: float, max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        arrivals(requests, rate, max_tokens, seed=0)
