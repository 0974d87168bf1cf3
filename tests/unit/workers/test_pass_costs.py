"""What a step costs: the curve, how it follows what is observed, and how it is measured."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.table_target import TableTarget
from workers import pass_costs
from workers.pass_costs import PassCosts, measure_pass_costs, unknown_costs

CURVE = {1: 8.0, 2: 9.0, 4: 10.0, 8: 14.0}


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 8), (1.5, 8.5), (2, 9), (3, 9.5), (4, 10), (7, 13), (8, 14), (12, 18)]
)
def test_between_what_was_measured_costs_are_interpolated(rows: float, seconds: float) -> None:
    assert PassCosts(CURVE).at(rows) == pytest.approx(seconds)


def test_one_measurement_is_a_flat_curve() -> None:
    costs = PassCosts({1: 8.0})
    assert costs.at(1) == costs.at(30) == 8.0
    costs.observe(1, 9.0)
    assert 8.0 < costs.at(1) < 9.0


@given(st.sampled_from(list(CURVE)), st.floats(0.8, 1.4))
def test_the_curve_follows_what_is_observed_there_most_of_all(rows: int, factor: float) -> None:
    costs, before = PassCosts(CURVE), PassCosts(CURVE)
    seconds = factor * before.at(rows)
    for _ in range(200):
        costs.observe(rows, seconds)
    assert costs.at(rows) == pytest.approx(seconds, rel=0.01)
    moved = [costs.at(other) - before.at(other) for other in range(1, 9)]
    assert all(abs(moved[rows - 1]) >= abs(other) - 1e-9 for other in moved)
    assert all(other * (factor - 1) >= -1e-9 for other in moved)


def test_one_disturbed_step_moves_it_little_and_a_prompt_not_at_all() -> None:
    costs = PassCosts(CURVE)
    costs.observe(1, 1000.0)
    assert costs.at(1) == pytest.approx(8.6)
    costs = PassCosts(CURVE)
    costs.observe(9, 1000.0)
    assert [costs.at(rows) for rows in CURVE] == list(CURVE.values())


@given(st.integers(1, 30), st.sampled_from([1, 4, 16]))
def test_any_target_is_measured_and_left_as_it_was(pages: int, page_size: int) -> None:
    assume(pages * page_size > 1)
    target: Any = TableTarget(pages, page_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_costs, "_ROUNDS", 1)
        costs = measure_pass_costs(target)
    assert costs.at(1) > 0
    assert target.pool.pages_free == pages
    assert target.pool.sequences() == ()
    target.pool.check_integrity()


def test_a_target_that_fails_gives_its_room_back() -> None:
    target: Any = TableTarget()
    target.failing = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        measure_pass_costs(target)
    assert target.pool.pages_free == target.pool.pages


def test_what_is_not_known_is_learned() -> None:
    costs = unknown_costs()
    for _ in range(300):
        for rows, seconds in CURVE.items():
            costs.observe(rows, seconds / 1000)
    assert [costs.at(rows) for rows in CURVE] == pytest.approx(
        [s / 1000 for s in CURVE.values()], 0.1
    )
