"""Admission that never promises a page twice, and turns for everybody."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.kv_pool import KVPool
from tests.table_target import EOS, Letters
from workers import scheduler as scheduling
from workers.answer import Answer
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest
from workers.scheduler import Limits, LiveSequence, Scheduler, Turn

PAGE = 4


def live(number: int, prompt: int, max_tokens: int, budget: int = 0) -> LiveSequence:
    draft = "d" if budget else None
    request = GenerationRequest(
        f"{number}",
        (number,) * prompt,
        max_tokens,
        SamplingParams(seed=0),
        draft=draft,
        budget=budget,
    )
    return LiveSequence(
        number, request, Answer(request, Letters(), frozenset({EOS})), lambda delta: None
    )


def scheduler(pages: int = 8, **limits: int) -> Scheduler:
    return Scheduler(KVPool(pages, PAGE), Limits(**limits))


def shares(turns: Sequence[Turn]) -> list[tuple[int, int, int, bool]]:
    return [(turn.sequence.number, turn.start, turn.stop, turn.decodes) for turn in turns]


def run(own: Scheduler, turn: Turn, drafted: int, accepted: int) -> None:
    """What the loop does with a turn: scratch for its tokens and a chain of guesses."""
    sequence, size = turn.sequence, turn.stop - turn.start
    own._pool.reserve(sequence.number, size + (drafted if turn.decodes else 0))
    if turn.decodes:
        sequence.extend((sequence.number,) * (accepted + 1))
    kept = sequence.tokens[turn.start : turn.start + size + accepted]
    own._pool.commit(sequence.number, range(len(kept)), kept)


def test_first_come_first_served_and_nobody_overtakes() -> None:
    own = scheduler(pages=8)
    own.waiting.extend([live(0, 8, 8), live(1, 16, 8), live(2, 1, 1)])  # 4, 6 and 1 pages
    assert [sequence.number for sequence in own.admit()] == [0]
    assert own.admit() == []
    own.leave(own.running[0])
    assert [sequence.number for sequence in own.admit()] == [1, 2]


def test_no_more_run_than_may() -> None:
    own = scheduler(pages=100, max_running=2)
    own.waiting.extend(live(n, 1, 1) for n in range(3))
    assert len(own.admit()) == 2
    assert len(own.waiting) == 1


def test_a_place_holds_prompt_answer_and_one_proposal() -> None:
    assert live(0, 5, 7, budget=3).most_slots == 15
    assert live(0, 5, 7).draft is None
    own = scheduler(pages=3)
    own.check(live(0, 5, 7))
    with pytest.raises(ValueError, match=r"^max_tokens: .* need 15 KV slots, but the pool has 12"):
        own.check(live(0, 5, 7, budget=3))


def test_prompts_are_read_in_chunks_and_decoding_does_not_wait_for_them() -> None:
    own = scheduler(pages=100, prefill_tokens=5)
    own.waiting.extend([live(0, 1, 9), live(1, 7, 9), live(2, 6, 9)])
    own.admit()
    turns = own.turns()
    assert shares(turns) == [(0, 0, 1, True), (1, 0, 5, False)]
    for turn in turns:
        run(own, turn, 0, 0)
    turns = own.turns()
    assert shares(turns) == [(0, 1, 2, True), (1, 5, 7, True), (2, 0, 3, False)]
    for turn in turns:
        run(own, turn, 0, 0)
    assert shares(own.turns()) == [(0, 2, 3, True), (1, 7, 8, True), (2, 3, 6, True)]


def test_leaving_gives_everything_back_from_the_line_too() -> None:
    own = scheduler(pages=8)
    first, second = live(0, 20, 8), live(1, 20, 8)
    own.waiting.extend([first, second])
    own.admit()
    run(own, own.turns()[0], 0, 0)
    assert own._pool.pages_in_use == 5
    own.leave(second)
    own.leave(first)
    assert (own._pool.pages_in_use, own._pool.sequences()) == (0, ())
    assert (len(own.waiting), len(own.running)) == (0, 0)


@pytest.mark.parametrize("name", ["max_running", "prefill_tokens"])
def test_limits_that_would_stop_everything_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^limits.{name}: 0 is not 1 or more"):
        Limits(**{name: 0})


SHAPES = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=8
)


def test_the_youngest_makes_room_and_comes_back_first() -> None:
    own = scheduler(pages=40)
    everybody = [live(0, 4, 140), live(1, 4, 100), live(2, 4, 2)]
    own.waiting.extend(everybody)
    assert own.admit() == everybody
    preempted: list[LiveSequence] = []
    while not preempted:
        for turn in own.turns()[:2]:
            run(own, turn, 0, 0)
        preempted = own.preempt()
    assert preempted == everybody[2:]  # 40 pages: the others have 19 or 20 each
    while own.preempt() != [everybody[1]]:
        for turn in own.turns():
            run(own, turn, 0, 0)
    assert list(own.waiting) == everybody[1:]
    said = len(everybody[1].tokens)
    assert own.admit() == []  # there is no room yet for some tokens more of both
    own.leave(everybody[0])
    assert own.admit() == everybody[1:]
    assert own._pool.committed(1) == (said - 1) // PAGE * PAGE, "it is all there still"


@settings(max_examples=50)
@given(SHAPES, st.integers(5, 30), st.integers(1, 4), st.integers(1, 9), st.data())
def test_once_admitted_nobody_is_ever_out_of_pages(
    shapes: list[tuple[int, int, int]],
    pages: int,
    max_running: int,
    prefill_tokens: int,
    data: st.DataObject,
) -> None:
    """Greedy drafts, any acceptance; reserve() raises where a page was promised twice. Whoever has
    waited longest runs, so that everybody's turn comes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "_AHEAD", data.draw(st.integers(0, 4), label="ahead"))
        own = scheduler(pages, max_running=max_running, prefill_tokens=prefill_tokens)
        serve(own, [live(number, *shape) for number, shape in enumerate(shapes)], data)


