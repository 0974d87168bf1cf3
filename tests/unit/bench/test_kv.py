"""What the bench of KV memory counts, counted by hand on small traces."""

from collections.abc import Sequence

import pytest

from bench.kv import (
    HOSTED,
    LIMITS,
    MAX_LENGTH,
    OURS,
    PAGED,
    ROWS,
    WAYS,
    Ledger,
    Replay,
    Settings,
    describe,
    measure,
    pools,
    table,
)
from bench.kv_trace import Arrival, arrivals
from cache.kv_pool import KVPool
from workers import scheduler as scheduling
from workers.scheduler import Limits, Scheduler

PAGE = 4
SMALL = Settings(requests=60, rate=1.0, kv_tokens=4096, page_size=16, max_tokens=128, seed=1)


def arrival(
    step: int, prompt: Sequence[int], answer: int, max_tokens: int = 0, leaves: int | None = None
) -> Arrival:
    """No guess is ever right: an answer takes as many steps as it has tokens."""
    said = tuple(range(900, 900 + answer))
    return Arrival(step, tuple(prompt), said, max_tokens or answer, ((),) * answer, leaves)


def settings(kv_tokens: int) -> Settings:
    return Settings(1, 1.0, kv_tokens, PAGE, 8, seed=0)


def replay(trace: Sequence[Arrival], way: str, kv_tokens: int = 400) -> Replay:
    return Replay(trace, pools(settings(kv_tokens), trace)[way])


def ledger(trace: Sequence[Arrival], way: str, kv_tokens: int = 400) -> Ledger:
    return replay(trace, way, kv_tokens).run()


def test_waste_of_room_for_the_whole_length() -> None:
    """Prompt 4, answer 2, and a proposal of 8 nodes: 14 slots, of which 4 are used after the first
    of two steps. In the first pass 4 tokens are written and 2 guessed, in the second 1 and 0.
    """
    found = ledger([arrival(0, range(4), 2)], MAX_LENGTH)
    assert [(s.held, s.stored) for s in found.samples] == [(14, 4), (0, 0)]
    assert [(s.held_in_pass, s.stored_in_pass) for s in found.samples] == [(14, 0), (14, 4)]
    assert [(s.written, s.trees) for s in found.samples] == [(4, 2), (1, 0)]
    report = found.report()
    assert report["waste"] == pytest.approx({"mean": 10 / 14, "p95": 10 / 14, "max": 10 / 14})
    in_passes = report["waste_in_passes"]
    assert in_passes["mean"] == pytest.approx((14 + 10) / 2 / 14)
    assert in_passes["written"] == pytest.approx((4 + 1) / 2 / 14)
    assert in_passes["trees"] == pytest.approx(2 / 2 / 14)
    assert report["held"] == pytest.approx(14 / 400)


@pytest.mark.parametrize("way", [PAGED, OURS])
def test_waste_of_pages(way: str) -> None:
    """6 slots in the first pass are 2 pages of 4. Ours gives the second one back."""
    found = ledger([arrival(0, range(4), 2)], way)
    after = 8 if way == PAGED else 4
    assert [(s.held, s.stored) for s in found.samples] == [(after, 4), (0, 0)]
    assert [(s.held_in_pass, s.stored_in_pass) for s in found.samples] == [(8, 0), (8, 4)]


def test_the_tree_is_no_deeper_than_the_answer_may_grow() -> None:
    found = ledger([arrival(0, range(4), 7)], OURS)
    assert [s.trees for s in found.samples] == [8, 8, 8, 6, 4, 2, 0]


def test_right_guesses_are_kept() -> None:
    """5 tokens in 2 steps: 3 of 8 nodes are right in the first, 0 of 0 in the second."""
    trace = [Arrival(0, (1, 2, 3, 4), (5, 6, 7, 8, 9), 5, ((1, 2, 5), ()))]
    for way in WAYS:
        assert [s.stored for s in ledger(trace, way).samples] == [4 + 3, 0]


