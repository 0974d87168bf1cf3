"""Whole answers without a server."""

from collections.abc import Iterator

import pytest

from tests.table_target import TableTarget, plain_tokens
from workers.completion import Completion, run_requests
from workers.engine.sampling import SamplingParams
from workers.request import Delta, GenerationRequest, SpeculationStats
from workers.scheduler import Limits
from workers.verifier import EngineError, Verifier, build_verifier


def verifier(max_running: int = 3) -> Verifier:
    limits = Limits(max_running=max_running, max_queued=0)
    return build_verifier(TableTarget(), {}, limits)  # type: ignore[arg-type]


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"{n}", (1, n % 5), 3 + n, SamplingParams(seed=n)) for n in range(count)
    ]


@pytest.mark.parametrize("together", [1, 3])
def test_answers_come_in_the_order_of_their_requests(together: int) -> None:
    asked = requests(7)
    run = run_requests(verifier(), asked, together=together)
    assert [completion.request for completion in run.completions] == asked
    for completion in run.completions:
        assert completion.tokens == plain_tokens(completion.request)
        assert completion.finish_reason
        assert completion.stats is not None
        assert completion.stats.emitted == len(completion.tokens)
    assert run.tokens == run.total("bonus") == sum(len(plain_tokens(r)) for r in asked)
    assert run.tokens_per_second == pytest.approx(run.tokens / run.seconds)


def test_requests_are_taken_only_when_there_is_a_place_for_them() -> None:
    own, taken = verifier(max_running=2), []

    def endless() -> Iterator[GenerationRequest]:
        for request in requests(6):
            gauges = own.gauges()
            assert gauges.running + gauges.waiting < 2
            taken.append(request.id)
            yield request

    done: list[str] = []
    run_requests(own, endless(), together=2, on_done=lambda c: done.append(c.request.id))
    assert taken == [f"{n}" for n in range(6)]
    assert sorted(done) == taken


def test_everybody_hears_of_deltas_and_of_ends() -> None:
    text: list[str] = []
    ends: list[Completion] = []
    run = run_requests(
        verifier(), requests(1), on_delta=lambda d: text.append(d.text), on_done=ends.append
    )
    assert "".join(text) == run.completions[0].text
    assert ends == run.completions


def test_a_request_that_cannot_be_served_is_refused() -> None:
    bad = GenerationRequest("r", (1,), 1000, SamplingParams(seed=0))
    with pytest.raises(ValueError, match="^max_tokens: "):
        run_requests(verifier(), [bad])


def test_an_error_is_raised_not_taken_for_text() -> None:
    completion = Completion(requests(1)[0])
    completion.take(Delta("a", (1,), SpeculationStats(None)))
    with pytest.raises(EngineError):
        completion.take(EngineError("broken"))
    assert (completion.text, completion.tokens, completion.finish_reason) == ("a", [1], None)
