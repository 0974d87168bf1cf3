"""The target's own choice of a token, from one row of its logits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workers.engine.sampling import BadLogits, SamplingParams, TokenHistory, adjusted, law
from workers.speculation.acceptance import choose
from workers.speculation.noise import key_of, noise

try:
    from workers.engine.kernels import elements
    from workers.engine.kernels.draw import draw as kernel
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
    `position`: argmax(p / noise).

    logits: [vocabulary], any float dtype; left unchanged. Raises BadLogits.
    """
    place = position + len(path)
    if _compiled(logits, params):
        return _drawn(adjusted(logits, params, history, path), params, place)
    p = law(logits, params, history, path)
    if len(p.ids) == 1:
        return int(p.ids[0])
    return int(p.ids[choose(p.probs, noise(params.seed, place, p.ids))])


def _compiled(logits: Tensor, params: SamplingParams) -> bool:
    """Whether the kernel draws from such a law."""
    return (
        kernel is not None
        and logits.device.type == "cpu"
        and logits.dtype in (torch.float32, torch.bfloat16)
        and not (params.greedy or params.truncated)
    )


def _drawn(scores: Tensor, params: SamplingParams, place: int) -> int:
    assert scores.is_contiguous(), "the kernel sees no strides"
    key = np.uint64(key_of(params.seed, place))
    like = elements.FLOAT32 if scores.dtype == torch.float32 else elements.BFLOAT16
    token = kernel(scores.data_ptr(), len(scores), params.temperature, key, like)
    if token < 0:
        raise BadLogits
    return token