def test_prefix_hits() -> None:
    """The second prompt finds 2 full pages of the first one's 10 tokens; the third one finds 3 of
    its own 12, but the last token of a prompt is always read, and so is its page: 2.
    """
    trace = [
        arrival(0, range(10), 3),
        arrival(1, [*range(9), 77, 78, 79, 80, 81], 3),
        arrival(9, [*range(10), 900, 901], 3),
    ]
    ours = ledger(trace, OURS)
    assert (ours.found, ours.prompts) == (8 + 8, 10 + 14 + 12)
    assert ours.report()["prefix_hits"] == pytest.approx(16 / 36)
    for way in (MAX_LENGTH, PAGED):
        assert ledger(trace, way).report()["prefix_hits"] == 0


def test_a_shared_page_is_held_once() -> None:
    trace = [arrival(0, range(8), 4), arrival(1, [*range(8), 50], 4)]
    second = [ledger(trace, way).samples[1] for way in (PAGED, OURS)]
    assert [sample.stored for sample in second] == [9 + 9, 9 + 1]


@pytest.mark.parametrize("way", WAYS)
def test_clients_that_leave_take_everything_along(way: str) -> None:
    """The first leaves while it runs, and the second, for which there is no room, from the line."""
    trace = [
        arrival(0, range(40), 40, leaves=5),
        arrival(1, range(100, 140), 40, leaves=2),
        arrival(2, range(200, 204), 2),
    ]
    own = replay(trace, way, kv_tokens=100)
    found = own.run()
    assert (found.finished, found.cancelled, found.refused) == (1, 2, 0)
    assert own._pool.pages_in_use == 0
    assert [s.running for s in found.samples] == [1, 1, 1, 1, 1, 1, 1]
    assert found.waits == [0, 3], "who left the line never waited to the end"


