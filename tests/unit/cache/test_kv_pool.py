"""The pool against a model, a list of words per sequence, and against its own checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from random import Random

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

from cache.kv_pool import KVPool, Moves, OutOfPages, Swap

PAGES, PAGE_SIZE = 7, 3
TOKENS = st.integers(0, 1)  # few, so that many sequences begin alike


class PoolMachine(RuleBasedStateMachine):
    """Every slot is a cell of `memory`. A token's cell holds all tokens up to it, as its keys and
    values depend on all of them.

    The pool says where to write and what to copy; the machine does it, and then a sequence's
    extents must read back the beginnings of its tokens, whoever wrote them. So a slot that is
    shared by mistake, lost or moved wrongly shows.
    """

    HOST_PAGES = 0
    opened = Bundle("opened")

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(PAGES, PAGE_SIZE, self.HOST_PAGES)
        self.host: list[list[object]] = [[] for _ in range(self.HOST_PAGES)]
        self.said: list[list[int]] = []
        self.swapped = True
        self.memory: list[object] = [None] * (PAGES * PAGE_SIZE)
        self.committed: dict[int, list[int]] = {}
        # Of each scratch slot, its token if it is to be kept, and what is in its cell.
        self.scratch: dict[int, list[tuple[int | None, object]]] = {}
        self.count = 0

    @rule(target=opened, tokens=st.lists(TOKENS, max_size=12), runs=st.booleans())
    def open(self, tokens: list[int], runs: bool) -> int:
        self.count += 1
        known = self.pool.open(self.count, tokens)
        if runs:
            there, known = known, self.pool.recall(self.count, tokens)
            assert known >= there
            self.swapped = False
        assert known % PAGE_SIZE == 0 and known <= max(0, len(tokens) - 1)
        self.committed[self.count], self.scratch[self.count] = tokens[:known], []
        return self.count

    @rule(target=opened, number=st.integers(0, 9), runs=st.booleans())
    def open_with_what_was_said(self, number: int, runs: bool) -> int:
        """What the pool once held may be where it was, on the host, or gone."""
        said = self.said[-1 - number % len(self.said)] if self.said else []
        return self.open([*said, 0], runs)

    @rule(sequence=consumes(opened))
    def close(self, sequence: int) -> None:
        self.pool.close(sequence)
        del self.committed[sequence], self.scratch[sequence]

    @rule(sequence=opened, kept=st.lists(st.none() | TOKENS, max_size=PAGES * PAGE_SIZE + 1))
    def reserve(self, sequence: int, kept: list[int | None]) -> None:
        if self.scratch[sequence]:
            self.pool.rollback(sequence)
            self.scratch[sequence] = []
        count, own = len(kept), self.committed[sequence]
        needed = -(-(len(own) + count) // PAGE_SIZE) - -(-len(own) // PAGE_SIZE)
        free = self.pool.pages_free
        if needed > free:
            before = self.picture()
            with pytest.raises(OutOfPages, match=f"{needed} pages, {free} are free"):
                self.pool.reserve(sequence, count)
            assert self.picture() == before
            return
        slots = self.pool.reserve(sequence, count)
        assert len(slots) == count
        self.swap()
        said = list(own)
        for slot, token in zip(slots, kept, strict=True):
            self.count += 1
            if token is not None:
                said.append(token)
            cell = f"garbage {self.count}" if token is None else tuple(said)
            self.memory[slot] = cell
            self.scratch[sequence].append((token, cell))

    @rule()
    def swap(self) -> None:
        """As before every pass."""
        for swap in self.pool.swaps():
            for page, place in zip(swap.pages, swap.places, strict=True):
                cells = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                if swap.back:
                    self.memory[cells] = self.host[place]
                else:
                    self.host[place] = self.memory[cells]
        self.swapped = True

    @rule(sequence=opened)
    def commit(self, sequence: int) -> None:
        scratch, before = self.scratch[sequence], self.pool.committed(sequence)
        keep = [index for index, (token, _) in enumerate(scratch) if token is not None]
        said = [token for token, _ in scratch if token is not None]
        moves = self.pool.commit(sequence, keep, said)
        read = [self.memory[slot] for slot in moves.sources]
        for slot, value in zip(moves.targets, read, strict=True):
            self.memory[slot] = value
        assert len(moves.sources) <= len(keep)
        if keep == list(range(len(keep))):
            assert moves == Moves((), ())
        assert self.pool.committed(sequence) == before + len(keep)
        self.committed[sequence] += said
        self.said.append([*self.committed[sequence]])
        self.scratch[sequence] = []

    @rule(sequence=opened, tokens=st.lists(TOKENS, min_size=4, max_size=12))
    def say(self, sequence: int, tokens: list[int]) -> None:
        """So that the pool runs full of what was said."""
        self.reserve(sequence, [*tokens])
        self.commit(sequence)

    @rule(sequence=opened)
    def rollback(self, sequence: int) -> None:
        self.pool.rollback(sequence)
        self.scratch[sequence] = []

    @rule()
    def forget_unheld(self) -> None:
        used = self.pool.pages_in_use
        self.pool.forget_unheld()
        assert self.pool.pages_in_use == used

    @rule()
    def end_step(self) -> None:
        self.pool.end_step()

    @invariant()
    def integrity(self) -> None:
        self.pool.check_integrity()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if not self.swapped:  # nobody reads before that
            return
        for sequence, own in self.committed.items():
            extents = self.pool.extents(sequence)
            cells = [self.memory[slot] for extent in extents for slot in range(*extent)]
            histories = [tuple(own[: stop + 1]) for stop in range(len(own))]
            assert cells == histories + [cell for _, cell in self.scratch[sequence]]
            assert self.pool.committed(sequence) == len(own)
            assert all(a[1] != b[0] for a, b in pairwise(extents))

    @invariant()
    def the_totals_are_right(self) -> None:
        pool = self.pool
        assert pool.pages_in_use + pool.pages_free == PAGES
        written = {
            slot
            for sequence, own in self.committed.items()
            for slot in self.slots(sequence)[: len(own)]
        }
        assert pool.tokens_stored == len(written)
        held = {slot // PAGE_SIZE for s in self.committed for slot in self.slots(s)}
        assert pool.pages_in_use == len(held)
        assert pool.sequences() == tuple(self.committed)

    def slots(self, sequence: int) -> list[int]:
        return [slot for extent in self.pool.extents(sequence) for slot in range(*extent)]

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


class HostMachine(PoolMachine):
    """With a host that cannot hold all that is put there either."""

    HOST_PAGES = 3

    @invariant()
    def the_host_is_no_larger(self) -> None:
        assert self.pool.host_pages_in_use <= self.HOST_PAGES


HostMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
test_pool_machine_with_a_host = HostMachine.TestCase


@pytest.mark.parametrize("machine", [PoolMachine, HostMachine])
def test_a_long_life_keeps_the_pool_in_order(machine: type[PoolMachine]) -> None:
    """Hypothesis has small cases; here the pool is full nearly always, and evicts and recalls."""
    own, draw = machine(), Random(0)
    recalled = 0
    for _ in range(5000):
        everyone = own.pool.sequences()
        before = own.pool.host_pages_in_use
        if len(everyone) < 2 and draw.random() < 0.5:
            own.open([], True)
        elif len(everyone) < 2:
            own.open_with_what_was_said(draw.randrange(10), True)
            recalled += own.pool.host_pages_in_use < before
        elif draw.random() < 0.3:
            own.close(draw.choice(everyone))
        else:
            sequence = draw.choice(everyone)
            kept = [draw.choice((None, 0, 0, 1, 1)) for _ in range(draw.randrange(1, 9))]
            own.reserve(sequence, kept)
            own.commit(sequence)
        own.pool.end_step()
        own.integrity()
        own.every_sequence_reads_its_own_tokens()
        own.the_totals_are_right()
    assert own.pool.evictions > 500
    assert (recalled > 50) == (machine.HOST_PAGES > 0)
    own.teardown()


def pool_with(*tokens: int, pages: int = 8, page_size: int = 4, host_pages: int = 0) -> KVPool:
    """Sequences 0, 1, ... with that many committed tokens each, all of them their number."""
    pool = KVPool(pages, page_size, host_pages)
    for sequence, count in enumerate(tokens):
        pool.open(sequence)
        pool.reserve(sequence, count)
        pool.commit(sequence, range(count), [sequence] * count)
    return pool


def test_a_tree_step_by_hand() -> None:
    pool = pool_with(6)
    assert pool.reserve(0, 5) == (6, 7, 8, 9, 10)
    assert pool.extents(0) == ((0, 11),)
    assert pool.commit(0, (0, 2, 4), (7, 8, 9)) == Moves(sources=(8, 10), targets=(7, 8))
    assert pool.committed(0) == 9
    assert pool.extents(0) == ((0, 9),)
    assert pool.pages_in_use == 3


def test_committing_nothing_gives_the_scratch_pages_back() -> None:
    pool = pool_with(4)
    pool.reserve(0, 9)
    assert pool.pages_in_use == 4
    assert pool.commit(0, (), ()) == Moves((), ())
    assert pool.pages_in_use == 1
    pool.reserve(0, 9)
    pool.rollback(0)
    assert (pool.pages_in_use, pool.committed(0)) == (1, 4)


def test_sequences_grow_in_place_beside_each_other() -> None:
    pool = pool_with(4, 4)
    assert pool.extents(1) == ((16, 20),)
    assert pool.reserve(0, 12) == (*range(4, 16),)
    assert pool.reserve(1, 12) == (*range(20, 32),)


def test_a_sequence_around_another_has_two_extents() -> None:
    pool = pool_with(12, 4)
    pool.reserve(0, 8)
    assert pool.extents(1) == ((16, 20),)
    assert pool.extents(0) == ((0, 16), (24, 28))


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
    with pytest.raises(OutOfPages, match="5 slots need 2 pages, 1 are free"):
        pool.reserve(0, 5)
    assert pool.reserve(0, 4) == (8, 9, 10, 11)


def test_a_beginning_is_shared_while_its_writer_goes_on() -> None:
    pool = pool_with(10)
    assert pool.open(1, [0] * 10) == 8
    assert pool.extents(1) == ((0, 8),)
    assert (pool.pages_in_use, pool.tokens_stored) == (3, 10)
    slots = pool.reserve(1, 2)
    assert pool.extents(0) == ((0, 10),) and min(slots) >= 12
    pool.close(0)
    assert pool.extents(1)[0] == (0, 8)
    pool.check_integrity()


def test_the_last_token_is_never_shared() -> None:
    pool = pool_with(8)
    assert pool.open(1, [0] * 8) == 4
    assert pool.open(2, [0] * 9) == 8
    assert pool.open(3, [0] * 4) == 0


def test_a_beginning_is_kept_until_its_place_is_needed() -> None:
    pool = pool_with(8, 8, pages=5)
    pool.close(0)
    pool.close(1)
    assert (pool.pages_in_use, pool.pages_free, pool.tokens_stored) == (0, 5, 0)
    assert pool.open(2, [0] * 9) == 8
    pool.reserve(2, 8)  # of the empty page and one kept: the end of the longest unused
    assert pool.evictions == 1
    assert pool.open(3, [1] * 9) == 4
    with pytest.raises(OutOfPages, match="1 pages, 0 are free"):
        pool.reserve(3, 1)
    pool.check_integrity()


def test_the_longest_unused_goes_first() -> None:
    pool = pool_with(4, 4, 4, pages=4)
    for sequence in (1, 0, 2):
        pool.close(sequence)
    assert pool.open(3, [1] * 5) == 4  # used again
    pool.close(3)
    pool.open(4)
    pool.reserve(4, 8)
    known = [pool.open(9 + token, [token] * 5) for token in range(3)]
    assert known == [0, 4, 4]


def test_two_who_write_the_same_share_it_afterwards() -> None:
    pool = KVPool(8, 4)
    for sequence in (0, 1):
        pool.open(sequence, [5] * 6)
        pool.reserve(sequence, 6)
    pool.commit(0, range(6), [5] * 6)
    assert pool.pages_in_use == 4
    pool.commit(1, range(6), [5] * 6)
    assert pool.pages_in_use == 3
    assert pool.extents(1)[0] == (0, 4)
    pool.check_integrity()


def test_what_nobody_holds_can_be_forgotten() -> None:
    pool = pool_with(8, 8)
    pool.close(0)
    pool.forget_unheld()
    assert pool.open(2, [0] * 9) == 0
    assert pool.open(3, [1] * 9) == 8
    pool.check_integrity()


def test_what_was_evicted_comes_back_from_the_host() -> None:
    pool = pool_with(8, 8, pages=4, host_pages=2)
    pool.close(0)
    pool.open(2)
    pool.reserve(2, 8)
    assert pool.swaps() == (Swap((1, 0), (1, 0), back=False),)
    assert pool.host_pages_in_use == 2
    pool.close(2)
    assert pool.open(3, [0] * 9) == 0
    assert pool.recall(3, [0] * 9) == 8
    ((first, last),) = pool.extents(3)
    assert last - first == 8
    pages = (first // 4, first // 4 + 1)
    assert pool.swaps() == (Swap(pages, (0, 1), back=True),)
    assert pool.host_pages_in_use == 0
    pool.check_integrity()


def test_a_recall_takes_no_more_than_there_is_room_for() -> None:
    pool = pool_with(12, pages=4, host_pages=4)
    pool.close(0)
    pool.open(1)
    pool.reserve(1, 12)
    pool.open(2, [0] * 13)
    assert pool.recall(2, [0] * 13) == 4
    assert pool.pages_free == 0
    pool.check_integrity()


def test_a_full_host_forgets_what_was_there_longest() -> None:
    pool = pool_with(8, 8, pages=4, host_pages=2)
    pool.close(0)
    pool.close(1)
    pool.open(2)
    pool.reserve(2, 16)
    assert pool.swaps() == (Swap((3, 2), (1, 0), back=False),)  # never copied in vain
    pool.close(2)
    assert pool.open(3, [0] * 9) == pool.recall(3, [0] * 9) == 0
    assert pool.open(4, [1] * 9) == 0
    assert pool.recall(4, [1] * 9) == 8
    pool.check_integrity()


def test_who_reads_again_what_is_on_the_host_takes_it_from_there() -> None:
    pool = pool_with(8, 4, pages=3, host_pages=2)
    pool.close(0)
    pool.reserve(1, 8)
    pool.rollback(1)
    pool.open(2)
    pool.reserve(2, 4)
    pool.commit(2, range(4), [0] * 4)
    assert pool.host_pages_in_use == 1
    pool.check_integrity()


def test_forgetting_forgets_the_host_too() -> None:
    pool = pool_with(8, pages=2, host_pages=2)
    pool.close(0)
    pool.open(1)
    pool.reserve(1, 8)
    pool.forget_unheld()
    assert pool.host_pages_in_use == 0
    pool.close(1)
    assert pool.open(2, [0] * 9) == pool.recall(2, [0] * 9) == 0


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
        (lambda pool: pool.recall(0, [0]), "not just opened"),
        (lambda pool: pool.reserve(1, -1), "cannot reserve -1 slots"),
        (lambda pool: pool.commit(0, (1, 0), (0, 0)), "are not ascending indices into 3 scratch"),
        (lambda pool: pool.commit(0, (1, 1), (0, 0)), "are not ascending indices into 3 scratch"),
        (lambda pool: pool.commit(0, (2, 3), (0, 0)), "are not ascending indices into 3 scratch"),
        (lambda pool: pool.commit(0, (-1, 0), (0, 0)), "are not ascending indices into 3 scratch"),
        (lambda pool: pool.commit(0, (0, 1), (0,)), "1 tokens in 2 slots"),
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


def share_first_page(pool: KVPool) -> None:
    """Sequence 1 holds page 0 of sequence 0 instead of its own, whatever is in it."""
    own = pool._sequences[1]
    pool._drop([own.pages[0]])
    own.pages[0] = pool._share(0)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda pool: pool._sequences.pop(1), r"page 2 has 1 references but 0 holders"),
        (lambda pool: pool._references.__setitem__(0, 2), r"page 0 has 2 references but 1 holders"),
        (lambda pool: pool._free.give([0]), r"the free pages \[0, 3, 4\] and kept pages \[\]"),
        (lambda pool: pool._free.give([3]), r"the free pages \[3, 3, 4\] and kept pages \[\]"),
        (lambda pool: pool._free.take(1), r"the free pages \[\d\] and kept pages \[\] are not"),
        (
            lambda pool: pool._unused.update({0: None}),
            r"and kept pages \[0\] are not those",
        ),
        (lambda pool: pool._sequences[1].pages.append(9), r"page 9 lies beyond the pool's 5 pages"),
        (lambda pool: pool._sequences[1].pages.append(3), r"sequence 1 holds 2 pages for 1 pages"),
        (lambda pool: pool._sequences[0].pages.append(0), r"sequence 0 holds a page twice"),
        (
            lambda pool: pool._sequences[0].tokens.__setitem__(0, 5),
            r"1 pages of sequence 0 are",
        ),
        (lambda pool: pool._index.remove(0), r"the first 1 pages of sequence 0 are not found"),
        (
            lambda pool: pool._index._behind.update({0: {(7, 7, 7, 7): 1}}),
            r"the index has pages .* behind others, but they are",
        ),
        (lambda pool: pool._host_free.append(5), r"the host has \[\], and \[5\] of its pages"),
        (lambda pool: pool._on_host.update({5: None}), r"pages \[\] of the index are on the host"),
        (share_first_page, r"sequence 1 can write page 0, which others may read"),
    ],
)
def test_integrity_names_the_damage(damage: Callable[[KVPool], object], finding: str) -> None:
    pool = pool_with(6, 3, pages=5)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=finding):
        pool.check_integrity()


def test_the_book_does_not_import_torch() -> None:
    program = "import sys, cache.kv_pool; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
