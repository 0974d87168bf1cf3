"""Who waits for a place. Answers that were asked for together let others in between: who asks for a
hundred at once does not hold up everybody who asks for one.
"""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

STRIDE = 8
"""How many who come later may overtake an answer for each of its group that waits before it: as
many as run together by default."""


class Grouped(Protocol):
    """One of those who wait."""

    @property
    def group(self) -> Hashable:
        """The same for all that were asked for together."""


_Item = TypeVar("_Item", bound=Grouped)


class Line(Generic[_Item]):
    """First come, first served, but for those who step back behind others of their own group. It
    is known at once how many may overtake them, so everybody's turn comes.
    """

    def __init__(self) -> None:
        self._line: list[tuple[int, _Item]] = []
        self._arrivals = itertools.count()
        self._returns = itertools.count(-1, -1)
        self._waiting: Counter[Hashable] = Counter()

    def extend(self, items: Iterable[_Item]) -> None:
        """Each finds its place."""
        for item in items:
            self._insert(next(self._arrivals) + STRIDE * self._waiting[item.group], item)

    def put_back(self, item: _Item) -> None:
        """Before all others: its turn had come already."""
        self._insert(next(self._returns), item)

    @property
    def first(self) -> _Item:
        """Whose turn it is; there must be somebody."""
        return self._line[0][1]

    def remove(self, item: _Item) -> None:
        """Who leaves the line, because its turn has come or for another reason.

        Raises ValueError for one that is not in it.
        """
        del self._line[[waiting for _, waiting in self._line].index(item)]
        self._waiting -= Counter([item.group])  # forgets a group of which nobody is left

    def __iter__(self) -> Iterator[_Item]:
        return iter([item for _, item in self._line])

    def __len__(self) -> int:
        return len(self._line)

    def _insert(self, place: int, item: _Item) -> None:
        insort(self._line, (place, item), key=lambda entry: entry[0])
        self._waiting[item.group] += 1
