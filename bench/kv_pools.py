"""Two plain ways to hold K/V, for `outrider bench kv` to compare with `cache.kv_pool.KVPool`.

Both answer to the same scheduler as that one does. They know slots and counts, and no tokens.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from cache.kv_pool import OutOfPages
from workers.scheduler import Pages


class Pool(Pages, Protocol):
    """What the decode loop asks of a pool, and what a bench wants to know of it."""

    @property
    def pages_in_use(self) -> int: ...

    @property
    def tokens_stored(self) -> int: ...

    @property
    def evictions(self) -> int: ...

    @property
    def recalls(self) -> int: ...

    def swaps(self) -> Sequence[object]: ...

    def reserve(self, sequence: int, count: int) -> tuple[int, ...]: ...

    def extents(self, sequence: int) -> tuple[tuple[int, int], ...]: ...

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> object: ...

    def end_step(self) -> None: ...

    def check_integrity(self) -> None: ...


class MaxLengthPool:
    """Whoever is admitted gets all the slots it may ever need, in one piece, until it ends.

    sizes: slots by sequence. It is put into the first gap that is large enough; a sequence that
    finds none misses everything, so that the scheduler sends it back to the line. A page is a slot.
    """

    evictions = recalls = 0
    page_size = 1
    pages_free = 0  # for those who have a place to take more: they have all they may get

    def __init__(self, slots: int, sizes: Mapping[int, int]) -> None:
        self.pages = slots
        self._sizes = sizes
        self._gaps = [(0, slots)]  # half-open, ascending, no two of them adjacent
        self._starts: dict[int, int | None] = {}  # by sequence; None without a place
        self._committed: dict[int, int] = {}
        self._scratch: dict[int, int] = {}

    def open(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        self._starts[sequence] = self._place(self._sizes[sequence])
        self._committed[sequence] = self._scratch[sequence] = 0
        return 0

    def recall(self, sequence: int, tokens: Sequence[int]) -> int:
        """There is no host."""
        return self._committed[sequence]

    def swaps(self) -> Sequence[object]:
        return ()

    def close(self, sequence: int) -> None:
        start = self._starts.pop(sequence)
        del self._committed[sequence], self._scratch[sequence]
        if start is not None:
            self._give_back(start, start + self._sizes[sequence])

    def committed(self, sequence: int) -> int:
        return self._committed[sequence]

    def pages_missing(self, sequence: int, slots: int) -> int:
        return slots if self._starts[sequence] is None else 0

    def reserve(self, sequence: int, count: int) -> tuple[int, ...]:
        start, committed = self._starts[sequence], self._committed[sequence]
        assert start is not None and committed + count <= self._sizes[sequence]
        self._scratch[sequence] = count
        return tuple(range(start + committed, start + committed + count))

    def extents(self, sequence: int) -> tuple[tuple[int, int], ...]:
        start = self._starts[sequence]
        assert start is not None
        return ((start, start + self._committed[sequence] + self._scratch[sequence]),)

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> None:
        self._committed[sequence] += len(keep)
        self._scratch[sequence] = 0

    def end_step(self) -> None:
        """Gaps are merged as they come."""

    @property
    def pages_in_use(self) -> int:
        return self.pages - sum(stop - start for start, stop in self._gaps)

    @property
    def tokens_stored(self) -> int:
        return sum(self._committed.values())

    def check_integrity(self) -> None:
        placed = [(s, s + self._sizes[n]) for n, s in self._starts.items() if s is not None]
        everything = sorted([*placed, *self._gaps])
        ends = [(0, 0), *everything, (self.pages, self.pages)]
        assert all(a[1] == b[0] for a, b in pairwise(ends)), f"slots are lost or held twice: {ends}"
        assert all(a[1] < b[0] for a, b in pairwise(self._gaps)), f"adjacent gaps: {self._gaps}"

    def _place(self, size: int) -> int | None:
        for number, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[number : number + 1] = [(start + size, stop)] * (stop - start > size)
                return start
        return None

    def _give_back(self, start: int, stop: int) -> None:
        after = next((i for i, gap in enumerate(self._gaps) if gap[0] > start), len(self._gaps))
        first = last = after
        if after < len(self._gaps) and self._gaps[after][0] == stop:
            stop, last = self._gaps[after][1], after + 1
        if after and self._gaps[after - 1][1] == start:
            start, first = self._gaps[after - 1][0], after - 1
        self._gaps[first:last] = [(start, stop)]


class PagedPool:
    """Pages as a sequence grows, from a list of free ones, all of them until it ends; nothing is
    shared and nothing is kept.
    """

    evictions = recalls = 0

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(reversed(range(pages)))
        self._tables: dict[int, list[int]] = {}
        self._committed: dict[int, int] = {}
        self._scratch: dict[int, int] = {}

    def open(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        self._tables[sequence] = []
        self._committed[sequence] = self._scratch[sequence] = 0
        return 0

    def recall(self, sequence: int, tokens: Sequence[int]) -> int:
        """There is no host."""
        return self._committed[sequence]

    def swaps(self) -> Sequence[object]:
        return ()

    def close(self, sequence: int) -> None:
        self._free += self._tables.pop(sequence)
        del self._committed[sequence], self._scratch[sequence]

    def committed(self, sequence: int) -> int:
        return self._committed[sequence]

    def pages_missing(self, sequence: int, slots: int) -> int:
        return max(0, -(-slots // self.page_size) - len(self._tables[sequence]))

    def reserve(self, sequence: int, count: int) -> tuple[int, ...]:
        """Raises OutOfPages, with nothing changed."""
        table, committed, size = self._tables[sequence], self._committed[sequence], self.page_size
        missing = self.pages_missing(sequence, committed + count)
        if missing > len(self._free):
            raise OutOfPages(f"{count} slots need {missing} pages, {len(self._free)} are free")
        table += (self._free.pop() for _ in range(missing))
        self._scratch[sequence] = count
        tokens = range(committed, committed + count)
        return tuple(table[token // size] * size + token % size for token in tokens)

    def extents(self, sequence: int) -> tuple[tuple[int, int], ...]:
        """One for each page that is used, as plain paging reads them."""
        size, left = self.page_size, self._committed[sequence] + self._scratch[sequence]
        used = self._tables[sequence][: -(-left // size)]
        return tuple(
            (page * size, page * size + min(size, left - number * size))
            for number, page in enumerate(used)
        )

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> None:
        self._committed[sequence] += len(keep)
        self._scratch[sequence] = 0

    def end_step(self) -> None:
        """Free pages have no order."""

    @property
    def pages_free(self) -> int:
        return len(self._free)

    @property
    def pages_in_use(self) -> int:
        return self.pages - len(self._free)

    @property
    def tokens_stored(self) -> int:
        return sum(self._committed.values())

    def check_integrity(self) -> None:
        held = [page for table in self._tables.values() for page in table]
        assert sorted([*held, *self._free]) == list(range(self.pages)), (
            f"pages are lost or held twice: {held} and {self._free}"
        )
        for sequence, table in self._tables.items():
            slots = self._committed[sequence] + self._scratch[sequence]
            assert slots <= len(table) * self.page_size, f"{sequence} has more tokens than slots"