@pytest.mark.parametrize("way", [PAGED, OURS])
def test_a_small_pool_sends_the_youngest_back_and_everybody_finishes(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_AHEAD", 0)
    trace = [arrival(0, range(100 * n, 100 * n + 8), 20) for n in range(4)]
    found = ledger(trace, way, kv_tokens=80)
    assert found.preemptions > 0
    assert (found.finished, found.cancelled, found.refused) == (4, 0, 0)
    assert len(found.waits) == 4, "coming back is no second arrival"
    assert found.prompts == 32
    again = ledger(trace, way, kv_tokens=400)
    assert (again.preemptions, again.read_again) == (0, 0)
    assert found.read_again > 0


def test_a_host_gives_back_what_the_pool_had_no_room_for() -> None:
    """The second needs nearly the whole pool; the third begins as the first did."""
    beginning = range(40)
    trace = [
        arrival(0, beginning, 2),
        arrival(4, range(100, 180), 2),
        arrival(30, [*beginning, 7, 7], 2),
    ]
    found, hosted = (ledger(trace, way, kv_tokens=92) for way in (OURS, HOSTED))
    assert found.recalls == 0
    assert found.found < hosted.found == len(beginning)
    assert hosted.recalls * PAGE == hosted.found - found.found


def test_room_for_the_whole_length_sends_nobody_back() -> None:
    trace = [arrival(0, range(100 * n, 100 * n + 8), 20) for n in range(4)]
    found = ledger(trace, MAX_LENGTH, kv_tokens=80)
    assert (found.finished, found.preemptions) == (4, 0)
    assert max(s.running for s in found.samples) == 2, "36 slots each"


@pytest.mark.parametrize("way", WAYS)
def test_what_can_never_be_served_is_refused(way: str) -> None:
    found = ledger([arrival(0, range(80), 13), arrival(0, range(80), 12)], way, kv_tokens=100)
    assert (found.refused, found.finished) == (1, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_tokens", [1600, 4096])
def test_books_balance_at_all_times(way: str, kv_tokens: int) -> None:
    trace = arrivals(SMALL.requests, SMALL.rate, SMALL.max_tokens, SMALL.seed)
    own = replay(trace, way, kv_tokens)
    while own.step():
        own._pool.check_integrity()
        assert own._pool.tokens_stored <= own._pool.pages_in_use * own._pool.page_size
    found = own.run()  # nothing is left to do but the last check
    assert own._pool.pages_in_use == own._pool.tokens_stored == 0
    assert found.finished + found.cancelled + found.refused == len(trace)
    assert found.cancelled > 0
    for s in found.samples:
        assert s.stored_in_pass + s.written + s.trees <= s.held_in_pass <= kv_tokens
        assert s.stored <= s.held <= s.held_in_pass


def test_what_is_never_given_back_is_noticed() -> None:
    own = replay([arrival(0, range(4), 2)], OURS)
    own._pool.open(99)
    own._pool.reserve(99, 1)
    with pytest.raises(AssertionError, match="1 pages are never given back"):
        own.run()


def test_ours_is_what_serves() -> None:
    own = replay([arrival(0, range(4), 2)], OURS)
    assert type(own._pool) is KVPool
    assert type(own.scheduler) is Scheduler


def test_all_ways_have_the_same_memory() -> None:
    found = pools(settings(1001), [])
    assert {pool.pages * pool.page_size for pool in found.values()} == {1004}
    assert tuple(found) == WAYS


def test_idle_time_is_no_step() -> None:
    found = ledger([arrival(3, range(4), 2), arrival(10**12, range(4), 1)], OURS)
    assert [s.step for s in found.samples] == [3, 4, 10**12]


def test_prompts_are_read_in_chunks() -> None:
    trace = [arrival(0, range(10), 1)]
    own = Replay(trace, pools(settings(400), trace)[OURS], Limits(prefill_tokens=4))
    assert [s.written for s in own.run().samples] == [4, 4, 2]
    assert LIMITS.prefill_tokens > 10


def test_measuring_is_repeatable_and_ours_wastes_least() -> None:
    ended: list[None] = []
    first = measure(SMALL, lambda: ended.append(None))
    assert len(ended) == len(WAYS) * SMALL.requests
    second = measure(SMALL)
    for summary in (first, second):
        for report in summary["ways"].values():
            assert report.pop("microseconds_per_step") >= 0
    assert first == second
    wastes = [first["ways"][way]["waste"]["mean"] for way in (OURS, PAGED, MAX_LENGTH)]
    assert wastes == sorted(wastes)
    assert first["ways"][OURS]["prefix_hits"] > 0.2


def test_the_course_over_time_is_thinned_to_means() -> None:
    found = ledger([arrival(0, range(4), 1200)], OURS, kv_tokens=4000)
    course = found.report()["over_time"]
    assert course["step"][:3] == [0, 3, 6]
    assert {len(values) for values in course.values()} == {400}
    assert course["waste"][0] == pytest.approx((0 + 3 / 8 + 2 / 8) / 3, abs=1e-4)
    assert set(course["running"]) == {1.0}


def test_the_trace_is_described() -> None:
    trace = [arrival(0, range(4), 2, max_tokens=9), arrival(0, range(8), 4, leaves=3)]
    assert describe(trace) == {
        "requests": 2,
        "prompt_tokens": 6,
        "answer_tokens": 3,
        "max_tokens": 6.5,
        "tokens_per_pass": 1,
        "leaving": 1,
    }


def test_the_table_has_a_line_for_each_number() -> None:
    lines = table(measure(SMALL)).splitlines()
    assert lines[0].split() == [word for way in WAYS for word in way.split()]
    assert len(lines) == 1 + len(ROWS)
    [finished] = [line for line in lines if line.startswith("finished ")]
    assert len(finished.split()) == 1 + len(WAYS)


@pytest.mark.parametrize("name", ["kv_tokens", "page_size"])
def test_pools_of_no_size_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: 0 is not 1 or more"):
        Settings(
            **{"kv_tokens": 8, "page_size": 4, name: 0}, requests=1, rate=1, max_tokens=1, seed=0
        )


def test_pools_in_which_nobody_fits_are_refused() -> None:
    with pytest.raises(ValueError, match="^kv_tokens: no request of the trace fits into 8; give"):
        measure(Settings(2, 1.0, 8, PAGE, 8, seed=0))
