"""The book of KV slots: who owns which, who only borrows, and what is free.

Slot `s` is row `s` of every layer's K and V tensors, on every rank; the tensors live with the ranks
and this book lives once, beside the decode loop, so it knows nothing of torch. Slots are handed out
in pages, which are reference counted.

A sequence owns the slots of its *committed* tokens. A step borrows *scratch* slots right after
them for the tokens it sends through the target (prefill chunk, last token, proposal), and gives
them back by `commit`, which keeps the accepted ones, or `rollback`, which keeps none.

    slots of one sequence   [ committed ............ | scratch ... | unused rest of the last page ]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise


class OutOfPages(RuntimeError):
    """The pool cannot hold that many more tokens now. Nothing was changed; others may give back."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies that bring kept K/V into place, in every layer: slot `sources[i]` to `targets[i]`.

    A source may be an earlier pair's target: read all sources before writing any target.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(slots=True)
class _Sequence:
    """Tokens 0 .. committed + scratch - 1, in token order over `pages`."""

    pages: list[int] = field(default_factory=list)
    committed: int = 0
    scratch: int = 0

    @property
    def length(self) -> int:
        return self.committed + self.scratch


class KVPool:
    """`pages` pages of `page_size` slots for any number of sequences. Not thread-safe.

    Sequences are named by the caller's ints. Asking for more than there is raises OutOfPages and
    changes nothing; misuse (a sequence not open, scratch borrowed twice) fails an assertion.
    """

    def __init__(self, pages: int, page_size: int = 16) -> None:
        if pages < 1:
            raise ValueError(f"pages must be at least 1, not {pages}; give the KV pool more tokens")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.pages = pages
        self.page_size = page_size
        self._references = [0] * pages
        self._free = list(range(pages))  # a heap: the lowest page first keeps sequences contiguous
        self._sequences: dict[int, _Sequence] = {}

    def open(self, sequence: int) -> None:
        """Begin a sequence with nothing in it."""
        assert sequence not in self._sequences, f"sequence {sequence} is already open"
        self._sequences[sequence] = _Sequence()

    def close(self, sequence: int) -> None:
        """End a sequence; everything it holds is given back, scratch too."""
        owner = self._owner(sequence)
        self._trim(owner, 0)
        del self._sequences[sequence]

    def can_reserve(self, sequence: int | None, count: int) -> bool:
        """Whether `reserve` would succeed now; None stands for a sequence yet to be opened."""
        owner = _Sequence() if sequence is None else self._owner(sequence)
        return self._pages_missing(owner, count) <= len(self._free)

    def reserve(self, sequence: int, count: int) -> tuple[int, ...]:
        """Borrow the `count` slots that follow the committed ones, in token order.

        Raises OutOfPages, with the pool unchanged, when there are not enough.
        """
        owner = self._owner(sequence)
        assert owner.scratch == 0, f"sequence {sequence} has {owner.scratch} scratch slots out"
        assert count >= 0, f"cannot reserve {count} slots"
        missing = self._pages_missing(owner, count)
        if missing > len(self._free):
            raise OutOfPages(f"{count} slots need {missing} pages, {len(self._free)} are free")
        owner.pages.extend(self._take() for _ in range(missing))
        owner.scratch = count
        return self._slots(owner, range(owner.committed, owner.length))

    def commit(self, sequence: int, keep: Sequence[int]) -> Moves:
        """Make the scratch slots with these indices (ascending) the next committed tokens.

        The others are given back. The moves bring the kept K/V into the slots of their positions;
        there are none when they are there already, as after a prefill or a chain.
        """
        owner = self._owner(sequence)
        assert all(a < b for a, b in zip((-1, *keep), (*keep, owner.scratch), strict=True)), (
            f"{tuple(keep)} are not ascending indices into {owner.scratch} scratch slots"
        )
        moved = [(index, place) for place, index in enumerate(keep) if index != place]
        sources = self._slots(owner, [owner.committed + index for index, _ in moved])
        targets = self._slots(owner, [owner.committed + place for _, place in moved])
        self._settle(owner, owner.committed + len(keep))
        return Moves(sources, targets)

    def rollback(self, sequence: int) -> None:
        """Give all scratch back."""
        owner = self._owner(sequence)
        self._settle(owner, owner.committed)

    def committed(self, sequence: int) -> int:
        """Tokens the sequence owns."""
        return self._owner(sequence).committed

    def extents(self, sequence: int) -> tuple[tuple[int, int], ...]:
        """Half-open slot ranges in token order, committed then scratch; one when contiguous."""
        owner = self._owner(sequence)
        pages, size = owner.pages, self.page_size
        if not pages:
            return ()
        breaks = [i for i, (page, after) in enumerate(pairwise(pages), 1) if after != page + 1]
        runs = pairwise((0, *breaks, len(pages)))
        extents = [(pages[begin] * size, (pages[end - 1] + 1) * size) for begin, end in runs]
        unused = len(pages) * size - owner.length
        extents[-1] = (extents[-1][0], extents[-1][1] - unused)
        return tuple(extents)

    def sequences(self) -> tuple[int, ...]:
        """The open sequences, oldest first."""
        return tuple(self._sequences)

    @property
    def pages_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def pages_in_use(self) -> int:
        """Pages that some sequence holds, scratch included."""
        return self.pages - len(self._free)

    @property
    def tokens_stored(self) -> int:
        """Committed tokens of all sequences: what the pages in use are worth."""
        return sum(owner.committed for owner in self._sequences.values())

    def check_integrity(self) -> None:
        """Raise AssertionError naming all that is wrong in the book; for tests and doubts."""
        problems = tuple(self._problems())
        if problems:
            raise AssertionError("; ".join(problems))

    def _owner(self, sequence: int) -> _Sequence:
        assert sequence in self._sequences, f"sequence {sequence} is not open"
        return self._sequences[sequence]

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _pages_missing(self, owner: _Sequence, count: int) -> int:
        return self._pages_for(owner.committed + count) - len(owner.pages)

    def _slots(self, owner: _Sequence, tokens: Sequence[int]) -> tuple[int, ...]:
        size, pages = self.page_size, owner.pages
        return tuple(pages[token // size] * size + token % size for token in tokens)

    def _settle(self, owner: _Sequence, committed: int) -> None:
        owner.committed, owner.scratch = committed, 0
        self._trim(owner, self._pages_for(committed))

    def _trim(self, owner: _Sequence, pages: int) -> None:
        while len(owner.pages) > pages:
            self._drop(owner.pages.pop())

    def _take(self) -> int:
        page = heappop(self._free)
        self._references[page] += 1
        return page

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page] == 0:
            heappush(self._free, page)

    def _problems(self) -> Iterator[str]:
        holders = Counter(page for owner in self._sequences.values() for page in owner.pages)
        for page in sorted(holders.keys() - set(range(self.pages))):
            yield f"page {page} lies beyond the pool's {self.pages} pages"
        for page, references in enumerate(self._references):
            if references != holders[page]:
                yield f"page {page} has {references} references but {holders[page]} holders"
        if sorted(self._free) != [page for page, held in enumerate(self._references) if not held]:
            yield f"the free list {sorted(self._free)} is not the pages without references"
        for name, owner in self._sequences.items():
            yield from self._problems_of(name, owner, holders)

    def _problems_of(self, name: int, owner: _Sequence, holders: Counter[int]) -> Iterator[str]:
        needed = self._pages_for(owner.length)
        if len(owner.pages) != needed:
            yield f"sequence {name} holds {len(owner.pages)} pages for {needed} pages of tokens"
        if len(set(owner.pages)) < len(owner.pages):
            yield f"sequence {name} holds a page twice: {owner.pages}"
        for page in owner.pages[owner.committed // self.page_size :]:  # what may still be written
            if holders[page] > 1:
                yield f"sequence {name} can write page {page}, which another one holds too"
