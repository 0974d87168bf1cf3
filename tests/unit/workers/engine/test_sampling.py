"""p against a second implementation, written step by step over Python floats."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from workers.engine.sampling import (
    FIRST_NUCLEUS,
    BadLogits,
    SamplingParams,
    TokenHistory,
    greedy_tokens,
    law,
)

NO_HISTORY = TokenHistory(())


def reference(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> list[float]:
    """p over the whole vocabulary, for temperatures over 0."""
    scores = list(logits)
    for token in set(prompt) | set(answer):
        rate = params.repetition_penalty
        scores[token] = scores[token] / rate if scores[token] > 0 else scores[token] * rate
    for token, times in Counter(answer).items():
        scores[token] -= params.frequency_penalty * times + params.presence_penalty
    for token, bias in params.logit_bias:
        scores[token] += bias
    p = softmax([score / params.temperature for score in scores])
    ranked = sorted(range(len(p)), key=lambda token: -scores[token])
    if params.top_k:
        ranked = ranked[: params.top_k]
        p = only(p, ranked)
    if params.top_p < 1:
        reached, nucleus = 0.0, 0
        while nucleus < len(ranked) and reached < params.top_p:
            reached += p[ranked[nucleus]]
            nucleus += 1
        ranked = ranked[:nucleus]
        p = only(p, ranked)
    return only(p, [token for token in ranked if p[token] >= params.min_p * max(p)])


def softmax(scores: Sequence[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / math.fsum(powers) for power in powers]


def only(p: Sequence[float], tokens: Sequence[int]) -> list[float]:
    mass = math.fsum(p[token] for token in tokens)
    return [p[token] / mass if token in tokens else 0.0 for token in range(len(p))]


def p_of(
    logits: Sequence[float], params: SamplingParams, history: TokenHistory = NO_HISTORY, **path: Any
) -> list[float]:
    found = law(torch.tensor(logits), params, history, **path)
    dense: list[float] = found.dense(len(logits)).tolist()
    assert math.isclose(math.fsum(dense), 1)
    return dense


# Eighths are exact in float32, and there are few of them: ties are common.
LOGITS = st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=30)
SETTINGS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.25, 1.0, 2.0])},
    optional={
        "top_k": st.integers(0, 30),
        # Odd numbers that no sum of probabilities meets by chance, where rounding would decide.
        "top_p": st.floats(0.01, 1).map(lambda x: min(1.0, x * 0.9876543)),
        "min_p": st.floats(0.001, 0.999).map(lambda x: x * 0.9876543),
        "presence_penalty": st.sampled_from([-2.0, -0.5, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, -0.5, 0.5, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 2.0, 4.0]),
    },
)


@given(LOGITS, SETTINGS, st.data())
def test_the_law_is_the_reference(
    logits: list[float], settings: dict[str, Any], data: st.DataObject
) -> None:
    ids = st.integers(0, len(logits) - 1)
    prompt, answer, path = (data.draw(st.lists(ids, max_size=6)) for _ in range(3))
    bias = data.draw(st.dictionaries(ids, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=3))
    params = SamplingParams(seed=0, logit_bias=tuple(bias.items()), **settings)
    history = TokenHistory(prompt)
    history.extend(answer)
    expected = reference(logits, params, prompt, [*answer, *path])
    assert p_of(logits, params, history, path=path) == pytest.approx(expected, abs=1e-9)


@given(LOGITS, st.sampled_from([0.2, 0.9, 1.3]), st.integers(1, 30), st.sampled_from([0.3, 0.8]))
def test_greedy_is_the_first_of_the_best_whatever_else_is_set(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(seed=0, temperature=0, top_k=top_k, top_p=top_p, min_p=0.5)
    best = logits.index(max(logits))
    assert p_of(logits, params)[best] == 1
    assert greedy_tokens(torch.tensor([logits, logits])) == [best, best]


def test_greedy_obeys_penalties_and_bias() -> None:
    history = TokenHistory([0])
    pushed = SamplingParams(seed=0, temperature=0, logit_bias=((2, 100.0),))
    assert p_of([3.0, 2.0, 1.0], pushed)[2] == 1
    penalised = SamplingParams(seed=0, temperature=0, repetition_penalty=2.0)
    assert p_of([3.0, 2.0, 1.0], penalised, history)[1] == 1
    assert p_of([3.0, 2.0, 1.9], penalised, history, path=[1])[2] == 1


def test_rejected_tokens_leave_no_trace() -> None:
    history = TokenHistory([0])
    params = SamplingParams(seed=0, frequency_penalty=1.0, repetition_penalty=1.5)
    before = p_of([3.0, 2.0, 1.0], params, history)
    p_of([3.0, 2.0, 1.0], params, history, path=[1, 1, 2])
    assert p_of([3.0, 2.0, 1.0], params, history) == before


def test_counts_follow_the_path_repetition_counts_the_prompt_too() -> None:
    history = TokenHistory([7, 7, 8])
    history.extend([1, 2])
    history.extend([1])
    counts, seen = history.with_path([1, 9])
    assert counts == Counter({1: 3, 2: 1, 9: 1})
    assert seen == {1, 2, 7, 8, 9}


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0])
    everything = SamplingParams(
        seed=0,
        temperature=0.5,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=2,
        logit_bias=((0, 5.0),),
    )
    law(logits, everything, TokenHistory([2]), [1])
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.7}])
def test_of_equal_scores_the_first_stay(settings: dict[str, Any]) -> None:
    p = p_of([1.0, 5.0, 4.0, 4.0, 4.0, 1.0], SamplingParams(seed=0, **settings))
    assert [token for token in range(6) if p[token]] == [1, 2, 3]


@given(LOGITS, st.sampled_from([{"top_k": 1}, {"top_p": 1e-9}]))
def test_the_smallest_choice_is_the_greedy_one(
    logits: list[float], settings: dict[str, Any]
) -> None:
    only_one = law(torch.tensor(logits), SamplingParams(seed=0, **settings), NO_HISTORY)
    assert only_one.ids.tolist() == [logits.index(max(logits))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_no_law(bad: float, temperature: float) -> None:
    with pytest.raises(BadLogits, match="not finite"):
        p_of([1.0, bad, 2.0], SamplingParams(seed=0, temperature=temperature))
    assert greedy_tokens(torch.tensor([[1.0, bad, 2.0], [1.0, 3.0, 2.0]])) == [None, 1]


@given(st.integers(0, 2**32), st.floats(0.05, 0.9999))
@example(0, 0.9999)
def test_top_p_is_a_full_sort_also_beyond_its_first_look(seed: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40 * FIRST_NUCLEUS, generator=generator) * 0.5
    found = law(logits, SamplingParams(seed=0, top_p=top_p), NO_HISTORY)
    p = logits.double().softmax(0)
    ranked = p.argsort(descending=True)
    reached = p[ranked].cumsum(0)
    nucleus = int((reached < top_p).sum()) + 1
    assert set(found.ids.tolist()) == set(ranked[:nucleus].tolist())
    assert torch.allclose(found.probs, p[found.ids] / p[found.ids].sum(), rtol=1e-12)


def test_a_top_p_that_rounding_keeps_out_of_reach_keeps_everything() -> None:
    top_p = math.nextafter(1, 0)
    logits = [0.1 * n for n in range(300)]
    assert all(p > 0 for p in p_of(logits, SamplingParams(seed=0, top_p=top_p, temperature=50)))


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30])
def test_the_least_temperature_is_greedy(temperature: float) -> None:
    params = SamplingParams(seed=0, temperature=temperature)
    assert p_of([20.0, -3.0, 19.0], params) == [1, 0, 0]


def test_the_greatest_temperature_is_uniform() -> None:
    p = p_of([20.0, -3.0, 19.0], SamplingParams(seed=0, temperature=1.7e308))
    assert p == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_taken_at_their_value(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.5, 2.25, -3.0], dtype=dtype)
    found = law(logits, SamplingParams(seed=0, temperature=0.7), NO_HISTORY).dense(3).tolist()
    assert found == pytest.approx(softmax([1.5 / 0.7, 2.25 / 0.7, -3 / 0.7]), abs=1e-12)


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 2**64),
    *(("temperature", value) for value in (-0.1, NAN, INF)),
    ("top_k", -2),
    *(("top_p", value) for value in (0, 7, -1, NAN, INF)),
    *(("min_p", value) for value in (-0.1, 1.1, NAN)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, NAN, INF)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN, -INF)),
    *(("repetition_penalty", value) for value in (0, -1, 1e-9, 1e9, NAN, INF)),
    *(("logit_bias", ((3, value),)) for value in (-101, 101, NAN, INF)),
    ("logit_bias", ((-1, 0),)),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{"seed": 0, field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("top_k", 101), ("top_k", 9_999_999), ("logit_bias", ((100, 1.0),))]
)
def test_what_the_vocabulary_does_not_have_is_refused_by_name(field: str, value: Any) -> None:
    params = SamplingParams(**{"seed": 0, field: value})
    with pytest.raises(ValueError, match=f"^{field}: "):
        params.check_vocabulary(100)
    SamplingParams(seed=0, top_k=100, logit_bias=((99, 1.0),)).check_vocabulary(100)


def test_the_extremes_that_are_allowed_give_a_law() -> None:
    """No request may make a NaN: it would take the whole batch down."""
    for rate in (0.01, 100.0):
        params = SamplingParams(seed=0, repetition_penalty=rate, temperature=5e-324)
        p_of([300.0, 0.0, -300.0], params, TokenHistory([0, 1, 2]))
