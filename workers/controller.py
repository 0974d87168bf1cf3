"""How much to guess: whatever brings tokens faster than the time it takes would without.

Tokens per second in the long run are greatest where every step spends a second more only for what
it brings on average elsewhere (renewal reward; Dinkelbach, 1967). That *price* of a second, tokens
per second, is kept up to date from what steps bring and cost. A node pays if the probability that
it is accepted is above the price of the time that its row takes; a question to a draft, if what it
is expected to bring is above its own.

All is about guesses. Whatever is decided here, the text stays the target's: a tree is cut by what
its draft said before anything was drawn, never by what the target says.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from workers.budget import WIDEST
from workers.draft import Terms
from workers.pass_costs import PassCosts
from workers.speculation.tree import Proposal

# The weight of the newest step in what steps bring and cost on average.
_NEWEST = 0.05
# Accepted nodes, and expected ones, that a sequence's draft is given in advance, and how fast those
# of former steps are forgotten.
_IN_ADVANCE, _FORGOTTEN = 2.0, 0.02
# Steps that a sequence is watched before it is left alone, and those that it is left alone then,
# twice as many each time, and tried again. To ask in vain costs little, not to ask may cost much,
# as texts change: what brings nearly what it costs is asked on.
_WATCHED, _FIRST_PAUSE, _LONGEST_PAUSE, _NEARLY = 24, 4, 32, 0.75


class _Habit:
    """Of one sequence: how far its draft may be believed, and whether asking it pays."""

    def __init__(self) -> None:
        self._expected = self._accepted = _IN_ADVANCE
        self._brings = self._costs = 0.0  # per step, in tokens, by what the draft says
        self._watched = 0
        self._pause = _FIRST_PAUSE
        self._resting = 0

    @property
    def trust(self) -> float:
        """Accepted nodes for each that was expected."""
        return self._accepted / self._expected

    def rests(self) -> bool:
        """Whether it is left alone in this step."""
        self._resting -= self._resting > 0
        return self._resting > 0

    def note(self, expected: float, accepted: int, dues: float) -> None:
        """A step: nodes that were to be accepted, those that were, and what their time was worth.

        Whether it pays is judged by what is expected, for luck varies by more than is at stake.
        """
        self._expected += expected - _FORGOTTEN * (self._expected - _IN_ADVANCE)
        self._accepted += accepted - _FORGOTTEN * (self._accepted - _IN_ADVANCE)
        self._brings += _NEWEST * (expected - self._brings)
        self._costs += _NEWEST * (dues - self._costs)
        self._watched += 1
        if self._watched < _WATCHED:
            return
        if self.trust * self._brings > _NEARLY * self._costs:
            self._pause = _FIRST_PAUSE
            return
        self._resting, self._pause = self._pause + 1, min(2 * self._pause, _LONGEST_PAUSE)
        self._brings, self._costs, self._watched = 0.0, 0.0, 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step was. rows: of its pass; draft_s, rest_s: seconds in drafts and in all else; said:
    tokens that the target said, by sequence that decoded; proposals: what was verified of them;
    prefill: whether prompts were read, too.
    """

    rows: int
    draft_s: float
    rest_s: float
    said: Mapping[int, int]
    proposals: Mapping[int, Proposal]
    prefill: bool


class Controller:
    """Decides for sequences whose requests leave it to that how many nodes are verified."""

    def __init__(self, costs: PassCosts) -> None:
        self._costs = costs
        # Of a step on average: tokens and nodes per sequence, seconds in drafts.
        self._tau, self._width, self._draft_s = 1.0, 0.0, 0.0
        self._habits: dict[int, _Habit] = defaultdict(_Habit)
        self._asked: set[int] = set()

    def asks(self, sequence: int) -> bool:
        """Whether a draft is to be asked for this sequence in this step."""
        if self._habits[sequence].rests():
            return False
        self._asked.add(sequence)
        return True

    def forget(self, sequence: int) -> None:
        """Drop a sequence, known or not."""
        self._habits.pop(sequence, None)

    def price(self, sequences: int) -> float:
        """Tokens per second that a step in which so many decode brings, as things are."""
        rows = sequences * (1 + self._width)
        return sequences * self._tau / (self._costs.at(rows) + self._draft_s)

    def terms(self, sequences: int) -> Terms:
        """For the drafts of a step in which so many decode."""
        price = self.price(sequences)
        others = sequences + (sequences - 1) * self._width
        dues = [price * self._costs.at(others + nodes) for nodes in range(WIDEST + 1)]
        return Terms(price, _least_slopes(dues))

    def cut(
        self, proposals: Mapping[int, Proposal], sequences: int, rows: int
    ) -> dict[int, Proposal]:
        """The proposals without the nodes that do not pay in a pass of `rows` other rows."""
        trust = {sequence: self._habits[sequence].trust for sequence in proposals}
        likely = sorted(
            (trust[s] * c for s, own in proposals.items() for c in own.confidence), reverse=True
        )
        price, reached = self.price(sequences), 0.0
        best, least = -price * self._costs.at(rows), float("inf")
        for number, confidence in enumerate(likely, start=1):
            reached += confidence
            worth = reached - price * self._costs.at(rows + number)
            if worth > best:
                best, least = worth, confidence
        return {s: own.likeliest(least / trust[s]) for s, own in proposals.items()}

    def learn(self, step: Step) -> None:
        """A step is over."""
        asked, self._asked = self._asked, set()
        self._costs.observe(step.rows, step.rest_s)
        if step.prefill or not step.said:
            return
        self._judge(asked & step.said.keys() & self._habits.keys(), step)
        sequences = len(step.said)
        nodes = sum(len(own.tree) for own in step.proposals.values())
        self._tau += _NEWEST * (sum(step.said.values()) / sequences - self._tau)
        self._width += _NEWEST * (nodes / sequences - self._width)
        # A draft that read a prompt, or was disturbed, does not do so every time.
        self._draft_s += _NEWEST * (min(step.draft_s, step.rest_s) - self._draft_s)

    def _judge(self, asked: AbstractSet[int], step: Step) -> None:
        """Of sequences that go on: which guesses were worth their time."""
        price = self.price(len(step.said))
        nodes = sum(len(own.tree) for own in step.proposals.values())
        rows_s = self._costs.at(step.rows) - self._costs.at(step.rows - nodes)
        for sequence in asked:
            own = step.proposals.get(sequence, Proposal.empty())
            share = len(own.tree) / max(1, nodes)
            dues = price * (rows_s * share + self._draft_s / len(asked))
            self._habits[sequence].note(sum(own.confidence), step.said[sequence] - 1, dues)


def _least_slopes(dues: Sequence[float]) -> tuple[float, ...]:
    """From each but the last to whichever behind it is the flattest way, and not below 0.

    That leads along the lower convex hull of what is behind, which grows from the end.
    """
    found: list[float] = []
    hull = [len(dues) - 1]  # from the right

    def slope(start: int, stop: int) -> float:
        return (dues[stop] - dues[start]) / (stop - start)

    for start in range(len(dues) - 2, -1, -1):
        while len(hull) > 1 and slope(start, hull[-1]) >= slope(start, hull[-2]):
            hull.pop()
        found.append(max(0.0, slope(start, hull[-1])))
        hull.append(start)
    return tuple(reversed(found))
