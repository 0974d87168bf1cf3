"""The neural member: an eagle draft that follows every sequence from the target's hidden states.

Pair j of a sequence is the target's features at position j and the token at j + 1; the model turns
it into a state that guesses token j + 2. Committed pairs leave keys and values behind. Below the
last of them hangs the token tree: a node's state is made of its own token and its parent's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from workers.draft import DraftUpdate, Features
from workers.engine.eagle import EagleModel
from workers.engine.eagle_pass import EaglePass, NewRows
from workers.engine.eagle_store import Pairs
from workers.speculation.tree import SparseLaw
from workers.tree_growth import TreePath

# Pairs taken in per call, so that long prompts do not make the others wait.
CATCH_UP = 256


@dataclass(slots=True)
class _Followed:
    """One sequence. `first`: the position of its first pair; features: of positions from the first
    pair not yet taken in, one tensor per update, `waiting` in all; root: the state after the last
    pair, and what may follow."""

    pairs: Pairs
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    features: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    root: tuple[Tensor, SparseLaw] | None = None
    # The tree: where each node stands among those asked, its state, and its ancestors there.
    place: dict[TreePath, int] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)

    def hear(self, features: Features, values: Tensor) -> None:
        """Features that follow what is there; any others begin the sequence anew from there."""
        expected = self.first + self.pairs.committed + self.waiting
        if features.start != expected:
            self.first, self.features, self.root = features.start, [], None
            self.waiting = self.pairs.committed = 0
        self.features.append(values)
        self.waiting += len(values)

    def take(self, most: int) -> Tensor:
        """Up to `most` waiting features, in their order: [n, layers * hidden]."""
        waiting = torch.cat(self.features)
        self.features = [waiting[most:]] if len(waiting) > most else []
        self.waiting = len(waiting[most:])
        return waiting[:most]


def _waiting(followed: _Followed) -> int:
    return followed.waiting


class EagleMember:
    """Answers, for nodes of any number of sequences in one pass, which tokens may follow.

    int8: as `EaglePass` has it.
    """

    def __init__(self, model: EagleModel, *, int8: bool = False) -> None:
        self._pass = EaglePass(model, int8=int8)
        self._layers = model.config.feature_layers
        self._device = model.embedding.device
        self._followed: dict[int, _Followed] = {}

    def commit(self, update: DraftUpdate) -> None:
        """Learn what the target said and how it felt. An update that does not fit is ignored."""
        if update.start == 0:
            self.forget(update.sequence)
            self._followed[update.sequence] = _Followed(self._pass.new_sequence())
        followed = self._followed.get(update.sequence)
        if followed is None or len(followed.tokens) != update.start:
            return
        followed.tokens.extend(update.tokens)
        if update.features is not None:
            values = update.features.of(self._layers).to(self._device)
            followed.hear(update.features, values)

    def forget(self, sequence: int) -> None:
        """Drop a sequence, known or not."""
        if followed := self._followed.pop(sequence, None):
            followed.pairs.drop()

    def length(self, sequence: int) -> int:
        """How many tokens of it are known."""
        followed = self._followed.get(sequence)
        return 0 if followed is None else len(followed.tokens)

    def overdue(self, sequence: int) -> bool:
        """Whether so much waits that it should be taken in though nobody asks: a token's features
        are as large as some hundred tokens.
        """
        return self._followed[sequence].waiting >= CATCH_UP

    @torch.inference_mode()
    def catch_up(self, sequences: Sequence[int]) -> dict[int, SparseLaw]:
        """Take in what the target said meanwhile. What may follow the last token, for those
        sequences that are taken in wholly.
        """
        behind, rows, left = [], [], CATCH_UP
        # Who is nearly there comes first.
        for followed in sorted((self._followed[s] for s in sequences), key=_waiting):
            followed.place, followed.states, followed.pairs.nodes = {}, [], 0
            if own := self._next_pairs(followed, left):
                left -= len(own.tokens)
                behind.append(followed)
                rows.append(own)
        for followed, told in zip(behind, self._pass.run(rows, fuse=True), strict=True):
            followed.pairs.committed += followed.pairs.nodes
            followed.pairs.nodes = 0
            followed.root = told.states[-1], told.laws[0]
        return {s: root[1] for s in sequences if (root := self._root(self._followed[s]))}

    @torch.inference_mode()
    def ask(self, questions: Sequence[tuple[int, Sequence[TreePath]]]) -> list[list[SparseLaw]]:
        """What may follow the nodes at some paths of (sequence, paths), in one pass.

        A path's parent must be the root or have been asked about since the last `catch_up`.
        """
        rows = [self._nodes(self._followed[sequence], paths) for sequence, paths in questions]
        answers = self._pass.run(rows, fuse=False)
        for (sequence, paths), told in zip(questions, answers, strict=True):
            followed = self._followed[sequence]
            first = len(followed.states)
            followed.place |= {path: first + row for row, path in enumerate(paths)}
            followed.states.extend(told.states)
        return [told.laws for told in answers]

    def _root(self, followed: _Followed) -> tuple[Tensor, SparseLaw] | None:
        """What comes after the last token, once everything before it is taken in."""
        done = followed.first + followed.pairs.committed == len(followed.tokens) - 1
        return followed.root if done else None

    def _next_pairs(self, followed: _Followed, most: int) -> NewRows | None:
        """Up to `most` pairs not yet taken in."""
        start = followed.first + followed.pairs.committed
        size = min(most, followed.waiting, len(followed.tokens) - 1 - start)
        if size <= 0:
            return None
        return NewRows(
            followed.pairs,
            followed.tokens[start + 1 : start + 1 + size],
            followed.take(size),
            range(followed.pairs.committed, followed.pairs.committed + size),
            np.tri(size, dtype=np.bool_),
            wanted=1,
        )

    def _nodes(self, followed: _Followed, paths: Sequence[TreePath]) -> NewRows:
        assert followed.root is not None, "only a sequence that was taken in wholly is asked about"
        old = followed.pairs.nodes
        parents = [
            followed.root[0] if len(path) == 1 else followed.states[followed.place[path[:-1]]]
            for path in paths
        ]
        seen = np.zeros((len(paths), old + len(paths)), dtype=np.bool_)
        for row, path in enumerate(paths):
            seen[row, old + row] = True
            for depth in range(1, len(path)):
                seen[row, followed.place[path[:depth]]] = True
        last = followed.pairs.committed - 1
        return NewRows(
            followed.pairs,
            [path[-1] for path in paths],
            torch.stack(parents),
            [last + len(path) for path in paths],
            seen,
            wanted=len(paths),
        )
