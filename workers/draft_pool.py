"""All drafts as one: who asks whom, and what happens when one of them does not answer."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

from workers.draft import (
    DraftClient,
    DraftRequest,
    DraftUnavailable,
    DraftUpdate,
    Features,
    Terms,
)
from workers.speculation.tree import Proposal, SparseLaw, TokenTree

logger = logging.getLogger("outrider.draft_pool")

# Of a proposal that is sampled, where as many nodes as pay are asked for: what was drawn must not
# decide which of them are verified, so that it cannot be cut.
_SAMPLED_NODES = 8

Waiter = Callable[[float], list[Proposal | None]]


@dataclass(frozen=True, slots=True)
class Asking:
    """A sequence that wants a proposal: its tokens, at most `budget` nodes and `depth` levels;
    seed and temperature are its request's; terms as `DraftRequest` has them."""

    sequence: int
    draft: str
    tokens: Sequence[int]
    budget: int
    depth: int
    seed: int
    temperature: float
    terms: Terms | None = None


class DraftPool:
    """The pool members by name.

    ratio: names of those verified by the ratio test; readers: of those that read the target's
    hidden states; vocab_size: ids from here on are no tokens of
    the target, and a proposal that holds one is thrown away.
    faults counts, by draft, the proposals that were not had.
    """

    def __init__(
        self,
        clients: Mapping[str, DraftClient],
        *,
        vocab_size: int,
        timeout_s: float,
        ratio: Collection[str] = (),
        readers: Collection[str] = (),
    ) -> None:
        self._clients = dict(clients)
        self._vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._ratio = frozenset(ratio)
        self._readers = frozenset(readers)
        self.faults: Counter[str] = Counter()
        self._departed: dict[str, list[int]] = {name: [] for name in clients}

    def __contains__(self, draft: str) -> bool:
        return draft in self._clients

    def names(self) -> tuple[str, ...]:
        return tuple(self._clients)

    def propose(self, askings: Sequence[Asking]) -> dict[int, Proposal]:
        """Proposals by sequence: one call per draft, all its sequences at once.

        A sequence without one decodes plainly in this step.
        """
        asked = [
            (name, group, self._ask(name, group)) for name, group in _by_draft(askings).items()
        ]
        deadline = time.monotonic() + self._timeout_s
        found: dict[int, Proposal] = {}
        for name, group, waiter in asked:
            if waiter is not None:
                found.update(self._answers(name, group, waiter, deadline))
        return found

    def commit(
        self,
        draft: str,
        sequence: int,
        start: int,
        tokens: Sequence[int],
        features: Features | None = None,
    ) -> None:
        """Tell a draft what the target said. One that is down is told everything later, but for
        features: it reads on from where they go on.
        """
        if draft not in self._readers:
            features = None
        with self._blamed(draft):
            if (tokens or features) and self._clients[draft].ready():
                update = DraftUpdate(sequence, start, tuple(tokens), features)
                self._clients[draft].commit([update])

    def forget(self, draft: str, sequence: int) -> None:
        """Tell a draft that a sequence ended. One that is down is told when it is back."""
        self._departed[draft].append(sequence)
        self._tell_departed(draft)

    def _tell_departed(self, name: str) -> None:
        """A draft that was only slow still holds what ended meanwhile."""
        with self._blamed(name):
            if self._departed[name] and self._clients[name].ready():
                self._clients[name].forget(self._departed[name])
                self._departed[name] = []

    def _ask(self, name: str, group: Sequence[Asking]) -> Waiter | None:
        client = self._clients[name]
        with self._blamed(name):
            if client.ready():
                self._tell_departed(name)
                return client.propose([self._request(asking) for asking in group])
        return None

    def _request(self, asking: Asking) -> DraftRequest:
        ratio_seed, budget = None, asking.budget
        if asking.draft in self._ratio:
            ratio_seed = asking.seed
            budget = min(budget, _SAMPLED_NODES) if asking.terms else budget
        return DraftRequest(
            asking.sequence,
            len(asking.tokens),
            budget,
            asking.depth,
            ratio_seed,
            asking.temperature,
            asking.terms,
        )

    def _answers(
        self, name: str, group: Sequence[Asking], waiter: Waiter, deadline: float
    ) -> dict[int, Proposal]:
        found: dict[int, Proposal] = {}
        with self._blamed(name):
            answers = waiter(max(0.0, deadline - time.monotonic()))
            if len(answers) != len(group):
                raise DraftUnavailable(f"{len(answers)} answers to {len(group)} requests")
            for asking, proposal in zip(group, answers, strict=True):
                if proposal is None:  # it does not know the sequence: new, or it missed some
                    self.commit(name, asking.sequence, 0, asking.tokens)
                elif self._fits(asking, proposal):
                    found[asking.sequence] = proposal
                else:
                    self._fault(name, "its proposal broke budget, depth, vocabulary or law")
        return found

    def _fits(self, asking: Asking, proposal: Proposal) -> bool:
        tree = proposal.tree
        return (
            len(tree) <= asking.budget
            and tree.gamma <= asking.depth
            and max(tree.tokens, default=0) < self._vocab_size
            and (proposal.q is None or self._lawful(asking, tree, proposal.q))
        )

    def _lawful(self, asking: Asking, tree: TokenTree, q: Sequence[SparseLaw]) -> bool:
        """Whether the ratio test was asked for, and every token can have been drawn from its q,
        which siblings share."""
        laws = set(zip(tree.parents, q, strict=True))
        return (
            asking.draft in self._ratio
            and len(laws) == len(set(tree.parents))
            and all(self._is_law(law) for _, law in laws)
            and all(
                any(token == own and p > 0 for own, p in zip(law.ids, law.probs, strict=True))
                for token, law in zip(tree.tokens, q, strict=True)
            )
        )

    def _is_law(self, law: SparseLaw) -> bool:
        """Whether it is a distribution over the target's tokens, up to a factor."""
        return (
            len(set(law.ids)) == len(law.ids)
            and all(0 <= token < self._vocab_size for token in law.ids)
            and all(isfinite(prob) and prob >= 0 for prob in law.probs)
        )

    @contextmanager
    def _blamed(self, name: str) -> Iterator[None]:
        """Whatever goes wrong with a draft, guesses are lost and nobody's answer."""
        try:
            yield
        except Exception as error:
            self._fault(name, error)

    def _fault(self, name: str, why: Exception | str) -> None:
        self.faults[name] += 1
        logger.warning("draft %s: %s; its sequences decode plainly", name, why)


def _by_draft(askings: Sequence[Asking]) -> dict[str, list[Asking]]:
    groups: dict[str, list[Asking]] = defaultdict(list)
    for asking in askings:
        groups[asking.draft].append(asking)
    return groups
