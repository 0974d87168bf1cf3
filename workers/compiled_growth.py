"""Trees grown by compiled code: what `workers.tree_growth` says, in a fraction of the time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers import ngram_member
from workers.calibration import FARTHEST, FLOOR, Calibration, Pool, Regime
from workers.draft import DraftRequest
from workers.engine.kernels import growth
from workers.engine.kernels.ngram import LIKELIEST as COUNTED_APART
from workers.engine.kernels.ngram import Scratch, scratch_for, text_of
from workers.ngram_member import NgramMember
from workers.speculation.tree import ROOT, Proposal, SparseLaw, TokenTree, level_order
from workers.training.ngram_table import COUNTED, LIKELIEST, ORDER
from workers.tree_growth import (
    LEAST_CONFIDENCE,
    NEGLIGIBLE,
    NEURAL,
    ROUND_NODES,
    SUFFIX,
    TABLE,
    TreePath,
    least_of,
    pays,
)

assert LIKELIEST == COUNTED_APART, "the kernel tells fewer followers apart, or more"
_MEMBERS = (SUFFIX, TABLE, NEURAL)  # as the kernel numbers them
_FIRST_TOKENS = 1024
_NO_TOKENS = np.empty(0, np.int32)
# Room that is there at first, for nodes and for laws.
_NODES, _LAWS, _LAW_SIZE = 64, 16, 8


class CompiledGrowth:
    """`workers.tree_growth.Growth`: all that is the same from one tree to the next."""

    def __init__(
        self, ngram: NgramMember | None, calibration: Calibration, *, children: int
    ) -> None:
        self._ngram = ngram
        self._calibration = calibration
        self._children = children
        self._pools = {t: _pools_of(regime) for t, regime in calibration.regimes.items()}
        table = None if ngram is None else ngram.table
        nothing = np.empty((ORDER, 0), np.int32), np.empty(0, np.int32)
        columns, following = nothing if table is None else (table.columns, table.following)
        self.text = text_of(columns, following)
        self._scratch = scratch_for(_FIRST_TOKENS, ORDER, COUNTED)
        self._probe()

    def _probe(self) -> None:
        """What is compiled at its first call is not so in somebody's request."""
        request = DraftRequest(0, 0, budget=1, depth=2)
        tree = CompiledTree(request, self._rules(request), self, _NO_TOKENS, neural=True)
        tree.hear((0,), SparseLaw((1,), (0.5,)))
        tree.grow()
        tree.questions(0.0, 1.0)

    def ready(self, request: DraftRequest) -> bool:
        """Nothing has to be counted before."""
        return True

    def tree(self, request: DraftRequest, *, neural: bool) -> CompiledTree:
        """As `Growth` has it."""
        tokens = _NO_TOKENS
        if self._ngram is not None:
            # A copy: while it is looked at, an array cannot grow.
            tokens = np.frombuffer(self._ngram.tokens(request.sequence), np.int32).copy()
        return CompiledTree(request, self._rules(request), self, tokens, neural=neural)

    def _rules(self, request: DraftRequest) -> growth.Rules:
        return growth.Rules(
            pools=self._pools[self._calibration.nearest(request.temperature)],
            least=np.array(least_of(request), np.float64),
            depth=request.depth,
            children=self._children,
            ngrams=self._ngram is not None,
            order=ORDER,
            local_weight=ngram_member.LOCAL_WEIGHT,
            ngram_negligible=ngram_member.NEGLIGIBLE,
            counted=COUNTED,
            negligible=NEGLIGIBLE,
            least_confidence=LEAST_CONFIDENCE,
            floor=FLOOR,
            farthest=FARTHEST,
        )

    def scratch(self, tokens: int) -> Scratch:
        """For a request with so many."""
        if tokens > self._scratch.matches.shape[1]:
            self._scratch = scratch_for(2 * tokens, ORDER, COUNTED)
        return self._scratch


