"""One proposal against the target's logits: the two ways to verify, at the engine's level.

The theorems are in `workers.speculation.acceptance`; here p comes from logits, through the
request's sampling pipeline, with each node's own history, and for the visited nodes only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.drawing import can_draw, draw
from workers.engine.sampling import (
    BadLogits,
    Law,
    SamplingParams,
    TokenHistory,
    greedy_tokens,
    law,
)
from workers.speculation.acceptance import Verdict, choose, ratio_walk, walk
from workers.speculation.noise import RATIO, noise, uniform
from workers.speculation.tree import Proposal, SparseLaw, TokenTree


def verify(
    proposal: Proposal,
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    position: int,
) -> Verdict:
    """The accepted path and the token after it.

    logits: [1 + nodes, vocabulary], the first row after the last committed token, then one row per
    node. position: where the first of the new tokens will stand. Raises BadLogits when the walk
    comes to a row that is no numbers, NothingAllowed when it comes to where nothing may follow.
    """
    if proposal.q is not None:
        return _verify_ratio(proposal.tree, proposal.q, logits, params, history, position)
    adjusted = params.penalised or params.logit_bias or not history.free
    if params.greedy and not adjusted and not can_draw(logits, params):
        best = greedy_tokens(logits)  # one operation for all rows beats one per visited node
        return walk(proposal.tree, lambda node: _finite(best[node + 1]))
    return walk(
        proposal.tree,
        lambda node: _choose_at(proposal.tree, node, logits, params, history, position),
    )


def _finite(token: int | None) -> int:
    if token is None:
        raise BadLogits
    return token


def _choose_at(
    tree: TokenTree,
    node: int,
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    position: int,
) -> int:
    path = _tokens_down_to(tree, node)
    return draw(logits[node + 1], params, history, path, position)


def _verify_ratio(
    tree: TokenTree,
    q: Sequence[SparseLaw],
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    position: int,
) -> Verdict:
    vocabulary = logits.shape[-1]

    def p_at(node: int) -> Tensor:
        path = _tokens_down_to(tree, node)
        return law(logits[node + 1], params, history, path).dense(vocabulary)

    def q_at(node: int) -> Tensor:
        drawn_from = q[tree.children(node)[0]]
        ids = torch.tensor(drawn_from.ids, device=logits.device)
        probs = torch.tensor(drawn_from.probs, dtype=torch.float64, device=logits.device)
        return Law(ids, probs / probs.sum()).dense(vocabulary)

    def draw_at(left: Tensor, depth: int) -> int:
        everything = torch.arange(vocabulary, device=left.device)
        return choose(left, noise(params.seed, position + depth, everything))

    def uniform_at(depth: int, count: int) -> list[float]:
        return uniform(params.seed, position + depth, count, RATIO)

    return ratio_walk(tree, p_at, q_at, uniform_at, draw_at)


def _tokens_down_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens[step] for step in tree.path(node))
