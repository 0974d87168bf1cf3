"""A rank that does not answer is noticed; `tests/e2e/test_target_ranks.py` freezes a real one."""

from concurrent.futures import Future
from typing import Any

from deployments.target_ranks import Pulse


class Somebody:
    """Is asked, and answers when told to; time passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[Future[Any]] = []

    def ping(self) -> "Future[Any]":
        self.asked.append(Future())
        return self.asked[-1]

    def clock(self) -> float:
        return self.now


def test_silence_is_counted_from_the_question_that_is_open() -> None:
    somebody = Somebody()
    pulse = Pulse(somebody.ping, somebody.clock)
    assert pulse.silent_s() == 0
    somebody.now += 3
    assert pulse.silent_s() == 3
    somebody.now += 4
    assert pulse.silent_s() == 7
    assert len(somebody.asked) == 1, "one question at a time"
    somebody.asked[0].set_result(None)
    somebody.now += 60
    assert pulse.silent_s() == 0, "nobody was asked in that time"
    somebody.now += 2
    assert pulse.silent_s() == 2


def test_an_error_is_an_answer() -> None:
    somebody = Somebody()
    pulse = Pulse(somebody.ping, somebody.clock)
    pulse.silent_s()
    somebody.asked[0].set_exception(RuntimeError("dead, which is told elsewhere"))
    somebody.now += 60
    assert pulse.silent_s() == 0
