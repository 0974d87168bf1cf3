"""The plain numbers of a pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.pack import Pack, Segment, chain_parents, tree_parents


def segment(parents: tuple[int, ...], start: int = 0, rows: tuple[int, ...] = ()) -> Segment:
    size = len(parents)
    return Segment(tuple(range(size)), start, parents, ((5, 5 + start + size),), rows)


def test_parents_of_chains_and_of_trees_below_a_root() -> None:
    assert chain_parents(0) == ()
    assert chain_parents(3) == (-1, 0, 1)
    assert tree_parents(()) == (-1,)
    assert tree_parents((-1, -1, 0, 2)) == (-1, 0, 0, 1, 3)


@st.composite
def parents(draw: st.DrawFn) -> tuple[int, ...]:
    size = draw(st.integers(1, 12))
    return tuple(draw(st.integers(-1, node - 1)) for node in range(size))


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """From the first level down to the node."""
    return [] if node < 0 else [*ancestors(parents, parents[node]), node]


@given(parents(), st.integers(0, 9))
def test_positions_count_levels_and_tokens_see_their_ancestors(
    tree: tuple[int, ...], start: int
) -> None:
    one = segment(tree, start)
    lines = [ancestors(tree, node) for node in range(len(tree))]
    assert one.positions == tuple(start + len(line) - 1 for line in lines)
    seen = one.visible()
    assert [row.nonzero()[0].tolist() for row in seen] == [sorted(x) for x in lines]


def test_slots_follow_the_extents_in_their_order() -> None:
    one = Segment((1, 2, 3), 2, (-1, 0, 1), ((8, 10), (4, 5), (20, 22)), ())
    assert one.slots().tolist() == [8, 9, 4, 20, 21]


def test_a_pack_lays_its_segments_end_to_end() -> None:
    pack = Pack((segment((-1, 0), 3, (1,)), segment((-1,), 0, ()), segment((-1, 0, 0), 7, (0, 2))))
    assert pack.tokens() == [0, 1, 0, 0, 1, 2]
    assert pack.positions() == [3, 4, 0, 7, 8, 8]
    assert pack.rows() == [1, 3, 5]
    parts = pack.split_rows(torch.tensor([[1.0], [3.0], [5.0]]))
    assert [part.flatten().tolist() for part in parts] == [[1], [], [3, 5]]


def test_extents_must_hold_the_context_and_the_segment() -> None:
    with pytest.raises(AssertionError):
        Segment((1, 2), 3, (-1, 0), ((0, 4),), ())
