"""Requests that cannot mean anything, and counters."""

from typing import Any

import pytest

from workers.draft import DraftSpec
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest, SpeculationStats


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", ()), ("max_tokens", 0), ("max_tokens", -1), ("budget", -1), ("stop", ("a", ""))],
)
def test_bad_fields_are_refused_by_name(field: str, value: Any) -> None:
    good = {"id": "r", "prompt": (1,), "max_tokens": 1, "sampling": SamplingParams(seed=0)}
    GenerationRequest(**good)
    with pytest.raises(ValueError, match=f"^{field}: "):
        GenerationRequest(**good | {field: value})


def test_counters_before_the_first_step_are_no_division_by_zero() -> None:
    nothing = SpeculationStats(draft=None)
    assert (nothing.emitted, nothing.tau, nothing.alpha) == (0, 0.0, None)


def test_tau_is_tokens_per_step_and_alpha_per_tested_position() -> None:
    stats = SpeculationStats("d", 4, drafted=30, tested=8, accepted=6, recovered=2, bonus=2)
    assert (stats.emitted, stats.tau, stats.alpha) == (10, 2.5, 0.75)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "lm"},
        {"kind": "lm", "path": "x", "layers": (0,)},
        {"kind": "ngram", "layers": (0,)},
    ],
    ids=str,
)
def test_a_draft_that_is_neither_one_thing_nor_the_other_is_refused(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"^drafts\.d: "):
        DraftSpec("d", **fields)
