"""A line in which nobody waits for all of somebody else's, and everybody's turn comes."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.line import STRIDE, Line


@dataclass(frozen=True)
class Waiting:
    group: str
    number: int


def line_of(*groups: str) -> Line[Waiting]:
    line: Line[Waiting] = Line()
    line.extend(Waiting(group, number) for number, group in enumerate(groups))
    return line


def served(line: Line[Waiting]) -> list[str]:
    """Everybody, in turn."""
    turns = []
    while len(line):
        turns.append(line.first.group)
        line.remove(line.first)
    return turns


def test_who_asks_for_one_is_served_in_the_order_of_coming() -> None:
    assert served(line_of("a", "b", "c")) == ["a", "b", "c"]


def test_who_asks_for_many_lets_others_in_between() -> None:
    many = ["many"] * 100
    turns = served(line_of(*many, "one"))
    assert turns.index("one") == 12  # of 100: where 100 has come by strides of 9
    assert turns.count("many") == 100


def test_who_is_put_back_is_first_and_the_last_of_them_before_the_others() -> None:
    line = line_of("a", "b", "c")
    for _ in range(2):
        line.put_back(Waiting("back", len(line)))
    assert [(each.group, each.number) for each in line][:3] == [("back", 4), ("back", 3), ("a", 0)]


def test_a_group_that_has_left_counts_no_more() -> None:
    line = line_of(*["many"] * 5)
    for waiting in list(line):
        line.remove(waiting)
    line.extend([Waiting("many", 5), Waiting("one", 6)])
    assert served(line) == ["many", "one"]
    with pytest.raises(ValueError, match="not in list"):
        line.remove(Waiting("many", 5))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.data())
def test_nobody_is_overtaken_more_often_than_was_said(
    groups: list[str], data: st.DataObject
) -> None:
    """Also where others come while it waits."""
    line = line_of(*groups)
    waiting = data.draw(st.sampled_from(list(line)))
    before = [each for each in line if each.group == waiting.group].index(waiting)
    ahead = list(line).index(waiting)
    newcomers = 0
    while line.first != waiting:
        line.remove(line.first)
        line.extend([Waiting(f"new {newcomers}", -newcomers - 1)])
        newcomers += 1
    assert newcomers <= ahead + STRIDE * before
