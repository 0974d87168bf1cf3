"""The target's own choice of a token, from one row of its logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.engine.sampling import BadLogits, SamplingParams, TokenHistory, adjusted, law
from workers.speculation.acceptance import choose
from workers.speculation.noise import key_of, noise

try:
    from workers.engine.kernels import draw as kernel
    from workers.engine.kernels import elements
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    kernel = None  # type: ignore[assignment]


def draw(
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    path: Sequence[int],
    position: int,
) -> int:
    """The token after `history` and `path`, where the first one after `history` stands at
    `position`: argmax(p / noise), or the best one where p has but that.

    logits: [vocabulary], any float dtype; left unchanged. Raises BadLogits.
    """
    place = position + len(path)
    if can_draw(logits, params):
        return _drawn(adjusted(logits, params, history, path), params, place)
    p = law(logits, params, history, path)
    if len(p.ids) == 1:
        return int(p.ids[0])
    return int(p.ids[choose(p.probs, noise(params.seed, place, p.ids))])


def can_draw(logits: Tensor, params: SamplingParams) -> bool:
    """Whether kernels draw from such laws, at little cost for each."""
    return (
        kernel is not None
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.bfloat16)
        and (params.greedy or not params.truncated)
    )


def _drawn(scores: Tensor, params: SamplingParams, place: int) -> int:
    assert scores.is_contiguous(), "the kernel sees no strides"
    like = elements.FLOAT32 if scores.dtype == torch.float32 else elements.BFLOAT16
    row = scores.data_ptr(), len(scores)
    if params.greedy:
        token = kernel.best(*row, like)
    else:
        key = np.uint64(key_of(params.seed, place))
        token = kernel.draw(*row, params.temperature, key, like)
    if token < 0:
        raise BadLogits
    return token
