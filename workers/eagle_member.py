"""The neural member: an eagle draft that follows every sequence from the target's hidden states.

Pair j of a sequence is the target's features at position j and the token at j + 1; the model turns
it into a state that guesses token j + 2. Committed pairs leave keys and values behind. Below the
last of them hangs the token tree: a node's state is made of its own token and its parent's state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.draft import DraftUpdate, Features
from workers.engine.eagle import EagleModel
from workers.engine.eagle_pass import EaglePass, KeysAndValues, NewRows
from workers.speculation.tree import SparseLaw
from workers.tree_growth import TreePath

# Pairs taken in per call, so that long prompts do not make the others wait.
CATCH_UP = 256
# Tokens of each law that are told.
LIKELIEST = 8


@dataclass(slots=True)
class _Followed:
    """One sequence. `first`: the position of its first pair; features: of positions from the first
    pair not yet taken in, one tensor per update, `waiting` in all; root: the state after the last
    pair."""

    kv: KeysAndValues
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    features: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    root: Tensor | None = None
    # The tree: where each node stands among those asked, its state, and its ancestors there.
    place: dict[TreePath, int] = field(default_factory=dict)
    states: list[Tensor] = field(default_factory=list)

    def hear(self, features: Features, values: Tensor) -> None:
        """Features that follow what is there; any others begin the sequence anew from there."""
        expected = self.first + self.kv.committed + self.waiting
        if features.start != expected:
            self.first, self.features, self.root = features.start, [], None
            self.waiting = self.kv.committed = 0
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
    """Answers, for nodes of any number of sequences in one pass, which tokens may follow."""

    def __init__(self, model: EagleModel) -> None:
        self._model = model
        self._pass = EaglePass(model)
        self._layers = model.config.feature_layers
        self._ids = model.vocabulary.tolist()
        self._followed: dict[int, _Followed] = {}

    def commit(self, update: DraftUpdate) -> None:
        """Learn what the target said and how it felt. An update that does not fit is ignored."""
        if update.start == 0:
            self._followed[update.sequence] = _Followed(self._pass.new_sequence())
        followed = self._followed.get(update.sequence)
        if followed is None or len(followed.tokens) != update.start:
            return
        followed.tokens.extend(update.tokens)
        if update.features is not None:
            values = update.features.of(self._layers).to(self._model.embedding.device)
            followed.hear(update.features, values)

    def forget(self, sequence: int) -> None:
        """Drop a sequence, known or not."""
        self._followed.pop(sequence, None)

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
            followed.place, followed.states, followed.kv.nodes = {}, [], 0
            if own := self._next_pairs(followed, left):
                left -= len(own.tokens)
                behind.append(followed)
                rows.append(own)
        for followed, states in zip(behind, self._run(rows), strict=True):
            followed.kv.committed += followed.kv.nodes
            followed.kv.nodes = 0
            followed.root = states[-1]
        roots = {s: root for s in sequences if (root := self._root(self._followed[s])) is not None}
        return dict(zip(roots, self._laws(list(roots.values())), strict=True))

    @torch.inference_mode()
    def ask(self, questions: Sequence[tuple[int, Sequence[TreePath]]]) -> list[list[SparseLaw]]:
        """What may follow the nodes at some paths of (sequence, paths), in one pass.

        A path's parent must be the root or have been asked about since the last `catch_up`.
        """
        rows = [self._nodes(self._followed[sequence], paths) for sequence, paths in questions]
        passed = self._run(rows)
        for (sequence, paths), states in zip(questions, passed, strict=True):
            followed = self._followed[sequence]
            first = len(followed.states)
            followed.place |= {path: first + row for row, path in enumerate(paths)}
            followed.states.extend(states)
        laws = iter(self._laws([state for states in passed for state in states]))
        return [[next(laws) for _ in paths] for _, paths in questions]

    def _root(self, followed: _Followed) -> Tensor | None:
        """The state after the last token, once everything before it is taken in."""
        done = followed.first + followed.kv.committed == len(followed.tokens) - 1
        return followed.root if done else None

    def _next_pairs(self, followed: _Followed, most: int) -> NewRows | None:
        """Up to `most` pairs not yet taken in."""
        start = followed.first + followed.kv.committed
        size = min(most, followed.waiting, len(followed.tokens) - 1 - start)
        if size <= 0:
            return None
        return NewRows(
            followed.kv,
            followed.tokens[start + 1 : start + 1 + size],
            self._model.fuse(followed.take(size)),
            range(followed.kv.committed, followed.kv.committed + size),
            torch.ones(size, size, dtype=torch.bool).tril(),
        )

    def _nodes(self, followed: _Followed, paths: Sequence[TreePath]) -> NewRows:
        assert followed.root is not None, "only a sequence that was taken in wholly is asked about"
        old = followed.kv.nodes
        parents = [
            followed.root if len(path) == 1 else followed.states[followed.place[path[:-1]]]
            for path in paths
        ]
        seen = torch.zeros(len(paths), old + len(paths), dtype=torch.bool)
        for row, path in enumerate(paths):
            seen[row, old + row] = True
            for depth in range(1, len(path)):
                seen[row, followed.place[path[:depth]]] = True
        last = followed.kv.committed - 1
        return NewRows(
            followed.kv,
            [path[-1] for path in paths],
            torch.stack(parents),
            [last + len(path) for path in paths],
            seen,
        )

    def _run(self, rows: Sequence[NewRows]) -> list[Tensor]:
        """One pass over all rows: their new states [rows, hidden], by sequence."""
        if not rows:
            return []
        return list(self._pass.run(rows).split([len(own.tokens) for own in rows]))

    def _laws(self, states: Sequence[Tensor]) -> list[SparseLaw]:
        """The likeliest tokens after each state [hidden], and their probabilities."""
        if not states:
            return []
        probs = self._pass.logits(torch.stack(list(states))).float().softmax(-1)
        top = probs.topk(min(LIKELIEST, probs.shape[-1]), -1)
        return [
            SparseLaw(tuple(self._ids[token] for token in ids), tuple(own))
            for ids, own in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
