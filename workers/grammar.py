"""Answers that keep to a grammar: which tokens may follow at each node of a tree.

The target's law is cut down to them before it chooses, so a draft that guesses something else is
only wrong. The automata are xgrammar's (Dong et al., "XGrammar: flexible and efficient structured
generation engine for large language models", 2024).
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.sampling import NothingAllowed
from workers.json_schema import keepable

_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # in whose source an error was found, and when


KEPT_BYTES = 2**28
"""Of compiled grammars; the one that was not used for longest goes first. Who sends ever new ones
would fill the memory else."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer keeps to.

    json_schema: text is the schema; regex: text is the expression; ebnf: text is the grammar, whose
    first rule is called root. All of it is for the whole answer. field: of the request, that says
    so.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str
    field: str = "response_format"


class GrammarState:
    """How far an answer is in its grammar."""

    def __init__(
        self, matcher: Any, vocab_size: int, field: str, among: NDArray[np.int32] | None = None
    ) -> None:
        """among: [1, vocabulary / 32] the tokens that are right anywhere, a bit each; None: all."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._field = field
        self._among = among
        self._bits = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has grown by these; what follows its end is nobody's concern."""
        self._accept(tokens)

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """[vocabulary] bool: what may follow the answer and `path`; None when it is over by then.

        `path` is one that the target itself has chosen, as verification asks for no other. Raises
        NothingAllowed.
        """
        steps = self._accept(path)
        try:
            if self._matcher.is_terminated():
                return None
            self._matcher.fill_next_token_bitmask(torch.from_numpy(self._bits))
            if self._among is not None:
                self._bits &= self._among
            if not self._bits.any():
                raise NothingAllowed(self._field)
            bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
            return torch.from_numpy(bits[: self._vocab_size].view(bool))
        finally:
            if steps:
                self._matcher.rollback(steps)

    def _accept(self, tokens: Sequence[int]) -> int:
        """How many of them there were until it ended."""
        for step, token in enumerate(tokens):
            if self._matcher.is_terminated():
                return step
            right = self._matcher.accept_token(token)
            assert right, f"token {token} is none that the grammar allowed"
        return len(tokens)


class Grammars:
    """Grammars over one target's vocabulary. May be used from any thread.

    ends: the tokens that may end an answer where its grammar lets it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(ends)

    def start(self, spec: GrammarSpec) -> GrammarState:
        """At the beginning of an answer. A grammar is compiled once; a large one takes seconds.

        Raises ValueError for a grammar that is none, or that could not be kept to.
        """
        from xgrammar import GrammarMatcher

        try:
            compiled = self._compiled(spec)
        except (RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(f"{spec.field}: this {spec.kind} is none: {_why(error)}") from error
        among = self._in_json if spec.kind == "json_schema" else None
        return GrammarState(GrammarMatcher(compiled), self._vocab_size, spec.field, among)

    def _compiled(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json_schema":
            # On one line: a small target may find no end of white space that it is free to choose.
            return self._compiler.compile_json_schema(_kept(spec), any_whitespace=False)
        if spec.kind == "regex":
            return self._compiler.compile_regex(spec.text)
        return self._compiler.compile_grammar(spec.text)

    @cached_property
    def _compiler(self) -> Any:
        from xgrammar import GrammarCompiler  # slow to import, and rarely asked for

        return GrammarCompiler(self._info, max_threads=1, cache_limit_bytes=KEPT_BYTES)

    @cached_property
    def _info(self) -> Any:
        from xgrammar import TokenizerInfo

        return TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._ends
        )

    @cached_property
    def _in_json(self) -> NDArray[np.int32]:
        """Tokens without control characters: no JSON on one line has any, but xgrammar would let
        them into strings that have a length.
        """
        right = [min(token, default=ord(" ")) >= ord(" ") for token in self._info.decoded_vocab]
        right += [False] * (-len(right) % 32)
        return np.packbits(right, bitorder="little").view(np.int32)[None]


def _kept(spec: GrammarSpec) -> str:
    try:
        return json.dumps(keepable(json.loads(spec.text)))
    except ValueError as error:
        raise ValueError(f"{spec.field}: {error}") from error


def _why(error: RuntimeError | UnicodeDecodeError) -> str:
    """What went wrong, also where xgrammar has no words for it (a number that is too large), or
    quotes the grammar and cuts a character in two.
    """
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode(errors="replace")
    else:
        text = str(error)
    lines = text.strip().splitlines() or ["it cannot be read"]
    return _WHERE.sub("", lines[-1])