class CompiledTree:
    """`workers.tree_growth.Tree`."""

    def __init__(
        self,
        request: DraftRequest,
        rules: growth.Rules,
        own: CompiledGrowth,
        tokens: NDArray[np.int32],
        *,
        neural: bool,
    ) -> None:
        self.request = request
        self.hoped = 0.0
        self._rules = rules
        self._own = own
        self._tokens = tokens
        self._neural = neural
        size = len(rules.least)
        self._grown = growth.Grown(
            np.empty(size, np.int32),
            np.empty(size, np.float64),
            np.empty(size, np.int32),
            np.empty(size, np.int32),
        )
        self._size = 0
        self._nodes, self._known = _room_for_nodes(_NODES, rules.children), 1
        self._nodes.parent[0] = self._nodes.token[0] = -1
        self._nodes.depth[0] = 0
        self._nodes.heard[0] = self._nodes.guesses[0] = -1
        self._numbers: dict[TreePath, int] = {(): 0}
        self._laws, self._heard = _room_for_laws(_LAWS, _LAW_SIZE), 0

    def hear(self, path: TreePath, law: SparseLaw) -> None:
        """As `Tree` has it."""
        node, size = self._number_of(path), len(law.ids)
        laws, width = self._laws, self._laws.ids.shape[1]
        if self._heard == len(laws.sizes) or size > width:
            laws = self._laws = _more(laws, _room_for_laws(2 * len(laws.sizes), max(size, width)))
        laws.sizes[self._heard] = size
        laws.ids[self._heard, :size] = law.ids
        laws.probabilities[self._heard, :size] = law.probs
        self._nodes.heard[node], self._nodes.guesses[node] = self._heard, -1
        self._heard += 1

    def grow(self) -> None:
        """As `Tree` has it."""
        budget, children = len(self._rules.least), self._rules.children
        self._make_room(budget)
        most = children * (budget + 1)
        waiting = growth.Waiting(
            np.empty(most, np.float64), *(np.empty(most, np.int32) for _ in range(3))
        )
        self._size, self._known = growth.grow(self._sources(), self._known, waiting, self._grown)

    def questions(self, round_s: float, share: float) -> list[TreePath]:
        """As `Tree` has it."""
        if not self._neural or not len(self._rules.least):
            return []
        worths = np.empty(1 + self._size, np.float64)
        growth.worths(self._sources(), self._grown, self._size, worths)
        best = [int(place) for place in np.argsort(-worths, kind="stable")[:ROUND_NODES]]
        best = [place for place in best if worths[place] >= 0]
        self.hoped = float(worths[best].sum())
        if not best or not pays(self.request, self.hoped, round_s, share):
            return []
        return [self._path_of(place - 1) for place in best]

    def worth(self) -> float:
        """As `Tree` has it."""
        brings = self._grown.confidence[: self._size].sum()
        return float(brings - self._rules.least[: self._size].sum())

    def lose_neural(self) -> None:
        """As `Tree` has it."""
        self._neural = False

    def proposal(self) -> Proposal:
        """As `Tree` has it."""
        grown, size = self._grown, self._size
        parents = grown.parent[:size].tolist()
        order = list(level_order(parents))
        place = dict(zip(order, range(size), strict=True)) | {ROOT: ROOT}
        return Proposal(
            TokenTree(
                tuple(self._nodes.token[grown.node[order]].tolist()),
                tuple(place[parents[node]] for node in order),
            ),
            tuple(grown.confidence[order].tolist()),
            members=tuple(_MEMBERS[member] for member in grown.member[order].tolist()),
        )

    def _sources(self) -> growth.Sources:
        return growth.Sources(
            rules=self._rules,
            text=self._own.text,
            scratch=self._own.scratch(len(self._tokens)),
            tokens=self._tokens,
            laws=self._laws,
            nodes=self._nodes,
        )

    def _number_of(self, path: TreePath) -> int:
        """Of the node at a path, which there is from now on."""
        found = self._numbers.get(path)
        if found is None:
            parent = self._number_of(path[:-1])
            self._make_room(1)
            found = int(growth.child_of(self._nodes, self._known, parent, path[-1]))
            if found == self._known:
                growth.add_child(self._nodes, self._known, parent, path[-1])
                self._known += 1
            self._numbers[path] = found
        return found

    def _path_of(self, place: int) -> TreePath:
        """Down to a node of the tree."""
        node = 0 if place < 0 else int(self._grown.node[place])
        climb, number = [], node
        while number:
            climb.append(int(self._nodes.token[number]))
            number = int(self._nodes.parent[number])
        path = tuple(reversed(climb))
        self._numbers[path] = node
        return path

    def _make_room(self, nodes: int) -> None:
        while self._known + nodes > len(self._nodes.token):
            room = _room_for_nodes(2 * len(self._nodes.token), self._rules.children)
            self._nodes = _more(self._nodes, room)


def _room_for_nodes(nodes: int, children: int) -> growth.Nodes:
    return growth.Nodes(
        token=np.empty(nodes, np.int32),
        parent=np.empty(nodes, np.int32),
        depth=np.empty(nodes, np.int32),
        heard=np.empty(nodes, np.int32),
        guesses=np.empty(nodes, np.int32),
        guess_token=np.empty((nodes, children), np.int32),
        guess_confidence=np.empty((nodes, children), np.float64),
        guess_member=np.empty((nodes, children), np.int32),
    )


def _room_for_laws(laws: int, size: int) -> growth.Laws:
    return growth.Laws(
        np.empty(laws, np.int32), np.empty((laws, size), np.int32), np.empty((laws, size))
    )


def _more(old: Any, new: Any) -> Any:
    """All parts of `old` at the beginning of those of `new`."""
    for was, now in zip(old, new, strict=True):
        now[tuple(slice(size) for size in was.shape)] = was
    return new


def _pools_of(regime: Regime) -> NDArray[np.float64]:
    return np.array([_weights(pool) for pool in (*regime.ngram, *regime.both, regime.neural)])


def _weights(pool: Pool) -> tuple[float, ...]:
    return pool.bias, pool.ngram, pool.neural, pool.surer, pool.farther
