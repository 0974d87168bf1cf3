"""Levels, laps and their arithmetic, with a server that does as it is told."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from time import perf_counter
from typing import Any

import pytest

from bench.load import (
    Closed,
    Failed,
    Lap,
    Level,
    NotServed,
    Open,
    Question,
    Refused,
    Reply,
    Usage,
    measure,
    percentiles,
    questions_of,
    run_lap,
)
from bench.load_plot import draw_load, plot_load
from bench.load_report import level_lines, load_report, table_head
from deployments.prompt_file import PromptFile
from tests.unit.bench import summary as decode_summary

QUESTIONS = [Question("songs", f"prompt {n % 3}", n, 50) for n in range(12)]


class Clerk:
    """Answers with the prompt, one token, after some turns of the event loop."""

    def __init__(self, forgets: bool = True) -> None:
        self.forgets = forgets
        self.asked: list[tuple[str, Question]] = []
        self.said: list[str] = []
        self.open = self.most_open = 0
        self.trouble: Callable[[str, Question], NotServed | None] = lambda arm, question: None
        self.together = 0  # nobody gets an answer before so many wait for one
        self._enough = asyncio.Event()

    async def ask(self, arm: str, question: Question) -> Reply:
        self.asked.append((arm, question))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self.together:
            self._enough.set()
        await self._enough.wait()
        for _ in range(1 + question.seed % 4):
            await asyncio.sleep(0)
        self.open -= 1
        if error := self.trouble(arm, question):
            raise error
        return Reply(perf_counter(), perf_counter(), tokens=1, steps=1, text=question.prompt)

    def begin(self) -> None:
        self.said.append("begin")

    def end(self) -> Usage:
        self.said.append("end")
        return Usage(kv_pages=7, kv_pool=9, draft_s=0.0, pass_s=0.0)

    async def close(self) -> None:
        self.said.append("close")


def lap(clerk: Clerk, level: Level, arm: str = "plain") -> Lap:
    return asyncio.run(run_lap(clerk, arm, QUESTIONS, level, lambda: None))


def measured(
    clerk: Clerk, levels: Sequence[Level], arms: Sequence[str] = ("plain", "auto")
) -> list[dict[str, Any]]:
    return asyncio.run(measure(clerk, QUESTIONS, arms, levels))


# -- questions and levels --------------------------------------------------------------------------


def test_questions_come_from_all_files_in_turn_and_again_with_seeds_of_their_own() -> None:
    files = [PromptFile("code", ("c0", "c1", "c2")), PromptFile("zh", ("z0",))]
    found = questions_of(files, 6, seed=40, max_tokens=9)
    assert [(own.domain, own.prompt) for own in found] == [
        ("code", "c0"),
        ("zh", "z0"),
        ("code", "c1"),
        ("code", "c2"),
        ("code", "c0"),
        ("zh", "z0"),
    ]
    assert [own.seed for own in found] == [40, 41, 42, 43, 44, 45]
    assert {own.max_tokens for own in found} == {9}


@pytest.mark.parametrize("concurrency", [1, 3, 12])
def test_a_closed_loop_keeps_so_many_open_and_no_more(concurrency: int) -> None:
    clerk = Clerk()
    found = lap(clerk, Closed(concurrency))
    assert clerk.most_open == found.most_open == concurrency
    assert [question for _, question in clerk.asked] == QUESTIONS


def test_an_open_loop_sends_whoever_still_waits() -> None:
    clerk = Clerk()
    clerk.together = len(QUESTIONS)
    found = lap(clerk, Open(rate=1e5, seed=3))
    assert found.most_open == len(QUESTIONS)
    assert [question for _, question in clerk.asked] == QUESTIONS


def test_arrivals_are_those_of_their_seed() -> None:
    assert Open(4.0, seed=1).arrivals(50) == Open(4.0, seed=1).arrivals(50)
    assert Open(4.0, seed=1).arrivals(50) != Open(4.0, seed=2).arrivals(50)
    assert Open(4.0, seed=1).arrivals(50) == pytest.approx(
        [2 * own for own in Open(8.0, seed=1).arrivals(50)]
    )


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: of that mean, and as far from it on average as it is from 0."""
    arrivals = Open(4.0, seed=0).arrivals(20_000)
    gaps = [after - before for before, after in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.03)
    assert pstdev(gaps) == pytest.approx(1 / 4, rel=0.03)


# -- the numbers -----------------------------------------------------------------------------------


def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed() -> None:
    assert percentiles(range(100, 0, -1)) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([3.0, 1.0, 2.0, 4.0]) == {"p50": 2.0, "p95": 4.0, "p99": 4.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}


