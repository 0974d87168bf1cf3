"""Free pages against a plain set of them."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.buddy import BuddyPages

PAGES = 37  # no power of two


class BuddyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.buddy = BuddyPages(PAGES)
        self.held: list[int] = []

    @rule(count=st.integers(0, PAGES), after=st.none() | st.integers(0, PAGES - 1))
    def take(self, count: int, after: int | None) -> None:
        count = min(count, len(self.buddy))
        free = set(self.buddy.free())
        taken = self.buddy.take(count, after)
        assert len(set(taken)) == count and set(taken) <= free
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.held), min_size=1))
        self.held = [page for page in self.held if page not in chosen]
        self.buddy.give(sorted(chosen))

    @rule()
    def coalesce(self) -> None:
        self.buddy.coalesce()

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        free = list(self.buddy.free())
        assert len(free) == len(self.buddy)
        assert sorted([*free, *self.held]) == list(range(PAGES))


TestBuddyMachine = BuddyMachine.TestCase


@given(st.integers(1, 300), st.data())
def test_what_is_given_back_is_one_run_again(pages: int, data: st.DataObject) -> None:
    buddy = BuddyPages(pages)
    counts = data.draw(st.lists(st.integers(1, pages), max_size=20))
    parts = [buddy.take(count) for count in counts if count <= len(buddy)]
    for part in data.draw(st.permutations(parts)):
        buddy.give(part)
    buddy.coalesce()
    largest = 1 << pages.bit_length() - 1
    assert buddy.take(largest) == list(range(largest))


def test_a_run_grows_in_place_beside_others() -> None:
    buddy = BuddyPages(64)
    first, second = buddy.take(3), buddy.take(3)
    for run in (first, second):
        for _ in range(20):
            run += buddy.take(1, after=run[-1])
        assert run == list(range(run[0], run[0] + 23))


def test_pages_behind_come_first_and_the_rest_from_elsewhere() -> None:
    buddy = BuddyPages(16)
    everything = buddy.take(16)
    buddy.give([3, 4, 9])
    buddy.coalesce()
    assert everything == list(range(16))
    assert buddy.take(3, after=2) == [3, 4, 9]
