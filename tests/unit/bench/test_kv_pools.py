"""The two plain pools keep their own books in order, too."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kv_pools import MaxLengthPool, PagedPool, Pool
from cache.kv_pool import OutOfPages


def grow(pool: Pool, sequence: int, count: int) -> tuple[int, ...]:
    """Commit so many tokens; where they are."""
    slots = pool.reserve(sequence, count)
    pool.commit(sequence, range(count), [0] * count)
    return slots


def test_room_for_the_whole_length_is_in_one_piece_and_the_first_that_fits() -> None:
    pool = MaxLengthPool(10, {0: 4, 1: 2, 2: 4, 3: 5, 4: 3})
    for sequence in (0, 1, 2):
        pool.open(sequence)
    assert (pool.pages_in_use, grow(pool, 1, 2)) == (10, (4, 5))
    pool.close(0)
    pool.close(2)
    assert pool.pages_in_use == 2
    pool.open(3)  # 8 slots are free, but no 5 of them side by side
    assert pool.pages_missing(3, 1) > pool.pages_free
    pool.close(3)
    pool.open(4)
    assert grow(pool, 4, 2) == (0, 1)
    pool.reserve(4, 1)
    assert pool.extents(4) == ((0, 3),)
    pool.commit(4, (), ())
    assert (pool.pages_in_use, pool.tokens_stored, pool.committed(4)) == (5, 4, 2)
    pool.close(1)
    pool.open(3)
    assert pool.pages_missing(3, 5) == 0
    assert grow(pool, 3, 5) == (3, 4, 5, 6, 7)
    pool.check_integrity()


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.lists(st.integers(0, 11), max_size=40),
)
def test_gaps_are_merged_whoever_leaves(sizes: list[int], toggles: list[int]) -> None:
    pool, held = MaxLengthPool(12, dict(enumerate(sizes))), set[int]()
    for number in toggles:
        if number in held:
            pool.close(number)
            held.remove(number)
        elif number < len(sizes):
            pool.open(number)
            held.add(number)
        pool.check_integrity()
    for number in held:
        pool.close(number)
    pool.check_integrity()
    assert pool.pages_in_use == 0


def test_pages_come_one_by_one_and_stay_until_the_end() -> None:
    pool = PagedPool(4, 4)
    pool.open(0)
    assert pool.pages_missing(0, 5) == 2
    assert pool.reserve(0, 5) == (0, 1, 2, 3, 4)
    assert (pool.pages_in_use, pool.tokens_stored) == (2, 0)
    pool.commit(0, (0, 2), (7, 7))
    assert (pool.pages_in_use, pool.committed(0)) == (2, 2)
    assert pool.reserve(0, 4) == (2, 3, 4, 5)
    assert pool.extents(0) == ((0, 4), (4, 6))
    pool.commit(0, (), ())
    pool.open(1)
    with pytest.raises(OutOfPages, match="9 slots need 3 pages, 2 are free"):
        pool.reserve(1, 9)
    assert grow(pool, 1, 8) == tuple(range(8, 16))
    pool.check_integrity()
    pool.close(0)
    pool.close(1)
    pool.check_integrity()
    assert (pool.pages_free, pool.tokens_stored) == (4, 0)


@pytest.mark.parametrize("pool", [PagedPool(4, 4), MaxLengthPool(16, {0: 16})])
def test_a_book_out_of_order_is_noticed(pool: PagedPool | MaxLengthPool) -> None:
    pool.open(0)
    grow(pool, 0, 3)
    pool.check_integrity()
    if isinstance(pool, PagedPool):
        pool._free.append(0)
    else:
        pool._gaps.append((3, 16))
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check_integrity()
