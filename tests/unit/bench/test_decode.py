"""The arithmetic of side-by-side numbers, and that the arms are measured as they should be."""

from dataclasses import replace
from typing import Any

import pytest

from bench import decode
from bench.decode import Arm, Settings, Tally, measure, run_cold, summarise, table
from bench.reliability import Witness
from tests.table_target import TableTarget
from workers.completion import Completion, Run
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest, SpeculationStats
from workers.scheduler import Limits
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal, TokenTree
from workers.verifier import build_verifier


def answer(
    text: str, size: int, steps: int, tested: int = 0, accepted: int = 0, **members: int
) -> Completion:
    request = GenerationRequest("r", (1,), 99, SamplingParams(seed=0))
    stats = SpeculationStats(
        "d", steps, 0, tested, accepted, bonus=size - accepted, members=tuple(members.items())
    )
    return Completion(request, text, [1] * size, "length", stats)


def tally(seconds: float, *answers: Completion) -> Tally:
    made = Tally()
    made.add(Run(list(answers), seconds))
    return made


NUMBERS = ("tokens_per_second", "tau", "alpha", "speedup", "exact_match", "calibration_error")


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {name: report[name] for name in NUMBERS}


PLAIN = tally(4.0, answer("a", 10, 10), answer("b", 30, 30))
DRAFTED = tally(2.0, answer("a", 10, 4, tested=8, accepted=6), answer("c", 30, 12, 32, 18))


def test_an_arms_numbers_are_ratios_of_sums() -> None:
    assert numbers(PLAIN.report(PLAIN)) == {
        "tokens_per_second": 10.0,
        "tau": 1.0,
        "alpha": None,
        "speedup": 1.0,
        "exact_match": 1.0,
        "calibration_error": None,
    }
    assert numbers(DRAFTED.report(PLAIN)) == {
        "tokens_per_second": 20.0,
        "tau": 40 / 16,
        "alpha": 24 / 40,
        "speedup": 2.0,
        "exact_match": 0.5,
        "calibration_error": None,
    }


def test_without_plain_decoding_there_is_nothing_to_compare_with() -> None:
    report = DRAFTED.report(None)
    assert (report["speedup"], report["exact_match"]) == (None, None)
    assert report["tokens_per_second"] == 20.0


def test_the_whole_is_weighted_by_what_was_said_not_by_domain() -> None:
    results = {
        "short": {
            "plain": tally(1.0, answer("x", 10, 10)),
            "d": tally(1.0, answer("x", 10, 5, 20, 5)),
        },
        "long": {
            "plain": tally(9.0, answer("y", 90, 90)),
            "d": tally(3.0, answer("y", 90, 30, tested=80, accepted=60)),
        },
    }
    summary = summarise(results)
    assert summary["arms"]["d"]["tokens_per_second"] == 100 / 4
    assert summary["arms"]["d"]["tau"] == 100 / 35
    assert summary["arms"]["d"]["alpha"] == 65 / 100
    assert summary["arms"]["d"]["speedup"] == (100 / 4) / (100 / 10)
    assert summary["domains"]["short"]["d"]["speedup"] == 1.0
    assert summary["domains"]["long"]["d"]["speedup"] == 3.0
    assert results["short"]["d"].tokens == 10, "summing up changes nothing"


def test_accepted_tokens_are_summed_by_member_and_nodes_by_confidence() -> None:
    one = tally(1.0, answer("a", 9, 4, 6, 5, table=2, suffix=3), answer("b", 9, 9))
    other = tally(1.0, answer("c", 9, 4, 6, 5, table=4, neural=1))
    one.reliability.add(Proposal(TokenTree.chain([7]), (0.75,)), Verdict((0,), 1, True, 1))
    other.reliability.add(Proposal(TokenTree.chain([7]), (0.75,)), Verdict((), 1, False, 1))
    summary = summarise({"x": {"d": one}, "y": {"d": other}})
    assert summary["domains"]["x"]["d"]["members"] == {"suffix": 3, "table": 2}
    whole = summary["arms"]["d"]
    assert list(whole["members"].items()) == [("neural", 1), ("suffix", 3), ("table", 6)]
    assert summary["domains"]["x"]["d"]["calibration_error"] == 0.25
    assert whole["calibration_error"] == 0.25  # .75 expected of two, one of them accepted
    assert whole["reliability"][7] == {
        "from": 0.7,
        "to": 0.8,
        "count": 2,
        "confidence": 0.75,
        "accepted": 0.5,
    }


