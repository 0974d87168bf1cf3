"""One pass over the faults that cost seconds; e2e has those of the verifier and its ranks."""

import random

import pytest

from tests.endurance.chaos import CHEAP, Fault, Plan, Record, Report, Struck, chaos
from tests.endurance.client import End, Heard
from tests.endurance.requests import catalogue
from tests.endurance.service import Service

ASK, *_ = catalogue()


@pytest.mark.timeout(600)
def test_every_request_gets_its_text_whatever_is_killed_or_frozen(service: Service) -> None:
    report = chaos(service, Plan(CHEAP, rounds=1, period_s=1))
    print(report.table())
    assert report.faults == []
    assert report.recovery.keys() == {fault.name for fault in CHEAP}
    assert report.served == 1  # none of these is worth an error


def test_a_fault_that_hits_nobody_is_told(service: Service) -> None:
    with pytest.raises(RuntimeError, match="no process ray::Nobody"):
        Fault("nobody killed", "ray::Nobody").strike(service, random.Random())


def heard(text: str) -> Heard:
    made = Heard()
    made.add({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})
    return made


def test_a_report_says_what_is_wrong() -> None:
    record = Record()
    for _ in range(98):
        record.add(ASK, End("text", 1.0, heard("the")), heard("the").said(), 1)
    for _ in range(2):
        record.add(ASK, End("broken", 1.0, heard("t")), heard("the").said(), 2)
    struck = (Struck("a", 0.0, 3.0), Struck("b", 9.0, None))
    report = Report(Plan(CHEAP), record, struck, 0.1)
    lost, few = report.faults
    assert lost == "b: not recovered"
    assert few.startswith("only 98.00% got their text")
    assert record.asked_again == 2
    record.add(ASK, End("text", 1.0, heard("a")), heard("the").said(), 1)
    assert "and not" in report.faults[0]
