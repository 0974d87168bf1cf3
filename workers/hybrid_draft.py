"""Drafts that grow one tree from what several members say: `ngram`, `eagle`, and both as `hybrid`.

One class, so that there is one way to grow a tree: an `ngram` draft has no neural member, an
`eagle` draft no n-grams.

No torch here: n-gram drafts live in processes that do without it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from workers.calibration import CALIBRATION, UNCALIBRATED, Calibration
from workers.draft import CHILDREN, DraftKind, DraftRequest, DraftSpec, DraftUpdate
from workers.engine.vocabulary import vocabulary_of
from workers.ngram_member import NgramMember
from workers.sampled_proposal import Comb
from workers.speculation.tree import Proposal
from workers.training.ngram_table import TOKENS, NgramTable
from workers.tree_growth import NEURAL_SHARE, Growth, PlainGrowth, Tree, TreePath

try:
    from workers.compiled_growth import CompiledGrowth
except (ImportError, RuntimeError):  # no numba for this machine, or no place for what it compiles
    CompiledGrowth = None  # type: ignore[assignment, misc]

if TYPE_CHECKING:
    from workers.eagle_member import EagleMember

# Siblings that are sampled under the ratio test.
SAMPLED = 4
# The weight of the newest round in what rounds take and bring. What every step leaves of the
# former, and how far it leads the latter back to the first guess: what did not pay is tried again.
_NEWEST, _FORGET, _DOUBT = 0.05, 0.998, 0.005


class Rounds:
    """What rounds of questions take and bring. seconds: per tree that is asked about; share: tokens
    that it brings, less what their rows cost, of those that are hoped for.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._hoped, self._brought = 1.0, NEURAL_SHARE

    @property
    def share(self) -> float:
        return self._brought / self._hoped

    def forget(self) -> None:
        """A step is over."""
        self.seconds *= _FORGET
        self._brought += _DOUBT * (NEURAL_SHARE * self._hoped - self._brought)

    def learn(self, asked: Sequence[Tree], before: Sequence[float], took: float) -> None:
        """A round about some trees, which were worth something before."""
        own = took / len(asked)
        self.seconds = self.seconds or own
        # A long prompt may have been read.
        self.seconds += _NEWEST * (min(own, 2 * self.seconds) - self.seconds)
        for tree, was in zip(asked, before, strict=True):
            self._hoped += _NEWEST * (tree.hoped - self._hoped)
            self._brought += _NEWEST * (tree.worth() - was - self._brought)


class HybridDraft:
    """A pool member (`workers.draft.Draft`) with at least one of two kinds of members."""

    def __init__(
        self,
        name: str,
        ngram: NgramMember | None,
        eagle: EagleMember | None,
        calibration: Calibration = UNCALIBRATED,
        *,
        children: int = CHILDREN,
    ) -> None:
        assert ngram is not None or eagle is not None, "a draft without members cannot guess"
        self.name = name
        self._ngram = ngram
        self._eagle = eagle
        self._members = [member for member in (ngram, eagle) if member is not None]
        self._sampled = PlainGrowth(ngram, calibration, children=children)
        self._growth: Growth = self._sampled
        if CompiledGrowth is not None:
            self._growth = CompiledGrowth(ngram, calibration, children=children)
        self._children = children
        self._rounds = Rounds()

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            for member in self._members:
                member.commit(update)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            for member in self._members:
                member.forget(sequence)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        known = [r for r in requests if self._members[0].length(r.sequence) == r.length]
        # One still busy with its prompt guesses nothing for now.
        answers = {r.sequence: Proposal.empty() for r in known}
        loose = [r for r in known if r.ratio_seed is None and self._growth.ready(r)]
        answers |= self._grow(loose)
        drawn = [r for r in known if r.ratio_seed is not None and self._sampled.ready(r)]
        answers |= {r.sequence: self._sample(r) for r in drawn}
        return [answers.get(r.sequence) for r in requests]

    def _grow(self, requests: Sequence[DraftRequest]) -> dict[int, Proposal]:
        """All trees together: n-grams at once, then rounds of questions to the neural member."""
        neural = self._eagle is not None
        trees = [self._growth.tree(request, neural=neural) for request in requests]
        if self._eagle is not None:
            numbers = [request.sequence for request in requests]
            self._eagle.catch_up([number for number in numbers if self._eagle.overdue(number)])
        for tree in trees:
            tree.grow()
        rounds = self._rounds
        rounds.forget()
        while asking := [
            (tree, paths)
            for tree in trees
            if (paths := tree.questions(rounds.seconds, rounds.share))
        ]:
            before = [tree.worth() for tree, _ in asking]
            began = perf_counter()
            self._ask(asking)
            rounds.learn([tree for tree, _ in asking], before, perf_counter() - began)
        return {tree.request.sequence: tree.proposal() for tree in trees}

    def _ask(self, asking: Sequence[tuple[Tree, Sequence[TreePath]]]) -> None:
        """One round of questions, and the trees as they grow with the answers."""
        if at_root := [tree for tree, paths in asking if paths == [()]]:
            self._ask_roots(at_root)
        if below := [(tree, paths) for tree, paths in asking if paths != [()]]:
            self._ask_nodes(below)
        for tree, _ in asking:
            tree.grow()

    def _ask_roots(self, trees: Sequence[Tree]) -> None:
        assert self._eagle is not None, "nobody else is asked"
        roots = self._eagle.catch_up([tree.request.sequence for tree in trees])
        for tree in trees:
            if tree.request.sequence in roots:
                tree.hear((), roots[tree.request.sequence])
            else:  # a long prompt is still being read, or the draft was restarted meanwhile
                tree.lose_neural()

    def _ask_nodes(self, asking: Sequence[tuple[Tree, Sequence[TreePath]]]) -> None:
        assert self._eagle is not None, "nobody else is asked"
        told = self._eagle.ask([(tree.request.sequence, paths) for tree, paths in asking])
        for (tree, paths), laws in zip(asking, told, strict=True):
            for path, law in zip(paths, laws, strict=True):
                tree.hear(path, law)

    def _sample(self, request: DraftRequest) -> Proposal:
        """For the ratio test, which n-grams alone are asked for."""
        tree = self._sampled.tree(request, neural=False)
        comb = Comb(request, min(SAMPLED, self._children))
        while comb.open:
            comb.grow(tree.law(comb.path))
        return comb.proposal()