def test_a_laps_numbers() -> None:
    one = Lap(seconds=4.0, usage=Usage(kv_pages=7, kv_pool=9, draft_s=1.0, pass_s=2.0))
    one.add(QUESTIONS[0], Reply(10.5, 12.5, tokens=5, steps=2, text="a"), due=10.0)
    one.add(QUESTIONS[1], Reply(11.0, 11.0, tokens=1, steps=1, text="b"), due=10.0)
    one.lose(Refused("HTTP 503: full"))
    one.lose(Refused("HTTP 503: full"))
    one.lose(Failed("gone"))
    assert one.report(None) == {
        "done": 2,
        "refused": {"HTTP 503: full": 2},
        "failed": {"gone": 1},
        "most_open": 0,
        "seconds": 4.0,
        "tokens": 6,
        "tokens_per_second": 1.5,
        "tau": 2.0,
        "first_text_s": {"p50": 0.5, "p95": 1.0, "p99": 1.0},
        "per_token_s": {"p50": 0.5, "p95": 0.5, "p99": 0.5},
        "whole_s": {"p50": 1.0, "p95": 2.5, "p99": 2.5},
        "exact_match": None,
        "kv_pages": 7,
        "kv_pool": 9,
        "draft_share": 0.25,
        "pass_share": 0.5,
    }


def test_texts_are_compared_where_both_arms_have_one() -> None:
    plain, other = Lap(seconds=1.0), Lap(seconds=1.0)
    for number, (theirs, ours) in enumerate(zip("abc", "axc", strict=True)):
        plain.add(QUESTIONS[number], Reply(0, 0, 1, 1, theirs), due=0)
        other.add(QUESTIONS[number], Reply(0, 0, 1, 1, ours), due=0)
    plain.add(QUESTIONS[3], Reply(0, 0, 1, 1, "d"), due=0)
    assert other.report(plain)["exact_match"] == 2 / 3
    assert plain.report(plain)["exact_match"] == 1
    assert Lap(seconds=1.0).report(plain)["exact_match"] is None


def test_requests_that_are_lost_are_counted_by_reason() -> None:
    clerk = Clerk()
    kinds: dict[int, NotServed] = {2: Refused("full"), 5: Failed("gone"), 7: Refused("full")}
    clerk.trouble = lambda arm, question: kinds.get(question.seed) if arm == "auto" else None
    [level] = measured(clerk, [Closed(4)])
    plain, auto = level["arms"]["plain"], level["arms"]["auto"]
    assert (plain["done"], plain["refused"], plain["failed"]) == (12, {}, {})
    assert (auto["done"], auto["refused"], auto["failed"]) == (9, {"full": 2}, {"gone": 1})
    assert auto["exact_match"] == 1


def test_a_level_in_which_everything_is_lost_still_has_its_line() -> None:
    clerk = Clerk()
    clerk.trouble = lambda arm, question: Refused("full") if question.max_tokens == 50 else None
    [level] = measured(clerk, [Closed(4)])
    row = level["arms"]["auto"]
    assert (row["done"], row["tokens_per_second"], row["tau"]) == (0, 0, None)
    assert "12 refused: full" in level_lines(level)


# -- measuring -------------------------------------------------------------------------------------


def test_arms_take_turns_at_each_level_and_in_who_comes_first() -> None:
    clerk = Clerk()
    levels: list[Level] = [Closed(1), Closed(2), Open(1e5, seed=0)]
    found = measured(clerk, levels)
    size = len(QUESTIONS)
    laps = [clerk.asked[2 + size * n : 2 + size * (n + 1)] for n in range(6)]
    assert [{arm for arm, _ in own} for own in laps] == [
        {arm} for arm in ("plain", "auto", "auto", "plain", "plain", "auto")
    ]
    assert all([question for _, question in own] == QUESTIONS for own in laps)
    assert clerk.said == ["begin", "end"] * 6 + ["close"]
    assert [(own["load"], own["concurrency"], own["rate"]) for own in found] == [
        ("1 open", 1, None),
        ("2 open", 2, None),
        ("100000/s", None, 1e5),
    ]
    assert all(list(own["arms"]) == ["plain", "auto"] for own in found)


def test_every_arm_is_warmed_up_with_a_short_answer_of_each_domain() -> None:
    clerk = Clerk()
    questions = [*QUESTIONS, Question("law", "whereas", 12, 50), Question("law", "so", 13, 50)]
    asyncio.run(measure(clerk, questions, ["plain", "auto"], [Closed(1)]))
    warm = clerk.asked[: -2 * len(questions)]
    assert sorted((arm, own.prompt, own.max_tokens) for arm, own in warm) == [
        ("auto", "prompt 0", 8),
        ("auto", "whereas", 8),
        ("plain", "prompt 0", 8),
        ("plain", "whereas", 8),
    ]


