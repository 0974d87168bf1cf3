"""The book of KV slots: who owns which, who only borrows, what is shared, and what is free.

Slot `s` is row `s` of every layer's K and V tensors, on every rank; the tensors live with the ranks
and this book lives once, beside the decode loop, so it knows nothing of torch. Slots are handed out
in pages, which are reference counted.

A sequence owns the slots of its *committed* tokens. A step borrows *scratch* slots right after
them for the tokens it sends through the target (prefill chunk, last token, proposal), and gives
them back by `commit`, which keeps the accepted ones, or `rollback`, which keeps none.

    slots of one sequence   [ committed ............ | scratch ... | unused rest of the last page ]

A page full of committed tokens is never written again. It can be found by the tokens up to its end:
a sequence that begins with them shares it. One that nobody holds any more is kept until its place
is needed, the longest unused first. Then it goes to the host, where there is room for it: the same
that was there longest goes first. Pages on the host have numbers behind those of the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise, takewhile

from cache.buddy import BuddyPages
from cache.prefix_index import PrefixIndex


class OutOfPages(RuntimeError):
    """The pool cannot hold that many more tokens now. Nothing was changed; others may give back."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies that bring kept K/V into place, in every layer: slot `sources[i]` to `targets[i]`.

    A source may be an earlier pair's target: read all sources before writing any target.
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Pages to be copied, `pages[i]` of the pool to the host's page `places[i]`, both counted from
    0; or, with `back`, the other way round.
    """

    pages: tuple[int, ...]
    places: tuple[int, ...]
    back: bool


@dataclass(slots=True)
class _Sequence:
    """Committed tokens, then `scratch` more slots, in token order over `pages`. The first `shared`
    pages are full and in the index.
    """

    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scratch: int = 0
    shared: int = 0

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens) + self.scratch


class KVPool:
    """`pages` pages of `page_size` slots for any number of sequences, and `host_pages` on the host
    for what is kept in case somebody begins with it. Not thread-safe.

    Sequences are named by the caller's ints. Asking for more than there is raises OutOfPages and
    changes nothing; misuse (a sequence not open, scratch borrowed twice) fails an assertion.
    """

    def __init__(self, pages: int, page_size: int = 16, host_pages: int = 0) -> None:
        if pages < 1:
            raise ValueError(f"pages must be at least 1, not {pages}; give the KV pool more tokens")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.pages = pages
        self.page_size = page_size
        self.host_pages = host_pages
        self.evictions = 0
        self.recalls = 0
        self._references = [0] * pages
        self._free = BuddyPages(pages)
        self._index = PrefixIndex(page_size)
        # Pages of the index that nobody holds, the longest unused first. A page comes before the
        # one that it follows, for whoever held it held that one too and let go of it later.
        self._unused: dict[int, None] = {}
        # On the host, those that are there longest first: as above, a page before its parent.
        self._on_host: dict[int, None] = {}
        self._host_free = list(range(pages, pages + host_pages))
        self._swapped: list[tuple[int, int]] = []  # from page to page, since `swaps` was called
        self._sequences: dict[int, _Sequence] = {}

    def open(self, sequence: int, tokens: Sequence[int] = ()) -> int:
        """Begin a sequence with what the pool holds already of the beginning of `tokens`, never the
        last of them: somebody wants to know what follows it. Returns how many tokens that is.
        """
        assert sequence not in self._sequences, f"sequence {sequence} is already open"
        found = self._index.find(tokens[:-1])
        pages = [self._share(page) for page in takewhile(self._is_own, found)]
        known = list(tokens[: len(pages) * self.page_size])
        self._sequences[sequence] = _Sequence(pages, known, shared=len(pages))
        return len(known)

    def recall(self, sequence: int, tokens: Sequence[int]) -> int:
        """Right after `open`, for whoever is to run now: bring back from the host what it has of
        what follows in `tokens`, as far as there is room. Returns how many tokens are known then.
        """
        owner, size = self._owner(sequence), self.page_size
        assert owner.scratch == 0 and owner.committed == owner.shared * size, "not just opened"
        while self.pages_free:
            last = owner.pages[-1] if owner.pages else None
            following = tokens[owner.committed : min(owner.committed + size, len(tokens) - 1)]
            place = self._index.after(last, following)
            if place is None:
                break
            del self._on_host[place]  # now, so that none who is evicted for it takes its place
            [page] = self._take(1, last)
            self._index.move(place, page)
            self._swapped.append((place, page))
            self._host_free.append(place)
            owner.pages.append(page)
            owner.tokens += following
            owner.shared += 1
            self.recalls += 1
        return owner.committed

    def swaps(self) -> tuple[Swap, ...]:
        """Copies since the last call, to be made in this order before any slot is written."""
        swapped, self._swapped = self._swapped, []
        runs = groupby(swapped, lambda pair: self._is_own(pair[0]))
        return tuple(self._swap(own, pairs) for own, pairs in runs)

    def close(self, sequence: int) -> None:
        """End a sequence; everything it holds is given back, scratch too."""
        owner = self._owner(sequence)
        self._trim(owner, 0)
        del self._sequences[sequence]

    def reserve(self, sequence: int, count: int) -> tuple[int, ...]:
        """Borrow the `count` slots that follow the committed ones, in token order.

        Raises OutOfPages, with the pool unchanged, when there are not enough.
        """
        owner = self._owner(sequence)
        assert owner.scratch == 0, f"sequence {sequence} has {owner.scratch} scratch slots out"
        assert count >= 0, f"cannot reserve {count} slots"
        missing = self.pages_missing(sequence, owner.committed + count)
        if missing > self.pages_free:
            raise OutOfPages(f"{count} slots need {missing} pages, {self.pages_free} are free")
        owner.pages += self._take(missing, owner.pages[-1] if owner.pages else None)
        owner.scratch = count
        return self._slots(owner, range(owner.committed, owner.length))

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> Moves:
        """Make the scratch slots with the indices `keep` (ascending) the next committed tokens,
        which are `tokens`.

        The others are given back. The moves bring the kept K/V into the slots of their positions;
        there are none when they are there already, as after a prefill or a chain.
        """
        owner = self._owner(sequence)
        assert all(a < b for a, b in zip((-1, *keep), (*keep, owner.scratch), strict=True)), (
            f"{tuple(keep)} are not ascending indices into {owner.scratch} scratch slots"
        )
        assert len(tokens) == len(keep), f"{len(tokens)} tokens in {len(keep)} slots"
        moved = [(index, place) for place, index in enumerate(keep) if index != place]
        sources = self._slots(owner, [owner.committed + index for index, _ in moved])
        targets = self._slots(owner, [owner.committed + place for _, place in moved])
        owner.tokens += tokens
        self._give_back_scratch(owner)
        self._publish(owner)
        return Moves(sources, targets)

    def rollback(self, sequence: int) -> None:
        """Give all scratch back."""
        self._give_back_scratch(self._owner(sequence))

    def end_step(self) -> None:
        """Tidy up what the step's sequences gave back, all at once."""
        self._free.coalesce()

    def pages_missing(self, sequence: int, slots: int) -> int:
        """Pages that it must be given to have that many slots, scratch included."""
        return max(0, self._pages_for(slots) - len(self._owner(sequence).pages))

    def forget_unheld(self) -> None:
        """Keep no page that nobody holds, here or on the host."""
        while self._on_host:
            self._host_free.append(self._oldest_on_host())
        while self._unused:
            page = self._oldest_unused()
            self._index.remove(page)
            self._free.give([page])

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
    def host_pages_in_use(self) -> int:
        """Pages that are kept on the host."""
        return len(self._on_host)

    @property
    def pages_free(self) -> int:
        """Pages that nobody holds: empty ones, and those kept in case somebody begins with them."""
        return len(self._free) + len(self._unused)

    @property
    def pages_in_use(self) -> int:
        """Pages that some sequence holds, scratch included."""
        return self.pages - self.pages_free

    @property
    def tokens_stored(self) -> int:
        """Committed tokens of all sequences, each slot once: what the pages in use are worth."""
        shared = chain.from_iterable(own.pages[: own.shared] for own in self._sequences.values())
        alone = sum(own.committed - own.shared * self.page_size for own in self._sequences.values())
        return len(set(shared)) * self.page_size + alone

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

    def _slots(self, owner: _Sequence, tokens: Sequence[int]) -> tuple[int, ...]:
        size, pages = self.page_size, owner.pages
        return tuple(pages[token // size] * size + token % size for token in tokens)

    def _give_back_scratch(self, owner: _Sequence) -> None:
        owner.scratch = 0
        self._trim(owner, self._pages_for(owner.committed))

    # -- pages ---------------------------------------------------------------------------------

    def _take(self, count: int, after: int | None) -> list[int]:
        """Pages for somebody to write, evicting as many of those kept as it needs."""
        while len(self._free) < count:
            self._evict()
        pages = self._free.take(count, after)
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> None:
        page = self._oldest_unused()
        if self._host_free or self._on_host:
            place = self._host_free.pop() if self._host_free else self._oldest_on_host()
            self._index.move(page, place)
            self._on_host[place] = None
            self._swapped.append((page, place))
        else:
            self._index.remove(page)
        self._free.give([page])
        self.evictions += 1

    def _swap(self, out: bool, pairs: Iterable[tuple[int, int]]) -> Swap:
        last = {target: source for source, target in pairs}  # a place given twice keeps the last
        pages, places = (last.values(), last) if out else (last, last.values())
        return Swap(tuple(pages), tuple(place - self.pages for place in places), back=not out)

    def _oldest_unused(self) -> int:
        page = next(iter(self._unused))
        del self._unused[page]
        return page

    def _oldest_on_host(self) -> int:
        """Its place, where nothing is any more."""
        place = next(iter(self._on_host))
        del self._on_host[place]
        self._index.remove(place)
        return place

    def _is_own(self, page: int) -> bool:
        """Whether it is the pool's, not the host's."""
        return page < self.pages

    def _share(self, page: int) -> int:
        self._unused.pop(page, None)
        self._references[page] += 1
        return page

    def _trim(self, owner: _Sequence, pages: int) -> None:
        """Let go of all but its first pages, the last one first."""
        self._drop(reversed(owner.pages[pages:]))
        del owner.pages[pages:]

    def _drop(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._index:
                    self._unused[page] = None
                else:
                    self._free.give([page])

    def _publish(self, owner: _Sequence) -> None:
        """Put the pages that are full by now into the index, or take those that are there already
        in their place.
        """
        size = self.page_size
        for number in range(owner.shared, owner.committed // size):
            parent = owner.pages[number - 1] if number else None
            tokens = tuple(owner.tokens[number * size : (number + 1) * size])
            twin = self._index.put(owner.pages[number], parent, tokens)
            if twin is not None and not self._is_own(twin):
                self._index.move(twin, owner.pages[number])
                del self._on_host[twin]
                self._host_free.append(twin)
            elif twin is not None:
                own, owner.pages[number] = owner.pages[number], self._share(twin)
                self._drop([own])
            owner.shared = number + 1

    # -- doubts --------------------------------------------------------------------------------

    def _problems(self) -> Iterator[str]:
        holders = Counter(page for owner in self._sequences.values() for page in owner.pages)
        for page in sorted(holders.keys() - set(range(self.pages))):
            yield f"page {page} lies beyond the pool's {self.pages} pages"
        for page, references in enumerate(self._references):
            if references != holders[page]:
                yield f"page {page} has {references} references but {holders[page]} holders"
        free, kept = sorted(self._free.free()), sorted(self._unused)
        if sorted(free + kept) != [page for page, held in enumerate(self._references) if not held]:
            yield f"the free pages {free} and kept pages {kept} are not those without references"
        unheld = sorted(p for p in self._index if self._is_own(p) and not self._references[p])
        if unheld != kept:
            yield f"pages {unheld} of the index have no holder, but {kept} are kept"
        there, on_host = (
            sorted(p for p in self._index if not self._is_own(p)),
            sorted(self._on_host),
        )
        if there != on_host:
            yield f"pages {there} of the index are on the host, but it has {on_host}"
        if sorted(on_host + self._host_free) != [*range(self.pages, self.pages + self.host_pages)]:
            yield f"the host has {on_host}, and {self._host_free} of its pages are free"
        yield from self._index.problems()
        for name, owner in self._sequences.items():
            yield from self._problems_of(name, owner, holders)

    def _problems_of(self, name: int, owner: _Sequence, holders: Counter[int]) -> Iterator[str]:
        needed = self._pages_for(owner.length)
        if len(owner.pages) != needed:
            yield f"sequence {name} holds {len(owner.pages)} pages for {needed} pages of tokens"
        if len(set(owner.pages)) < len(owner.pages):
            yield f"sequence {name} holds a page twice: {owner.pages}"
        if list(self._index.find(owner.tokens)) != owner.pages[: owner.shared]:
            yield f"the first {owner.shared} pages of sequence {name} are not found by its tokens"
        for page in owner.pages[owner.shared :]:  # what may still be written
            if holders[page] > 1 or page in self._index:
                yield f"sequence {name} can write page {page}, which others may read"
