"""What is counted, caught at the counters themselves."""

from typing import Any

import pytest

from deployments import metrics
from deployments.answer import Pace
from workers.request import SpeculationStats
from workers.verifier import Gauges


class Recorder:
    """Stands for Ray's counters, gauges and histograms, and keeps what they are told."""

    seen: list[tuple[Any, ...]] = []

    def __init__(self, name: str, **_options: Any) -> None:
        self.name = name

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        self.seen.append((self.name, value, tags or {}))

    def set(self, value: float) -> None:
        self.seen.append((self.name, value))

    def observe(self, value: float, tags: dict[str, str]) -> None:
        self.seen.append((self.name, value, tags))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(Recorder, "seen", [])
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Recorder)
    return Recorder.seen


def test_a_total_rises_by_the_difference(seen: list[Any]) -> None:
    total = metrics.RisingTotal("t", "a total", "reason")
    for value in (0, 3, 3, 5):
        total.set(value, "x")
    total.set(2, "y")
    assert seen == [("t", 3, {"reason": "x"}), ("t", 2, {"reason": "x"}), ("t", 2, {"reason": "y"})]


def test_a_total_that_fell_began_anew(seen: list[Any]) -> None:
    total = metrics.RisingTotal("t", "a total")
    total.set(5)
    total.set(2)
    assert seen == [("t", 5, {}), ("t", 2, {})]


def test_an_answer_is_counted_by_draft_and_its_parts_add_up(seen: list[Any]) -> None:
    stats = SpeculationStats("code", steps=4, drafted=9, tested=6, accepted=5, recovered=1, bonus=3)
    metrics.VerifierMetrics().finished(stats)
    counts = {name: value for name, value, tags in seen if tags == {"draft": "code"}}
    assert counts["outrider_emitted_tokens_total"] == 9
    assert counts["outrider_emitted_tokens_total"] == (
        counts["outrider_accepted_tokens_total"]
        + counts["outrider_recovered_tokens_total"]
        + counts["outrider_bonus_tokens_total"]
    )
    assert counts["outrider_accepted_tokens_total"] <= counts["outrider_drafted_tokens_total"]
    assert counts["outrider_steps_total"] == 4
    assert counts["outrider_tested_positions_total"] == 6


def test_plain_decoding_is_counted_as_none(seen: list[Any]) -> None:
    metrics.VerifierMetrics().finished(SpeculationStats(None, steps=2, bonus=2))
    assert {tags["draft"] for _name, _value, tags in seen} == {"none"}


def test_the_loop_state(seen: list[Any]) -> None:
    verifier = metrics.VerifierMetrics()
    verifier.gauged(Gauges(1, 2, 3, 4, 5, 6, {"lm": 7}))
    assert seen == [
        ("outrider_running_sequences", 1),
        ("outrider_waiting_requests", 2),
        ("outrider_kv_pages_in_use", 3),
        ("outrider_kv_pages", 4),
        ("outrider_kv_host_pages_in_use", 5),
        ("outrider_loop_steps_total", 6, {}),
        ("outrider_draft_faults_total", 7, {"draft": "lm"}),
    ]


def test_pace_in_milliseconds(seen: list[Any]) -> None:
    ingress = metrics.IngressMetrics()
    ingress.paced("code", Pace(to_first_token=0.5, per_token=0.02))
    ingress.paced(None, Pace(to_first_token=0.25, per_token=None))
    assert seen == [
        ("outrider_time_to_first_token_ms", 500, {"draft": "code"}),
        ("outrider_time_per_output_token_ms", 20, {"draft": "code"}),
        ("outrider_time_to_first_token_ms", 250, {"draft": "none"}),
    ]