def test_a_server_that_does_not_forget_reads_every_prompt_before_it_is_measured() -> None:
    clerk = Clerk(forgets=False)
    clerk.trouble = lambda arm, question: Failed("no") if question.prompt[-1] == "2" else None
    [level] = measured(clerk, [Closed(1)])
    before = clerk.asked[: -2 * len(QUESTIONS)]
    assert [own.prompt for _, own in before[:2]] == ["prompt 0"] * 2
    assert {own.prompt for _, own in before[2:]} == {"prompt 0", "prompt 1", "prompt 2"}
    assert all(own.max_tokens == 8 for _, own in before)
    assert level["arms"]["plain"]["failed"] == {"no": 4}, "what fails is counted where it counts"


def test_an_arm_that_does_not_answer_at_all_is_named_and_the_server_closed() -> None:
    clerk = Clerk()
    clerk.trouble = lambda arm, question: Refused("no draft 'auto'") if arm == "auto" else None
    with pytest.raises(
        ValueError, match="^arms: auto does not answer the first prompt of songs: no draft"
    ):
        measured(clerk, [Closed(1)])
    assert clerk.said == ["close"]


def test_progress_is_told_when_all_is_warm_for_every_question_and_for_every_level() -> None:
    told: list[Any] = []
    found = asyncio.run(
        measure(
            Clerk(),
            QUESTIONS,
            ["plain"],
            [Closed(2), Closed(3)],
            on_ready=lambda: told.append("ready"),
            on_question=lambda: told.append("."),
            on_level=told.append,
        )
    )
    assert told == ["ready", *["."] * 12, found[0], *["."] * 12, found[1]]


# -- for people ------------------------------------------------------------------------------------


def summary() -> dict[str, Any]:
    """Two arms at two closed levels and an open one; at the last, requests are lost."""
    clerk = Clerk()
    found = measured(clerk, [Closed(4), Closed(1)])
    clerk.trouble = lambda arm, question: Refused("full") if question.seed == 2 else None
    found += measured(clerk, [Open(1e5, seed=0)])
    run = decode_summary.summary()["run"]
    settings = {"url": None, "max_running": 8, "temperature": 0.0, "requests": 12, "seed": 0}
    return {"levels": found, "run": run | {"settings": run["settings"] | settings}}


def test_the_table_has_a_line_for_every_lap_and_every_loss() -> None:
    made = summary()
    level = made["levels"][2]
    level["arms"]["auto"] |= {
        "tokens_per_second": 1234.56,
        "tau": 2.5,
        "draft_share": 0.25,
        "pass_share": 0.5,
        "first_text_s": {"p50": 0.5, "p95": 1.0, "p99": 12.0},
        "per_token_s": {"p50": 0.0125, "p95": None, "p99": 0.2},
        "whole_s": {"p50": 1.0, "p95": 2.25, "p99": 100.0},
    }
    lines = level_lines(level).splitlines()
    assert lines[2].split() == [
        *("100000/s", "auto", "11", "1", "1234.6", "500/1000/12000", "12.5/-/200.0"),
        *("1.00/2.25/100.00", "2.50", "7", "25%", "50%", "100%"),
    ]
    assert len(lines[0]) == len(lines[2]) == len(table_head())
    assert lines[1] == lines[3] == "  1 refused: full"


def test_the_report_says_all_of_it_and_how_it_was_had() -> None:
    made = summary()
    said = load_report(made)
    assert said.startswith("# tiny, Abacus, 2 cores, 2026-01-02\n")
    whole = " ".join(said.split())
    assert "In process, float32 on cpu, at most 8 requests in a pass; budget 8" in whole
    assert "12 requests per load and arm; prompts: 3 of code, 2 of zh." in whole
    assert said.count("\n| 4 open | ") == said.count("\n| 100000/s | ") == 2
    assert "- 100000/s, auto: 1 refused: full\n" in said
    made["run"]["settings"] |= {"url": "http://server:8000", "dtype": None, "device": None}
    assert "Over HTTP, http://server:8000; budget 8" in " ".join(load_report(made).split())
    del made["levels"][2]
    assert "lost:\n" not in load_report(made)


def test_the_picture_has_a_column_for_each_kind_of_load_and_a_row_for_each_measure() -> None:
    made = summary()
    made["levels"][0]["arms"]["auto"]["tokens_per_second"] = 40.0
    made["levels"][1]["arms"]["auto"]["tokens_per_second"] = 10.0
    axes = draw_load(made).axes
    assert len(axes) == 4 * 2
    _, auto = axes[0].lines
    assert list(zip(auto.get_xdata(), auto.get_ydata(), strict=True)) == [(1, 10.0), (4, 40.0)]
    assert [line.get_label() for line in axes[2].lines][:4] == [
        *("plain, p50", "plain, p95", "plain, p99", "auto, p50"),
    ]
    assert axes[6].get_xlabel() == "requests open at once"
    del made["levels"][2]
    assert len(draw_load(made).axes) == 4


@pytest.mark.filterwarnings("error")
def test_the_picture_is_a_png_though_some_levels_have_no_times(tmp_path: Path) -> None:
    made = summary()
    made["levels"][2]["arms"]["auto"]["first_text_s"] = percentiles([])
    plot_load(made, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
