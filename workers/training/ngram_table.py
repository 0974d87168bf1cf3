"""What an n-gram draft knows of its domain: the target's own outputs, indexed by their contexts.

The file is the text itself (a few hundred kB); the index is rebuilt at load, in well under a
second: positions sorted by the tokens before them, nearest first, so that all occurrences of a
context of any order are one range. It needs numpy only.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from workers.engine.vocabulary import Vocabulary

ORDER = 6
_BREAK = -1  # stands before each sequence: no context reaches across it
TOKENS = "tokens.npz"
_CONFIG = "config.json"
COUNTED = 2048
"""Short contexts occur thousands of times; this many evenly spaced occurrences estimate them."""

LIKELIEST = 8
"""Followers of a context that are told apart; a proposal never has as many children."""


@dataclass(frozen=True, slots=True)
class Followers:
    """What followed a context: how many tokens, how many different ones, and the most frequent."""

    total: int
    distinct: int
    likeliest: tuple[tuple[int, int], ...]  # (token, times), most frequent first


class NgramTable:
    """Next-token counts after contexts of up to `ORDER` tokens.

    tokens: all sequences, each preceded by -1. columns [ORDER, n]: the k-th token before each
    place, k from 1 on, in the lexical order of the columns, -1 from a break on; following [n]: the
    token at each of these places.

    Raises ValueError when they are none of the vocabulary's.
    """

    def __init__(self, tokens: NDArray[np.int32], vocabulary: Vocabulary, card: dict[str, Any]):
        if tokens.ndim != 1 or not len(tokens) or tokens[0] != _BREAK:
            raise ValueError("its tokens are no sequences")
        if tokens.min() < _BREAK or tokens.max() >= vocabulary.size:
            raise ValueError(f"its tokens are not all of the {vocabulary.size} of the vocabulary")
        self.vocabulary = vocabulary
        self.card = card
        self._tokens = tokens
        self.columns, self.following = _sorted_contexts(tokens)
        # bisect probes single elements, which numpy hands out 4 times slower.
        self._columns = [memoryview(column) for column in self.columns]
        self._range = lru_cache(maxsize=1 << 14)(self._count)

    @classmethod
    def build(
        cls, sequences: Sequence[Sequence[int]], vocabulary: Vocabulary, card: dict[str, Any]
    ) -> "NgramTable":
        """A token that is none of the vocabulary's, as a target's padding is, ends a sequence.

        Raises ValueError when there is nothing to learn from.
        """
        if not any(len(sequence) > 1 for sequence in sequences):
            raise ValueError("prompts: the target's answers to them are empty; give more prompts")
        flat = [token for sequence in sequences for token in (_BREAK, *sequence)]
        tokens = np.array(flat, dtype=np.int32)
        return cls(np.where(tokens < vocabulary.size, tokens, _BREAK), vocabulary, card)

    @classmethod
    def load(cls, folder: Path) -> "NgramTable":
        """Raises ValueError when the folder holds no table."""
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            with (folder / TOKENS).open("rb") as file, np.load(file) as saved:
                tokens = saved["tokens"].astype(np.int32) - 1
            return cls(tokens, Vocabulary(**config["vocabulary"]), config["card"])
        except FileNotFoundError as error:
            why = f"{Path(error.filename).name} is missing"
        except (OSError, EOFError, LookupError, TypeError, ValueError, BadZipFile) as error:
            why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{folder}: holds no n-gram table ({why}); make one with `outrider prepare-draft`"
        )

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kind = np.uint16 if self.vocabulary.size < 2**16 - 1 else np.uint32
        np.savez_compressed(folder / TOKENS, tokens=(self._tokens + 1).astype(kind))
        config = {
            "kind": "ngram",
            "order": ORDER,
            "vocabulary": {
                "size": self.vocabulary.size,
                "fingerprint": self.vocabulary.fingerprint,
            },
            "card": self.card,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / _CONFIG).write_text(text + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Number of learned tokens."""
        return int((self._tokens != _BREAK).sum())

    def sequences(self) -> list[list[int]]:
        """What it was built from."""
        parts = np.split(self._tokens, np.flatnonzero(self._tokens == _BREAK))
        return [part[1:].tolist() for part in parts if len(part) > 1]

    def followers(self, context: Sequence[int]) -> list[Followers]:
        """What followed the last 1, 2, ... tokens of `context`, as far as they occur."""
        found = []
        low, high = 0, len(self.following)
        for column, token in zip(self._columns, reversed(context), strict=False):
            low, high = (
                bisect_left(column, token, low, high),
                bisect_right(column, token, low, high),
            )
            if low == high:
                break
            found.append(self._range(low, high))
        return found

    def _count(self, low: int, high: int) -> Followers:
        step = -(-(high - low) // COUNTED)
        return followers_of(Counter(self.following[low:high:step].tolist()))


def followers_of(counts: Counter[int]) -> Followers:
    """Of a context, from how often each token followed it."""
    return Followers(counts.total(), len(counts), tuple(counts.most_common(LIKELIEST)))


def _sorted_contexts(
    tokens: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`NgramTable`'s columns, and what follows."""
    places = np.flatnonzero(tokens != _BREAK)
    columns = []
    alive = np.ones(len(places), dtype=bool)
    for back in range(1, ORDER + 1):
        before = tokens[np.maximum(places - back, 0)]  # the first of all is a break
        alive &= before != _BREAK
        columns.append(np.where(alive, before, _BREAK).astype(np.int32))
    order = np.lexsort(columns[::-1])
    return np.array([column[order] for column in columns]), tokens[places][order]
