"""A target that is a function of the whole context, computed from the slots it is pointed to.

It stands where the model stands and is as fast as a hash. Instead of keys and values, its store
holds each slot's token; so a wrong slot, a wrong parent or a lost move changes what it says. A
token's hidden state is that token and its position.
"""

import random
from collections.abc import Sequence

import torch

from cache.kv_pool import KVPool, Swap
from workers.engine.pack import Pack, Segment
from workers.engine.runner import PassOutput
from workers.engine.sampling import TokenHistory, law
from workers.request import GenerationRequest
from workers.speculation.noise import noise

VOCABULARY = 8
EOS = 0


class Letters:
    """Token n is the n-th letter; the end of a sequence is no text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + token) for token in token_ids if token != EOS)


def logits_after(context: Sequence[int]) -> list[float]:
    generator = random.Random(repr(list(context)))
    return [generator.gauss(0, 2) - (token == EOS) for token in range(VOCABULARY)]


def plain_tokens(request: GenerationRequest) -> list[int]:
    """What plain decoding says, to its end or the cap, over the whole vocabulary every time."""
    tokens = list(request.prompt)
    ends = {*request.stop_tokens, *([] if request.ignore_eos else [EOS])}
    history = TokenHistory(request.prompt, ends, request.min_tokens)
    while len(tokens) < len(request.prompt) + request.max_tokens:
        p = law(torch.tensor(logits_after(tokens)), request.sampling, history).dense(VOCABULARY)
        race = p / noise(request.sampling.seed, len(tokens), VOCABULARY)
        tokens.append(int(race.argmax()))
        history.extend(tokens[-1:])
        if tokens[-1] in ends:
            break
    return tokens[len(request.prompt) :]


class TableTarget:
    """The part of `workers.target.Target` that the decode loop uses."""

    vocab_size = VOCABULARY
    context_length = 64
    eos_token_ids = frozenset({EOS})
    tokenizer = Letters()
    sharded = False
    feature_layers = (3,)

    def __init__(self, pages: int = 20, page_size: int = 4, host_pages: int = 0) -> None:
        self.pool = KVPool(pages, page_size, host_pages)
        self.recalled = 0
        self.failing: Exception | None = None
        self.closed = False
        self._slots: list[int | None] = [None] * (pages * page_size)
        self._host: list[list[int | None]] = [[] for _ in range(host_pages)]

    def forward(self, pack: Pack) -> PassOutput:
        if self.failing is not None:
            raise self.failing
        for swap in self.pool.swaps():
            self._swap(swap)
        rows = [row for segment in pack.segments for row in self._rows(segment)]
        logits = torch.tensor(rows).reshape(-1, VOCABULARY)
        states = list(zip(pack.tokens(), pack.positions(), strict=True))
        return PassOutput(logits, torch.tensor(states)[:, None])

    def _swap(self, swap: Swap) -> None:
        for page, place in zip(swap.pages, swap.places, strict=True):
            first = page * self.pool.page_size
            cells = slice(first, first + self.pool.page_size)
            if swap.back:
                self._slots[cells] = self._host[place]
            else:
                self._host[place] = self._slots[cells]
        self.recalled += len(swap.pages) * swap.back

    def _rows(self, segment: Segment) -> list[list[float]]:
        slots = segment.slots().tolist()
        for slot, token in zip(slots[segment.start :], segment.tokens, strict=True):
            self._slots[slot] = token
        committed = [self._slots[slot] for slot in slots[: segment.start]]
        assert None not in committed, "a committed slot was never written"
        rows = []
        for node in segment.rows:
            path: list[int] = []
            while node >= 0:
                path.insert(0, segment.tokens[node])
                node = segment.parents[node]
            rows.append(logits_after([*committed, *path]))  # type: ignore[list-item]
        return rows

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> None:
        moves = self.pool.commit(sequence, keep, tokens)
        moved = [self._slots[slot] for slot in moves.sources]
        for slot, token in zip(moves.targets, moved, strict=True):
            self._slots[slot] = token

    def close(self) -> None:
        self.closed = True
