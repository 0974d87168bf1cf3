"""The pool against a model, a list of words per sequence, and against its own checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from cache.kv_pool import KVPool, Moves, OutOfPages

PAGES, PAGE_SIZE = 7, 3


class PoolMachine(RuleBasedStateMachine):
    """Every slot is a cell of `memory`; what a sequence wrote must be what its extents read back.

    The pool says where to write and what to copy; the machine does it and compares the cells with
    plain lists. So a slot that is shared by mistake, lost or moved wrongly shows as a wrong word.
    """

    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(PAGES, PAGE_SIZE)
        self.memory = [""] * (PAGES * PAGE_SIZE)
        self.committed: dict[int, list[str]] = {}
        self.scratch: dict[int, list[str]] = {}
        self.count = 0

    def word(self) -> str:
        self.count += 1
        return f"word {self.count}"

    def held(self, sequence: int) -> int:
        return -(-(len(self.committed[sequence]) + len(self.scratch[sequence])) // PAGE_SIZE)

    @rule(target=opened)
    def open(self) -> int:
        self.count += 1
        self.pool.open(self.count)
        self.committed[self.count], self.scratch[self.count] = [], []
        return self.count

    @rule(sequence=consumes(opened))
    def close(self, sequence: int) -> None:
        self.pool.close(sequence)
        del self.committed[sequence], self.scratch[sequence]

    @rule(sequence=opened, count=st.integers(0, PAGES * PAGE_SIZE + 1))
    def reserve(self, sequence: int, count: int) -> None:
        if self.scratch[sequence]:
            self.pool.rollback(sequence)
            self.scratch[sequence] = []
        needed = -(-(len(self.committed[sequence]) + count) // PAGE_SIZE) - self.held(sequence)
        free = PAGES - sum(self.held(s) for s in self.committed)
        assert self.pool.can_reserve(sequence, count) == (needed <= free)
        if needed > free:
            before = self.picture()
            with pytest.raises(OutOfPages, match=f"{needed} pages, {free} are free"):
                self.pool.reserve(sequence, count)
            assert self.picture() == before
            return
        slots = self.pool.reserve(sequence, count)
        assert len(slots) == count
        for slot in slots:
            self.memory[slot] = self.word()
        self.scratch[sequence] = [self.memory[slot] for slot in slots]

    @rule(sequence=opened, data=st.data())
    def commit(self, sequence: int, data: st.DataObject) -> None:
        scratch = self.scratch[sequence]
        keep = [index for index in range(len(scratch)) if data.draw(st.booleans())]
        moves = self.pool.commit(sequence, keep)
        read = [self.memory[slot] for slot in moves.sources]
        for slot, value in zip(moves.targets, read, strict=True):
            self.memory[slot] = value
        assert len(moves.sources) <= len(keep)
        if keep == list(range(len(keep))):
            assert moves == Moves((), ())
        self.committed[sequence] += [scratch[index] for index in keep]
        self.scratch[sequence] = []

    @rule(sequence=opened)
    def rollback(self, sequence: int) -> None:
        self.pool.rollback(sequence)
        self.scratch[sequence] = []

    @rule(count=st.integers(0, PAGES * PAGE_SIZE + 1))
    def ask_for_a_new_sequence(self, count: int) -> None:
        free = PAGES - sum(self.held(s) for s in self.committed)
        assert self.pool.can_reserve(None, count) == (-(-count // PAGE_SIZE) <= free)

    @invariant()
    def integrity(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for sequence in self.committed:
            extents = self.pool.extents(sequence)
            words = [self.memory[slot] for extent in extents for slot in range(*extent)]
            assert words == self.committed[sequence] + self.scratch[sequence]
            assert self.pool.committed(sequence) == len(self.committed[sequence])
            assert all(a[1] != b[0] for a, b in zip(extents, extents[1:], strict=False))

    @invariant()
    def the_totals_are_right(self) -> None:
        held = sum(self.held(sequence) for sequence in self.committed)
        assert (self.pool.pages_in_use, self.pool.pages_free) == (held, PAGES - held)
        assert self.pool.tokens_stored == sum(map(len, self.committed.values()))
        assert self.pool.sequences() == tuple(self.committed)

    def picture(self) -> object:
        everyone = self.pool.sequences()
        return [(s, self.pool.committed(s), self.pool.extents(s)) for s in everyone]

    def teardown(self) -> None:
        for sequence in self.pool.sequences():
            self.pool.close(sequence)
        self.pool.check_integrity()
        assert self.pool.pages_in_use == 0


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_pool_machine = PoolMachine.TestCase


def pool_with(*tokens: int, pages: int = 8, page_size: int = 4) -> KVPool:
    """Sequences 0, 1, ... with that many committed tokens each."""
    pool = KVPool(pages, page_size)
    for sequence, count in enumerate(tokens):
        pool.open(sequence)
        pool.reserve(sequence, count)
        pool.commit(sequence, range(count))
    return pool


def test_a_tree_step_by_hand() -> None:
    pool = pool_with(6)
    assert pool.reserve(0, 5) == (6, 7, 8, 9, 10)
    assert pool.extents(0) == ((0, 11),)
    assert pool.commit(0, (0, 2, 4)) == Moves(sources=(8, 10), targets=(7, 8))
    assert pool.committed(0) == 9
    assert pool.extents(0) == ((0, 9),)
    assert pool.pages_in_use == 3


def test_committing_nothing_gives_the_scratch_pages_back() -> None:
    pool = pool_with(4)
    pool.reserve(0, 9)
    assert pool.pages_in_use == 4
    assert pool.commit(0, ()) == Moves((), ())
    assert pool.pages_in_use == 1
    pool.reserve(0, 9)
    pool.rollback(0)
    assert (pool.pages_in_use, pool.committed(0)) == (1, 4)


def test_a_sequence_around_another_has_two_extents() -> None:
    pool = pool_with(4, 4)
    assert pool.reserve(0, 2) == (8, 9)
    assert pool.extents(0) == ((0, 4), (8, 10))
    assert pool.extents(1) == ((4, 8),)


def test_the_lowest_free_pages_are_taken_first() -> None:
    pool = pool_with(4, 4, 4)
    pool.close(1)
    pool.close(0)
    pool.open(9)
    assert pool.reserve(9, 12) == (*range(8), *range(12, 16))
    assert pool.extents(9) == ((0, 8), (12, 16))


def test_closing_gives_scratch_back_too() -> None:
    pool = pool_with(5)
    pool.reserve(0, 20)
    pool.close(0)
    assert (pool.pages_in_use, pool.tokens_stored, pool.sequences()) == (0, 0, ())
    pool.check_integrity()


def test_an_open_sequence_without_tokens_has_no_extents() -> None:
    pool = pool_with(0)
    assert pool.extents(0) == ()
    assert pool.reserve(0, 0) == ()


def test_running_out_changes_nothing_and_says_how_much_is_missing() -> None:
    pool = pool_with(8, pages=3)
    assert not pool.can_reserve(0, 5)
    with pytest.raises(OutOfPages, match="5 slots need 2 pages, 1 are free"):
        pool.reserve(0, 5)
    assert pool.reserve(0, 4) == (8, 9, 10, 11)


@pytest.mark.parametrize(("sizes", "field"), [((0, 16), "pages"), ((4, 0), "page_size")])
def test_a_pool_of_nothing_is_refused(sizes: tuple[int, int], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be at least 1, not 0"):
        KVPool(*sizes)


@pytest.mark.parametrize(
    ("misuse", "complaint"),
    [
        (lambda pool: pool.open(0), "sequence 0 is already open"),
        (lambda pool: pool.close(5), "sequence 5 is not open"),
        (lambda pool: pool.reserve(0, 1), "sequence 0 has 3 scratch slots out"),
        (lambda pool: pool.reserve(1, -1), "cannot reserve -1 slots"),
        (lambda pool: pool.commit(0, (1, 0)), "are not ascending indices into 3 scratch slots"),
        (lambda pool: pool.commit(0, (1, 1)), "are not ascending indices into 3 scratch slots"),
        (lambda pool: pool.commit(0, (2, 3)), "are not ascending indices into 3 scratch slots"),
        (lambda pool: pool.commit(0, (-1, 0)), "are not ascending indices into 3 scratch slots"),
    ],
)
def test_misuse_fails_an_assertion_and_changes_nothing(
    misuse: Callable[[KVPool], object], complaint: str
) -> None:
    pool = pool_with(5, 4)
    pool.reserve(0, 3)
    with pytest.raises(AssertionError, match=complaint):
        misuse(pool)
    pool.check_integrity()
    assert pool.extents(0) == ((0, 8),)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda pool: pool._sequences.pop(1), r"page 2 has 1 references but 0 holders"),
        (lambda pool: pool._references.__setitem__(0, 2), r"page 0 has 2 references but 1 holders"),
        (lambda pool: pool._free.append(0), r"free list \[0, 3, 4\] is not the pages without"),
        (lambda pool: pool._free.append(3), r"free list \[3, 3, 4\] is not the pages without"),
        (lambda pool: pool._free.remove(3), r"free list \[4\] is not the pages without"),
        (lambda pool: pool._sequences[1].pages.append(9), r"page 9 lies beyond the pool's 5 pages"),
        (lambda pool: pool._sequences[1].pages.append(3), r"sequence 1 holds 2 pages for 1 pages"),
        (lambda pool: pool._sequences[0].pages.append(0), r"sequence 0 holds a page twice"),
    ],
)
def test_integrity_names_the_damage(damage: Callable[[KVPool], object], finding: str) -> None:
    pool = pool_with(6, 3, pages=5)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=finding):
        pool.check_integrity()


def share_first_page(pool: KVPool) -> None:
    """Sequence 1 holds page 0 of sequence 0 instead of its own."""
    pool._drop(pool._sequences[1].pages[0])
    pool._sequences[1].pages[0] = 0
    pool._references[0] += 1


def test_a_shared_page_is_sound_only_while_nobody_can_write_it() -> None:
    pool = pool_with(8, 4)
    share_first_page(pool)
    pool.check_integrity()
    pool.reserve(1, 1)  # on a page of its own
    pool.check_integrity()
    pool = pool_with(8, 3)
    share_first_page(pool)
    with pytest.raises(
        AssertionError, match="sequence 1 can write page 0, which another one holds"
    ):
        pool.check_integrity()


def test_a_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = pool_with(8, 4)
    share_first_page(pool)
    pool.close(0)
    pool.check_integrity()
    assert pool.pages_in_use == 1
    pool.close(1)
    pool.check_integrity()
    assert pool.pages_in_use == 0


def test_the_book_does_not_import_torch() -> None:
    program = "import sys, cache.kv_pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