def test_the_table_has_a_line_for_every_arm_of_every_domain_and_of_all() -> None:
    said = table(summarise({"songs": {"plain": PLAIN, "d": DRAFTED}})).splitlines()
    head = ["domain", "arm", "tokens/s", "tau", "alpha", "speed-up", "same", "ece"]
    assert said[0].split() == head
    assert said[1].split() == ["songs", "plain", "10.0", "1.00", "-", "1.00", "1.00", "-"]
    assert said[2].split() == ["songs", "d", "20.0", "2.50", "0.60", "2.00", "0.50", "-"]
    assert [line.split()[:2] for line in said[3:]] == [["all", "plain"], ["all", "d"]]
    assert len({len(line) for line in said}) == 1


def test_the_table_makes_room_for_long_names() -> None:
    said = table(summarise({"songs_of_the_sea": {"/drafts/of/the/sea": DRAFTED}})).splitlines()
    assert len({len(line) for line in said}) == 1
    assert said[1].split()[:3] == ["songs_of_the_sea", "/drafts/of/the/sea", "20.0"]


def test_arms_take_turns_prompt_by_prompt_with_the_same_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[GenerationRequest] = []

    def run(verifier: Any, request: GenerationRequest) -> Run:
        asked.append(request)
        return Run([answer("x", 2, 2)], 1.0)

    monkeypatch.setattr(decode, "run_cold", run)
    done: list[int] = []
    results = measure(
        None,  # type: ignore[arg-type]
        {"one": [(1,), (2,)], "two": [(3,)]},
        {"one": [Arm("plain", None), Arm("ngram", "x")], "two": [Arm("ngram", "y")]},
        Settings(max_tokens=50, budget=7, temperature=0.5, seed=40),
        on_prompt=lambda: done.append(len(asked)),
    )
    warm, measured = asked[:2], asked[2:6]
    assert [(r.prompt, r.max_tokens) for r in warm] == [((1,), 8)] * 2, "nobody pays for the start"
    assert [(r.prompt, r.draft, r.budget, r.sampling.seed) for r in measured] == [
        ((1,), None, 0, 40),
        ((1,), "x", 7, 40),
        ((2,), None, 0, 41),
        ((2,), "x", 7, 41),
    ]
    assert all((r.max_tokens, r.sampling.temperature) == (50, 0.5) for r in measured)
    assert [(r.prompt, r.draft) for r in asked[6:]] == [((3,), "y")] * 2
    assert len({r.id for r in [*measured, asked[7]]}) == 5
    assert done == [4, 6, 8]
    assert results["one"]["ngram"].tokens == 4, "warming up is not counted"
    assert results["two"]["ngram"].seconds == 1.0


def test_what_a_witness_hears_is_credited_to_the_arm_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    witness = Witness()

    def run(verifier: Any, request: GenerationRequest) -> Run:
        size = 2 if request.draft else 0
        witness(Proposal(TokenTree.chain([7] * size), (0.5,) * size), Verdict((), 1, False, 1))
        return Run([answer("x", 2, 2)], 1.0)

    monkeypatch.setattr(decode, "run_cold", run)
    results = measure(
        None,  # type: ignore[arg-type]
        {"one": [(1,), (2,), (3,)]},
        {"one": [Arm("plain", None), Arm("d", "d")]},
        Settings(max_tokens=50, budget=7, temperature=0.0),
        on_prompt=lambda: None,
        witness=witness,
    )
    assert results["one"]["d"].reliability.report()[5]["count"] == 6, "warming up is not counted"
    assert results["one"]["d"].reliability.error == 0.5
    assert results["one"]["plain"].reliability.error is None


def test_every_request_reads_its_own_prompt() -> None:
    target = TableTarget()
    verifier = build_verifier(target, {}, Limits())  # type: ignore[arg-type]
    read: list[int] = []
    forward = target.forward
    target.forward = lambda pack: (read.append(len(pack.tokens())), forward(pack))[1]  # type: ignore
    request = GenerationRequest("r", (1, 2, 3) * 4, 1, SamplingParams(seed=0))
    for name in ("first", "again"):
        run_cold(verifier, replace(request, id=name))
    assert read == [12, 12]