def serve(own: Scheduler, everybody: Sequence[LiveSequence], data: st.DataObject) -> None:
    fitting = [sequence for sequence in everybody if fits(own.check, sequence)]
    own.waiting.extend(fitting)
    left_over = [sequence.number for sequence in fitting]
    while own.running or own.waiting:
        own.preempt()
        own.admit()
        assert 1 <= len(own.running) <= own._limits.max_running
        assert [*own.running, *(sequence.number for sequence in own.waiting)] == left_over
        turns = own.turns()
        assert turns, "somebody always moves"
        read = sum(turn.stop - turn.start for turn in turns if turn.stop - turn.start > 1)
        assert read <= own._limits.prefill_tokens
        decoding = {n for n, s in own.running.items() if left(own, s) == 1}
        assert decoding <= {turn.sequence.number for turn in turns if turn.decodes}
        for turn in turns:
            sequence, decodes, drafted = turn.sequence, turn.decodes, 0
            if decodes:
                drafted = min(sequence.request.budget, room_of(sequence) - 1)
            run(own, turn, sequence.request.budget, data.draw(st.integers(0, drafted)))
            if decodes and room_of(sequence) == 0:
                own.leave(sequence)
                left_over.remove(sequence.number)
        own._pool.end_step()
        own._pool.check_integrity()
    assert not left_over
    assert own._pool.pages_in_use == 0


def fits(check: Callable[[LiveSequence], None], sequence: LiveSequence) -> bool:
    try:
        check(sequence)
    except ValueError:
        return False
    return True


def room_of(sequence: LiveSequence) -> int:
    return len(sequence.request.prompt) + sequence.request.max_tokens - len(sequence.tokens)


def left(own: Scheduler, sequence: LiveSequence) -> int:
    return len(sequence.tokens) - own._pool.committed(sequence.number)
