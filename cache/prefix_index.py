"""Full pages by the whole history of tokens that they end: a trie of pages.

A page is found by the page before it and its own tokens, so two pages with the same tokens after
different beginnings are two entries. Tokens are compared, not only their hash: no two histories
are ever taken for each other.
"""

from collections.abc import Iterator, Sequence

_ROOT = -1
_Tokens = tuple[int, ...]


class PrefixIndex:
    """Pages of `page_size` tokens each. Misuse fails an assertion."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._keys: dict[int, tuple[int, _Tokens]] = {}
        # The pages behind a page by their tokens; none is empty.
        self._behind: dict[int, dict[_Tokens, int]] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def find(self, tokens: Sequence[int]) -> Iterator[int]:
        """The pages that hold the beginning of `tokens`, as far as there are such."""
        page = None
        for first in range(0, len(tokens) - self._size + 1, self._size):
            page = self.after(page, tokens[first : first + self._size])
            if page is None:
                return
            yield page

    def after(self, page: int | None, tokens: Sequence[int]) -> int | None:
        """The page behind `page`, None for a history's first, that holds `tokens`."""
        behind = self._behind.get(_ROOT if page is None else page)
        return behind.get(tuple(tokens)) if behind else None

    def put(self, page: int, parent: int | None, tokens: _Tokens) -> int | None:
        """A full page behind `parent`, None for a history's first. Returns the page that holds the
        same already; then nothing was changed.
        """
        assert len(tokens) == self._size and page not in self._keys
        assert parent is None or parent in self._keys, f"page {parent} is not in the index"
        twin = self.after(parent, tokens)
        if twin is None:
            self._link(page, _ROOT if parent is None else parent, tokens)
        return twin

    def move(self, page: int, to: int) -> None:
        """What `page` holds is in `to` from now on."""
        assert to not in self._keys, f"page {to} is in the index already"
        behind = self._behind.pop(page, None)
        self._link(to, *self._keys.pop(page))
        if behind:
            self._behind[to] = behind
            for tokens, child in behind.items():
                self._keys[child] = to, tokens

    def remove(self, page: int) -> None:
        """A page that no other one follows."""
        assert page not in self._behind, f"page {page} has pages behind it"
        parent, tokens = self._keys.pop(page)
        siblings = self._behind[parent]
        del siblings[tokens]
        if not siblings:
            del self._behind[parent]

    def problems(self) -> Iterator[str]:
        """What cannot be."""
        links = {(parent, tokens): page for page, (parent, tokens) in self._keys.items()}
        behind = {
            (page, tokens): child
            for page, children in self._behind.items()
            for tokens, child in children.items()
        }
        if links != behind:
            yield f"the index has pages {behind} behind others, but they are {links}"
        for parent in sorted(self._behind.keys() - self._keys.keys() - {_ROOT}):
            yield f"page {parent} has pages behind it, but is not in the index"

    def _link(self, page: int, parent: int, tokens: _Tokens) -> None:
        self._keys[page] = parent, tokens
        self._behind.setdefault(parent, {})[tokens] = page
