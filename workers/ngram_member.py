"""The n-gram member: it has seen these tokens before, in this request or in its domain.

After a context of up to six tokens it knows what followed the longest match, and the shorter ones.
Prediction by partial matching blends them: a context is trusted as far as its followers repeat
(Witten and Bell, 1991: escape with distinct / (total + distinct)), the rest goes to the shorter
one. So a guess has a probability.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workers.draft import DraftUpdate
from workers.training.ngram_table import ORDER, Followers, NgramTable, followers_of

# One occurrence in the request itself says as much as this many in the table.
LOCAL_WEIGHT = 8
# Shorter contexts are not looked at once this little is left to them.
NEGLIGIBLE = 0.02
# Tokens counted per proposal (about 15 ms): the decode loop must not wait for one long prompt.
CATCH_UP = 512
NOTHING = Followers(total=0, distinct=0, likeliest=())


@dataclass(frozen=True, slots=True)
class NgramLaw:
    """What may follow a context. order: length of the longest match, 0 for none; suffix, table:
    by token, what of its probability came from the request itself and from the domain's table.
    """

    order: int
    suffix: dict[int, float]
    table: dict[int, float]

    def likely(self, least: float) -> dict[int, float]:
        """Tokens with at least that probability."""
        found = dict(self.suffix)
        for token, probability in self.table.items():
            found[token] = found.get(token, 0.0) + probability
        return {token: probability for token, probability in found.items() if probability >= least}


class LocalIndex:
    """Next-token counts within one request."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._summed: dict[tuple[int, ...], Followers] = {}

    def add(self, tokens: Sequence[int], place: int) -> None:
        """Count the token at `place` after each of its contexts."""
        for order in range(1, min(ORDER, place) + 1):
            context = tuple(tokens[place - order : place])
            self._counts[context][tokens[place]] += 1
            self._summed.pop(context, None)

    def followers(self, context: tuple[int, ...]) -> list[Followers]:
        """After the last 1, 2, ... tokens of `context`, as far as they occur."""
        found = []
        for order in range(1, len(context) + 1):
            own = context[-order:]
            counts = self._counts.get(own)
            if counts is None:
                break
            if own not in self._summed:
                self._summed[own] = followers_of(counts)
            found.append(self._summed[own])
        return found


@dataclass(slots=True)
class _Sequence:
    tokens: array[int] = field(default_factory=lambda: array("i"))
    index: LocalIndex = field(default_factory=LocalIndex)
    indexed: int = 0

    def catch_up(self) -> bool:
        """Count some more of the tokens; whether all are counted now."""
        stop = min(len(self.tokens), self.indexed + CATCH_UP)
        for place in range(self.indexed, stop):
            self.index.add(self.tokens, place)
        self.indexed = stop
        return stop == len(self.tokens)


class NgramMember:
    """Knows each request's own tokens and, where there is one, a domain's table."""

    def __init__(self, table: NgramTable | None) -> None:
        self.table = table
        self._sequences: dict[int, _Sequence] = {}

    def commit(self, update: DraftUpdate) -> None:
        """Learn what the target said. An update that does not fit what is known is ignored."""
        if update.start == 0:
            self._sequences[update.sequence] = _Sequence()
        known = self._sequences.get(update.sequence)
        if known is not None and len(known.tokens) == update.start:
            known.tokens.extend(update.tokens)

    def forget(self, sequence: int) -> None:
        """Drop a sequence, known or not."""
        self._sequences.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """How many tokens of it are known."""
        known = self._sequences.get(sequence)
        return 0 if known is None else len(known.tokens)

    def catch_up(self, sequence: int) -> bool:
        """Count some more of a known sequence's tokens; whether all are counted now."""
        return self._sequences[sequence].catch_up()

    def tokens(self, sequence: int) -> array[int]:
        """All that is known of it."""
        return self._sequences[sequence].tokens

    def tail(self, sequence: int) -> tuple[int, ...]:
        """The last tokens, as many as a context can hold."""
        return tuple(self._sequences[sequence].tokens[-ORDER:])

    def law(self, sequence: int, context: tuple[int, ...]) -> NgramLaw:
        """What may follow `context` (at most ORDER tokens) in a sequence."""
        suffix: dict[int, float] = defaultdict(float)
        domain: dict[int, float] = defaultdict(float)
        left, longest = 1.0, 0
        for order, local, table in self._matches(self._sequences[sequence].index, context):
            longest = longest or order
            total = LOCAL_WEIGHT * local.total + table.total
            scale = left / (total + local.distinct + table.distinct)
            for token, times in local.likeliest:
                suffix[token] += scale * LOCAL_WEIGHT * times
            for token, times in table.likeliest:
                domain[token] += scale * times
            left -= scale * total
            if left < NEGLIGIBLE:
                break
        return NgramLaw(longest, suffix, domain)

    def _matches(
        self, index: LocalIndex, context: tuple[int, ...]
    ) -> Iterator[tuple[int, Followers, Followers]]:
        """(length, in the request, in the table) of the longest match and of all shorter ones."""
        table = [] if self.table is None else self.table.followers(context)
        local = index.followers(context)
        for order in range(max(len(table), len(local)), 0, -1):
            yield (
                order,
                local[order - 1] if order <= len(local) else NOTHING,
                table[order - 1] if order <= len(table) else NOTHING,
            )
