"""From tokens to text that can be sent: no broken character, no part of a stop string."""

from collections.abc import Sequence
from typing import Protocol

LONGEST_WAIT = 32
"""Tokens held back at most: an answer of nothing but broken characters is text too, and decoding
all of it again for each token would take ever longer."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Decodes an answer token by token.

    A token may hold part of a character, and its text may depend on its neighbour. So a window of
    tokens is decoded with and without the newest ones, and the difference is new text, once it does
    not end in a broken character (method of vLLM and text-generation-inference).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._window = 0  # decoding starts here
        self._done = 0  # tokens before this one are already text

    def push(self, token: int) -> str:
        """Text that `token` completes."""
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is left when nothing follows: at most a broken character."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._window, self._done)
        after = self._decode(self._window, len(self._tokens))
        unfinished = len(after) <= len(before) or after.endswith(REPLACEMENT)
        if unfinished and not final and len(self._tokens) - self._done < LONGEST_WAIT:
            return ""
        self._window, self._done = self._done, len(self._tokens)
        return after[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._tokens[start:stop], skip_special_tokens=True)


class StopMatcher:
    """Cuts text at the stop string that is complete first, and holds back what may become one.

    Complete first, not begun first: so it does not matter into which pieces the text is cut.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Text that may be sent; sets `matched` when a stop string is complete."""
        if self.matched:
            return ""
        self._held += text
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        self.matched = bool(found)
        safe = min(found)[1] if found else len(self._held) - self._possible()
        out, self._held = self._held[:safe], self._held[safe:]
        return out

    def flush(self) -> str:
        """What was held back in vain."""
        out, self._held = ("" if self.matched else self._held), ""
        return out

    def _possible(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0)
        for size in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stop):
                return size
        return 0
