"""The pool's common language: what a draft is asked, and what it answers.

A draft only guesses. Whatever it answers, late, wrong or not at all, the text stays the target's.
That is why a draft may forget a sequence (it was restarted) and simply say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from workers.speculation.tree import Proposal

if TYPE_CHECKING:  # n-gram drafts live in processes without torch
    from torch import Tensor

DraftKind = Literal["ngram", "lm", "eagle", "hybrid"]
Verification = Literal["invariant", "ratio"]

CHILDREN = 6
"""Most per node of a draft's trees, unless its spec says."""


class DraftUnavailable(RuntimeError):
    """A draft died, hangs or failed. Its sequences decode plainly until it is ready again."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A pool member, as the configuration names it.

    path:   its folder; for an `lm` without one, `layers` of the target are taken instead.
    domain: what it was made for; the router's hint. children: most per node of its trees; 1 makes
    chains.
    """

    name: str
    kind: DraftKind
    path: str | None = None
    domain: str | None = None
    verification: Verification = "invariant"
    layers: tuple[int, ...] = ()
    children: int = CHILDREN

    def __post_init__(self) -> None:
        if self.kind == "lm" and (self.path is None) == (not self.layers):
            raise ValueError(f"drafts.{self.name}: an lm draft needs either path or layers")
        if self.children < 1:
            raise ValueError(f"drafts.{self.name}: children: {self.children} is not 1 or more")
        if self.kind != "lm" and self.layers:
            raise ValueError(f"drafts.{self.name}: layers are for lm drafts")
        if not self.reads_features:
            return
        if self.path is None:
            raise ValueError(f"drafts.{self.name}: an {self.kind} draft needs a path, its folder")
        if self.verification == "ratio":
            raise ValueError(
                f"drafts.{self.name}: verification ratio is for drafts that sample, ngram and lm; "
                f"an {self.kind} draft's tree is verified by invariant"
            )

    @property
    def reads_features(self) -> bool:
        """Whether it wants the target's hidden states."""
        return self.kind in ("eagle", "hybrid")


@dataclass(frozen=True, slots=True)
class Terms:
    """What guesses must be worth. price: tokens per second that time brings otherwise; least: by
    how many nodes a tree has, the confidence below which neither another one pays nor all that are
    less likely still. A tree with as many nodes as there are numbers is full.
    """

    price: float
    least: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Guess what follows the first `length` tokens of a sequence.

    budget, depth: most nodes, most levels. ratio_seed: set under `ratio`; the draft then samples
    from its q with this seed's noise instead of taking the likeliest tokens. temperature: of the
    request; the hotter, the less a likely token is certain. terms: None to fill the budget, pay or
    not.
    """

    sequence: int
    length: int
    budget: int
    depth: int
    ratio_seed: int | None = None
    temperature: float = 0.0
    terms: Terms | None = None


@dataclass(frozen=True, slots=True)
class Features:
    """The target's hidden states at positions from `start` on, after each of some of its `layers`:
    values [positions, layers, hidden].
    """

    start: int
    layers: tuple[int, ...]
    values: Tensor

    def of(self, layers: Sequence[int]) -> Tensor:
        """Those of some layers side by side: [positions, layers * hidden].

        Raises ValueError when a layer is not among them.
        """
        columns = [self.layers.index(layer) for layer in layers]
        return self.values[:, columns].flatten(1)


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """Tokens that now stand at positions `start` and on; start 0 begins the sequence anew.

    features: of positions that the target has just run, for drafts that read them. They come one
    step after their tokens: the newest token has none.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    features: Features | None = None


class Draft(Protocol):
    """A pool member."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        """One answer per request; None where the sequence is not known up to `length`."""
        ...

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        """Learn what the target said. An update that does not fit what is known is ignored."""
        ...

    def forget(self, sequences: Sequence[int]) -> None:
        """Drop sequences, known or not."""
        ...


class DraftClient(Protocol):
    """A draft as the decode loop sees it, wherever it lives."""

    def ready(self) -> bool:
        """Whether it can be asked now. Cheap; called on every step."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Proposal | None]]:
        """Ask; call the result with a timeout in seconds to wait for the answers.

        Either may raise, DraftUnavailable or anything else.
        """
        ...

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        """Tell without waiting."""
        ...

    def forget(self, sequences: Sequence[int]) -> None:
        """Tell without waiting."""
        ...


class InlineDraft:
    """A draft in this process."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def ready(self) -> bool:
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Proposal | None]]:
        proposals = self._draft.propose(requests)
        return lambda _timeout: proposals

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        self._draft.commit(updates)

    def forget(self, sequences: Sequence[int]) -> None:
        self._draft.forget(sequences)
