"""Each token's logprob is that of the row it came from, in whatever tree that was."""

import pytest
import torch

from workers.logprobs import with_logprobs
from workers.request import Delta, SpeculationStats
from workers.speculation.acceptance import Verdict

ROWS = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
LAWS = ROWS.double().log_softmax(-1)
VERDICT = Verdict((1, 4), 7, bonus=True, tested=2)
"""Through the rows after the last token (0), after node 1 (2) and after node 4 (5)."""


def delta(*tokens: int) -> Delta:
    return Delta("", tokens, SpeculationStats("d"))


def test_they_are_of_the_rows_that_the_path_leads_through() -> None:
    told = with_logprobs(delta(3, 39, 7), VERDICT, ROWS, top=4).logprobs
    assert [each.token for each in told] == [3, 39, 7]
    for each, row in zip(told, (0, 2, 5), strict=True):
        assert each.logprob == pytest.approx(float(LAWS[row, each.token]), abs=1e-5)
        best = LAWS[row].topk(4)
        assert [token for token, _ in each.top] == best.indices.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_an_answer_that_ends_on_the_way_is_told_of_no_more_tokens_than_it_has() -> None:
    told = with_logprobs(delta(3), VERDICT, ROWS, top=0).logprobs
    assert [(each.token, each.top) for each in told] == [(3, ())]


@pytest.mark.parametrize("top", [0, 1, 20])
def test_half_precision_is_taken_at_its_value(top: int) -> None:
    half = ROWS.bfloat16()
    told = with_logprobs(delta(3, 39, 7), VERDICT, half, top).logprobs
    assert told == with_logprobs(delta(3, 39, 7), VERDICT, half.float(), top).logprobs
    assert {len(each.top) for each in told} == {top}
