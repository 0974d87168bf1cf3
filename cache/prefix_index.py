"""Full pages by the whole history of tokens that they end: a trie of pages.

A page is found by the page before it and its own tokens, so two pages with the same tokens after
different beginnings are two entries. Tokens are compared, not only their hash: no two histories
are ever taken for each other.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

_ROOT = -1


class PrefixIndex:
    """Pages of `page_size` tokens each. Misuse fails an assertion."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._children: dict[int, int] = {}  # how many, by page

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """The pages that hold the beginning of `tokens`, as far as there are such."""
        parent = _ROOT
        for first in range(0, len(tokens) - self._size + 1, self._size):
            page = self._pages.get((parent, tuple(tokens[first : first + self._size])))
            if page is None:
                return
            yield page
            parent = page

    def put(self, page: int, parent: int | None, tokens: tuple[int, ...]) -> int | None:
        """A full page behind `parent`, None for a history's first. Returns the page that holds the
        same already; then nothing was changed.
        """
        assert len(tokens) == self._size and page not in self._keys
        assert parent is None or parent in self._keys, f"page {parent} is not in the index"
        key = (_ROOT if parent is None else parent, tokens)
        twin = self._pages.get(key)
        if twin is None:
            self._pages[key], self._keys[page] = page, key
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
        return twin

    def remove(self, page: int) -> None:
        """A page that no other one follows."""
        assert not self._children.get(page), f"page {page} has pages behind it"
        key = self._keys.pop(page)
        del self._pages[key]
        parent, _ = key
        if parent != _ROOT:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]

    def problems(self, references: Sequence[int], kept: Sequence[int]) -> Iterator[str]:
        """What cannot be, given who holds each page and which are kept though nobody does."""
        unheld = sorted(page for page in self._keys if not references[page])
        if unheld != list(kept):
            yield f"pages {unheld} of the index have no holder, but {kept} are kept"
        parents = Counter(parent for parent, _ in self._keys.values() if parent != _ROOT)
        if dict(parents) != self._children:
            yield f"the index counts {self._children} pages behind others, there are {parents}"
        for parent in sorted(parents.keys() - self._keys.keys()):
            yield f"page {parent} has pages behind it, but is not in the index"
