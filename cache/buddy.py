"""Which pages are free, kept as a buddy system does: in blocks of a power of two, aligned to it.

Every new run begins in the largest block there is, so runs start far apart and each has room to
grow in place: a sequence becomes one or a few long extents, whoever comes and goes.
"""

from collections.abc import Iterable, Iterator


class BuddyPages:
    """`pages` pages, all free at first. Not thread-safe; misuse fails an assertion.

    Pages given back are free at once, but become parts of larger blocks again only in `coalesce`:
    what a step borrows and returns is not merged and split for every sequence in it.
    """

    def __init__(self, pages: int) -> None:
        # By order, the first pages of the free blocks of 2**order pages; dicts, as they keep order.
        self._blocks: list[dict[int, None]] = [{} for _ in range(pages.bit_length())]
        self._returned: list[int] = []
        self._free = pages
        self._add(0, pages)

    def __len__(self) -> int:
        """Free pages."""
        return self._free

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages in as few runs as the largest blocks allow, the first of them right behind
        page `after` as far as those are free. There must be as many.
        """
        assert count <= self._free, f"{count} pages of {self._free} free ones"
        taken: list[int] = []
        if after is not None:
            while len(taken) < count and self._take_page(after + 1 + len(taken)):
                taken.append(after + 1 + len(taken))
        while len(taken) < count:
            taken += self._take_run(count - len(taken))
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Pages that nobody uses any more."""
        before = len(self._returned)
        self._returned.extend(pages)
        self._free += len(self._returned) - before

    def coalesce(self) -> None:
        """Merge what was given back with its free neighbours."""
        for page in self._returned:
            self._merge(page)
        self._returned.clear()

    def free(self) -> Iterator[int]:
        """Every free page, in no particular order."""
        yield from self._returned
        for order, blocks in enumerate(self._blocks):
            for first in blocks:
                yield from range(first, first + (1 << order))

    def _take_run(self, most: int) -> list[int]:
        """The beginning of the largest block, at most `most` pages of it."""
        order = self._largest()
        if order is None:
            self.coalesce()
            order = self._largest()
        assert order is not None, "there are free pages, but in no block"
        first = next(iter(self._blocks[order]))
        del self._blocks[order][first]
        size = min(most, 1 << order)
        self._add(first + size, first + (1 << order))
        self._free -= size
        return list(range(first, first + size))

    def _largest(self) -> int | None:
        """The order of the largest blocks."""
        orders = reversed(range(len(self._blocks)))
        return next((order for order in orders if self._blocks[order]), None)

    def _take_page(self, page: int) -> bool:
        """One page out of the block that it lies in, if it is free."""
        for order, blocks in enumerate(self._blocks):
            first = page >> order << order
            if first in blocks:
                del blocks[first]
                self._add(first, page)
                self._add(page + 1, first + (1 << order))
                self._free -= 1
                return True
        return False

    def _add(self, first: int, stop: int) -> None:
        """Pages `first` to `stop`, none of them in a block, as the largest aligned blocks."""
        while first < stop:
            order = (stop - first).bit_length() - 1
            if first:
                order = min(order, (first & -first).bit_length() - 1)
            self._blocks[order][first] = None
            first += 1 << order

    def _merge(self, page: int) -> None:
        order = 0
        while order + 1 < len(self._blocks) and (page ^ (1 << order)) in self._blocks[order]:
            del self._blocks[order][page ^ (1 << order)]
            page &= ~(1 << order)
            order += 1
        self._blocks[order][page] = None
