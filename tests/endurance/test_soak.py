"""The soak in its short form, and that it hears what it must hear."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from tests.endurance.client import End, Heard, How
from tests.endurance.requests import FEATURES, catalogue, wrong
from tests.endurance.service import Service
from tests.endurance.soak import Memory, Plan, Record, Report, fault_of, leniency_of, soak

SECONDS = float(os.environ.get("OUTRIDER_SOAK_S", "60"))
ASK, *_ = catalogue()


@pytest.mark.timeout(SECONDS + 420)
def test_a_crowd_leaves_nothing_behind(service: Service) -> None:
    report = soak(service, Plan(SECONDS))
    print(report.table())
    assert report.faults == []
    assert {*FEATURES, "wrong", "hurried", "unseeded"} <= report.record.ends.keys()
    ends = sum(report.record.ends.values(), Counter())
    assert min(ends[how] for how in ("text", "left", "refused", "late")) > 0


def end(how: How, text: str = "", **told: object) -> End:
    heard = Heard()
    if text:
        heard.add({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    return replace(End(how, 1.0, heard), **told)  # type: ignore[arg-type]


def test_a_text_is_compared() -> None:
    alone = end("text", "the king").heard.said()
    assert fault_of(ASK, end("text", "the king"), alone) is None
    assert fault_of(ASK, end("text", "the kin"), alone)
    assert fault_of(ASK, end("left", "the kin"), alone) is None
    assert fault_of(ASK, end("left", "the thing"), alone)


def test_every_other_end_is_a_fault_but_for_being_told_when_to_come_back() -> None:
    alone = end("text", "the king").heard.said()
    assert fault_of(ASK, end("busy", retry_after="1"), alone) is None
    for how in ("busy", "refused", "late", "failed", "broken"):
        assert fault_of(ASK, end(how), alone)  # type: ignore[arg-type]


def test_a_refusal_must_be_for_the_field() -> None:
    each, *_ = wrong()
    assert each.field == "best_off"
    told = {"param": "best_off", "message": "best_off: unknown"}
    assert leniency_of(each, end("refused", status=400, error=told)) is None
    assert leniency_of(each, end("refused", status=400, error={**told, "param": None}))
    assert leniency_of(each, end("refused", status=404, error=told))
    assert leniency_of(each, end("text", "the"))


def test_memory_is_that_of_the_last_third_over_the_middle_one() -> None:
    samples = [Counter(verifier=size, ingress=100) for size in (1, 1, 100, 100, 110, 110)]
    memory = Memory.of(samples)
    assert memory.growth == pytest.approx(0.05)
    record = Record()
    record.drafted = 1
    report = Report(Plan(1), record, memory, (0, 0, 0))
    assert report.faults == ["memory grew by 5.0%"]
    held = replace(report, held=(0, 0, 1), memory=Memory.of(samples[:3]))
    assert held.faults[0] == "still running, waiting, pages: (0, 0, 1)"
