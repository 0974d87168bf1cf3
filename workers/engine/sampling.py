"""From one row of logits to p: the target's law for the next token, as the request wants it.

Order: repetition, presence and frequency penalties, logit bias, what must not come here (an end
that is too early, what the answer's grammar forbids), temperature, top-k, top-p, min-p. Each node
of a token tree has its own history: the request's tokens and the node's own path.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Protocol

import torch
from torch import Tensor


class BadLogits(RuntimeError):
    """The target's scores are no numbers, so nothing can be drawn from them."""

    def __init__(self) -> None:
        super().__init__(
            "the target's logits are not finite here; float16 may have overflowed, try float32"
        )


class NothingAllowed(ValueError):
    """The answer's grammar has led to where nothing may follow, and it may not end either."""

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: it leads to where nothing may follow, not even the end")


# Enough for top-p to find its nucleus without sorting a whole vocabulary, nearly always.
FIRST_NUCLEUS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request wants its tokens drawn. `top_k` 0 and `min_p` 0 mean off; temperature 0 greedy.

    Raises ValueError that names the field.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("seed", self.seed, 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1")
        _check("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "from -2 to 2")
        rate = self.repetition_penalty  # further out, scores would leave float32
        _check("repetition_penalty", rate, 0.01 <= rate <= 100, "from 0.01 to 100")
        for token, bias in self.logit_bias:
            _check("logit_bias", bias, token >= 0 and -100 <= bias <= 100, "from -100 to 100")

    def check_vocabulary(self, size: int) -> None:
        """Refuse ids that a target with `size` tokens does not have.

        Raises ValueError that names the field.
        """
        _check("top_k", self.top_k, self.top_k <= size, f"at most the vocabulary's {size}")
        for token, _ in self.logit_bias:
            _check("logit_bias", token, token < size, f"a token id below {size}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens of the law are cut off."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


def _check(name: str, value: float, good: bool, wanted: str) -> None:
    # An integer may be too large for a float, and `isfinite` would fail on it.
    if not (isinstance(value, int) or isfinite(value)) or not good:
        raise ValueError(f"{name}: {value} is not {wanted}")


class Grammar(Protocol):
    """Which tokens may come; `workers.grammar` says what each means."""

    def advance(self, tokens: Sequence[int]) -> None: ...

    def allowed(self, path: Sequence[int]) -> Tensor | None: ...


class TokenHistory:
    """The tokens a request has seen so far, as penalties count them.

    Presence and frequency count the answer only; repetition counts the prompt as well. `ends` are
    the tokens that end the answer, which none of its first `min_tokens` may be; `grammar` is what
    all of it keeps to.
    """

    def __init__(
        self,
        prompt: Iterable[int],
        ends: Iterable[int] = (),
        min_tokens: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self._prompt = frozenset(prompt)
        self._answer: Counter[int] = Counter()
        self._ends = sorted(ends)
        self._min_tokens = min_tokens
        self._grammar = grammar
        self._size = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._answer.update(tokens)
        self._size += len(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)

    @property
    def free(self) -> bool:
        """Whether every token may come, now and from now on."""
        return self._size >= self._min_tokens and self._grammar is None

    def cut(self, scores: Tensor, path: Sequence[int]) -> Tensor:
        """scores [vocabulary] with -inf for all that cannot follow `path`; a copy if any is.

        Raises NothingAllowed.
        """
        if self._size + len(path) < self._min_tokens and self._ends:
            scores = scores.index_fill(0, torch.tensor(self._ends, device=scores.device), -inf)
        allowed = None if self._grammar is None else self._grammar.allowed(path)
        if allowed is not None:
            scores = scores.masked_fill(~allowed.to(scores.device), -inf)
        return scores

    def with_path(self, path: Iterable[int]) -> tuple[Counter[int], frozenset[int]]:
        """(counts of the answer, all tokens seen) as if `path` had been emitted."""
        counts = self._answer + Counter(path)
        return counts, self._prompt | counts.keys()


@dataclass(frozen=True, slots=True)
class Law:
    """p at one node, restricted to the tokens that can be drawn.

    ids: [K] int64 token ids; probs: [K] float64, summing to one.
    """

    ids: Tensor
    probs: Tensor

    def dense(self, vocabulary: int) -> Tensor:
        """[vocabulary] float64."""
        full = torch.zeros(vocabulary, dtype=torch.float64, device=self.probs.device)
        return full.index_copy_(0, self.ids, self.probs)


def law(
    logits: Tensor, params: SamplingParams, history: TokenHistory, path: Sequence[int] = ()
) -> Law:
    """p after `history` and `path` (the tokens from the last committed one down to this node).

    logits: [vocabulary], any float dtype; left unchanged. Raises BadLogits or
    NothingAllowed.
    """
    scores = adjusted(logits.float(), params, history, path)
    highest, best = scores.max(0)
    if not highest.isfinite():
        raise BadLogits
    if params.greedy:
        return Law(best[None], torch.ones(1, dtype=torch.float64, device=best.device))
    # Taken from the best score, which stays 0: the least temperature makes no inf - inf.
    return _truncated((scores.double() - highest) / params.temperature, params)


def greedy_tokens(logits: Tensor) -> list[int | None]:
    """The plain argmax of every row of logits [N, vocabulary], in one operation; None where the
    scores are no numbers.
    """
    highest, tokens = logits.max(-1)
    return [
        token if finite else None
        for token, finite in zip(tokens.tolist(), highest.isfinite().tolist(), strict=True)
    ]


def adjusted(
    scores: Tensor, params: SamplingParams, history: TokenHistory, path: Sequence[int]
) -> Tensor:
    """scores [vocabulary] with penalties, bias and bars; a copy where there are any."""
    if params.penalised:
        scores = _penalised(scores.float().clone(), params, *history.with_path(path))
    if params.logit_bias:
        scores = scores.float()
        ids, values = zip(*params.logit_bias, strict=True)
        bias = torch.tensor(values, dtype=scores.dtype, device=scores.device)
        scores = scores.index_add(0, torch.tensor(ids, device=scores.device), bias)
    return scores if history.free else history.cut(scores, path)


def _penalised(
    scores: Tensor, params: SamplingParams, counts: Counter[int], seen: frozenset[int]
) -> Tensor:
    """Repetition as in CTRL (Keskar 2019), presence and frequency as in OpenAI's API."""
    device = scores.device
    if params.repetition_penalty != 1 and seen:
        ids = torch.tensor(sorted(seen), device=device)
        old, rate = scores[ids], params.repetition_penalty
        scores[ids] = torch.where(old > 0, old / rate, old * rate)
    if counts:
        ids = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=scores.dtype, device=device)
        scores[ids] -= params.frequency_penalty * times + params.presence_penalty
    return scores


def _truncated(scores: Tensor, params: SamplingParams) -> Law:
    """Top-k, top-p and min-p."""
    ids = torch.arange(len(scores), device=scores.device)
    if 0 < params.top_k < len(scores):
        keep = _largest(scores, params.top_k)
        ids, scores = ids[keep], scores[keep]
    probs = scores.softmax(0)
    if params.top_p < 1:
        ids, probs = _keep(ids, probs, _largest(probs, _nucleus_size(probs, params.top_p)))
    if params.min_p > 0:
        ids, probs = _keep(ids, probs, probs >= params.min_p * probs.max())
    return Law(ids, probs)


def _keep(ids: Tensor, probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    kept = probs[mask]
    return ids[mask], kept / kept.sum()


def _largest(values: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest values; of equal ones the first, as argmax would have it, so that
    one token is left of top_k 1 and of a tiny top_p: the greedy one.
    """
    least = values.topk(count).values[-1]
    keep = values > least
    equal = (values == least).nonzero()[:, 0]
    keep[equal[: count - int(keep.sum())]] = True
    return keep


def _nucleus_size(probs: Tensor, top_p: float) -> int:
    """How many of the likeliest tokens it takes to hold `top_p`."""
    size = min(FIRST_NUCLEUS, len(probs))
    while True:
        reached = (probs.topk(size).values.cumsum(0) >= top_p).nonzero()
        if len(reached):
            return int(reached[0, 0]) + 1
        if size == len(probs):  # rounding: all of it sums to a hair less than top_p
            return size
        size = min(8 * size, len(probs))
