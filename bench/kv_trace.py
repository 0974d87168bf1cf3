"""Requests as they might arrive, for `outrider bench kv`: lengths of all sizes, beginnings that
many share, guesses of which a part is right, clients that leave.
"""

from dataclasses import dataclass

import numpy as np

WIDTH, DEPTH = 2, 4
"""Of a proposal's tree: guesses at each level, and levels."""

_SHARED = (200, 400, 600, 1000)  # tokens of the beginnings that requests share
_SHARING = 0.4
_LEAVING = 0.1
_PROMPT, _ANSWER = (4.6, 0.9), (4.6, 0.8)  # of log-normal lengths: medians of 100 tokens
_LONGEST_PROMPT = 1500
_ASKED = (8, 4, 2, 1)  # clients set max_tokens to the longest answer divided by one of these
_ACCEPTED = (0.28, 0.22, 0.18, 0.12, 0.2)  # of 0 to 4 levels: about what the default drafts reach
_VOCABULARY = 49152


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    step: of the decode loop, when it comes; prompt, answer: token ids, of the answer at most
    max_tokens; paths: by step of the target, which nodes of the tree are right, so that it brings
    one token more than these; leaves: steps from its arrival until its client is gone, or None.
    """

    step: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int
    paths: tuple[tuple[int, ...], ...]
    leaves: int | None = None


def arrivals(requests: int, rate: float, max_tokens: int, seed: int) -> list[Arrival]:
    """A Poisson process of `rate` arrivals a step; the same for the same arguments.

    max_tokens: of the longest answer that a client asks for. Raises ValueError that names what
    cannot be.
    """
    for name, value in (("requests", requests), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}: {value} is not 1 or more")
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate: {rate} is no number above 0")
    random = np.random.default_rng(seed)
    beginnings = [_tokens(random, size) for size in _SHARED]
    times = np.cumsum(random.exponential(1 / rate, requests)).tolist()
    return [_arrival(random, int(time), beginnings, max_tokens) for time in times]


def _arrival(
    random: np.random.Generator, step: int, beginnings: list[tuple[int, ...]], most: int
) -> Arrival:
    prompt = _tokens(random, min(_length(random, _PROMPT), _LONGEST_PROMPT))
    if random.random() < _SHARING:
        prompt = beginnings[random.integers(len(beginnings))] + prompt
    asked = max(1, most // int(random.choice(_ASKED)))
    answer = min(_length(random, _ANSWER), asked)
    paths = _paths(random, answer)
    leaves = int(random.integers(1, 2 * len(paths) + 1)) if random.random() < _LEAVING else None
    return Arrival(step, prompt, _tokens(random, answer), asked, paths, leaves)


def _paths(random: np.random.Generator, answer: int) -> tuple[tuple[int, ...], ...]:
    """One node in each level, as far as guesses are right, until there is a whole answer."""
    paths = []
    while answer:
        depth = min(int(random.choice(len(_ACCEPTED), p=_ACCEPTED)), answer - 1)
        ranks = random.integers(WIDTH, size=depth).tolist()
        paths.append(tuple(level * WIDTH + rank for level, rank in enumerate(ranks)))
        answer -= depth + 1
    return tuple(paths)


def _length(random: np.random.Generator, shape: tuple[float, float]) -> int:
    return max(1, int(random.lognormal(*shape)))


def _tokens(random: np.random.Generator, size: int) -> tuple[int, ...]:
    return tuple(random.integers(_VOCABULARY, size=size).tolist())