def load_hybrid_draft(spec: DraftSpec, target: Path, *, threads: int, device: str) -> HybridDraft:
    """An `ngram`, `eagle` or `hybrid` draft for the target in folder `target`.

    Raises ValueError when its folder is none, or made for another target.
    """
    folder = Path(spec.path) if spec.path else None
    ngram: NgramMember | None = None
    eagle: EagleMember | None = None
    if spec.kind != "eagle":
        ngram = _load_ngram(spec, folder and member_folder(spec.kind, folder, "ngram"), target)
    if spec.kind != "ngram":
        assert folder is not None, "DraftSpec lets no such draft pass without a path"
        own = member_folder(spec.kind, folder, "eagle")
        eagle = _load_eagle(own, target, f"drafts.{spec.name}", threads, device)
    calibration = UNCALIBRATED  # a table alone does without: its own probabilities are near enough
    if folder and (spec.kind != "ngram" or (folder / CALIBRATION).is_file()):
        calibration = Calibration.load(folder)
    return HybridDraft(spec.name, ngram, eagle, calibration, children=spec.children)


def member_folder(kind: DraftKind, folder: Path, member: str) -> Path:
    """Where a draft of some kind keeps its `ngram` or `eagle` member: a hybrid has a folder each,
    and its calibration beside them.
    """
    return folder / member if kind == "hybrid" else folder


def kind_of(folder: Path) -> DraftKind | None:
    """What kind of draft a folder holds; None where it holds none."""
    if (folder / "eagle" / "config.json").is_file():
        return "hybrid"
    if (folder / TOKENS).is_file():
        return "ngram"
    config = folder / "config.json"
    if not config.is_file():
        return None
    # Only what reads one target's hidden states has to say whose.
    return "eagle" if "target" in json.loads(config.read_text(encoding="utf-8")) else "lm"


def feature_layers(spec: DraftSpec) -> tuple[int, ...]:
    """Which of the target's layers an `eagle` or `hybrid` draft reads.

    Raises ValueError when its folder is none.
    """
    from workers.engine.eagle import read_eagle_config

    assert spec.path is not None
    folder = member_folder(spec.kind, Path(spec.path), "eagle")
    return read_eagle_config(folder)[0].feature_layers


def _load_ngram(spec: DraftSpec, folder: Path | None, target: Path) -> NgramMember:
    if folder is None:
        return NgramMember(None)
    table = NgramTable.load(folder)
    vocabulary_of(target).check_same(table.vocabulary, f"drafts.{spec.name}")
    return NgramMember(table)


def _load_eagle(folder: Path, target: Path, what: str, threads: int, device: str) -> EagleMember:
    import torch

    from workers.eagle_member import EagleMember
    from workers.engine.compiled_eagle import can_compile
    from workers.engine.eagle import load_eagle

    torch.set_num_threads(threads)
    model = load_eagle(folder, target, what).to(torch.device(device))
    if not can_compile(model):
        return EagleMember(model)
    # A draft only guesses: rounded so, the shipped ones are right as often (tau 2.787 and 2.782).
    return EagleMember(model.to(torch.bfloat16), int8=True)
