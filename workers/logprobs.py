"""What the target thought of the tokens that were said."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from workers.request import Delta, TokenLogprob
from workers.speculation.acceptance import Verdict


def with_logprobs(delta: Delta, verdict: Verdict, rows: Tensor, top: int) -> Delta:
    """The delta with the logprobs of its tokens, and of the `top` likeliest at each place.

    rows: [1 + nodes, vocabulary], the logits that were verified. Those that the accepted path
    leads through are what the tokens came from; the delta may have ended on the way.
    """
    through = (0, *(node + 1 for node in verdict.path))[: len(delta.tokens)]
    return replace(delta, logprobs=_logprobs(rows[list(through)], delta.tokens, top))


def _logprobs(rows: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    laws = rows.float().log_softmax(-1)
    values, ids = laws.topk(top)
    likeliest = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, float(law[token]), tuple(zip(*best, strict=True)))
        for token, law, best in zip(tokens, laws, likeliest, strict=True)
    )
