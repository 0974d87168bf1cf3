"""Tools between a chat and its target: how they stand in the prompt, and how calls are read out of
what is said.

Where the target's chat template knows tools and asks for calls in the form of Hermes, they are its
own concern. Where it does not, a system turn describes them in that form, which many models were
trained on:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

Calls are read in that form, or, where one is forced, as the bare JSON that its grammar leaves.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, NoReturn, Protocol

from jinja2 import Environment

from deployments.tool_schema import Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_BETWEEN = re.compile(r"\s*[,:]?\s*")  # parts of a JSON object or list
_INSTRUCTIONS = """\
You may call functions. These are their signatures:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments, as JSON, between <tool_call> and </tool_call>:
<tool_call>
{{"name": "a name", "arguments": {{}}}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the target made. arguments: a JSON object, as it was said."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """A piece of an answer: text, and calls that are complete with it."""

    text: str
    calls: tuple[Call, ...] = ()


class Reader(Protocol):
    """Makes an answer's text into what is told of it."""

    def read(self, text: str, *, last: bool) -> Spoken:
        """The next piece, after all that were read before."""


class TextReader:
    """No tools, no calls."""

    def read(self, text: str, *, last: bool) -> Spoken:
        """As it comes."""
        return Spoken(text)


class ForcedReader:
    """The answer is one call, or a list of calls. It comes in one piece; if it was ended before
    that, what there is of it comes as text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def read(self, text: str, *, last: bool) -> Spoken:
        """Nothing, until all is there."""
        self._held += text
        if not last:
            return Spoken("")
        calls = _calls(self._held, self._names)
        return Spoken("", calls) if calls else Spoken(self._held)


class CallReader:
    """Text with calls in it. White space between a call and what follows it is not content, that
    before it only where text follows. What looks like a call and is none is text. single: calls
    after the first are left out.
    """

    def __init__(self, names: Collection[str], *, single: bool) -> None:
        self._names = names
        self._single = single
        self._made = False
        self._held = ""
        self._said = False
        self._called = False  # and nothing has been said since
        self._gap = ""  # white space between the last text and the calls after it

    def read(self, text: str, *, last: bool) -> Spoken:
        """What is sure by now: the beginning of a call is held back until there is all of it."""
        self._held += text
        pieces = list(self._pieces(last=last))
        said = "".join(piece for piece in pieces if isinstance(piece, str))
        return Spoken(said, tuple(piece for piece in pieces if isinstance(piece, Call)))

    def _pieces(self, *, last: bool) -> Iterator[str | Call]:
        while self._held:
            before, opened, rest = self._held.partition(OPEN)
            inner, closed, after = rest.partition(CLOSE)
            if not closed:
                sure = len(self._held) if last else _sure(before, self._held if not opened else "")
                yield self._say(self._held[:sure])
                self._held = self._held[sure:]
                return
            call = _call(inner, self._names)
            if call is None:
                yield self._say(before + OPEN + inner + CLOSE)
            else:
                yield self._say(before.rstrip())
                if self._said and not self._called:
                    self._gap = before[len(before.rstrip()) :]
                self._called = True
                if not (self._single and self._made):
                    yield call
                self._made = True
            self._held = after

    def _say(self, text: str) -> str:
        if self._called:
            text = text.lstrip()
            if text:
                text, self._called = self._gap + text, False
        self._said = self._said or bool(text)
        return text


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call. forced: whether it must, and says nothing else; single: one call at
    most.
    """

    names: frozenset[str]
    forced: bool
    single: bool

    def reader(self) -> Reader:
        """For one answer."""
        if self.forced:
            return ForcedReader(self.names)
        return CallReader(self.names, single=self.single)


def reader_for(tools: ToolUse | None) -> Reader:
    """For one answer of a chat with these tools, or of anything else."""
    return tools.reader() if tools else TextReader()


@lru_cache(maxsize=8)
def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for them, and asks for calls in the form that is read."""
    # Its words, and not what it is made of: templates may have tags of Hugging Face's own.
    words = {(kind, word) for _, kind, word in Environment().lex(template)}
    return ("name", "tools") in words and OPEN in template


def described(
    conversation: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: those there are stand in the first
    system turn, calls in the assistant's, and their results are told by the user, in one turn where
    they follow each other: many templates want the roles to alternate.
    """
    turns = list[dict[str, Any]]()
    for is_result, group in groupby(conversation, lambda turn: turn["role"] == "tool"):
        some = list(group)
        turns += [_results(some)] if is_result else map(_retold, some)
    if not tools:
        return turns
    told = "\n".join(_json(tool.model_dump(exclude_none=True)) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=told)
    if turns[0]["role"] == "system":
        first = {**turns[0], "content": f"{turns[0]['content']}\n\n{instructions}"}
        return [first, *turns[1:]]
    return [{"role": "system", "content": instructions}, *turns]


def calls_told(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """As Hugging Face's templates read them: arguments are an object."""
    return [{"id": call.id, "type": "function", "function": call.as_told} for call in calls]


def _results(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = [f"<tool_response>\n{turn['content']}\n</tool_response>" for turn in turns]
    return {"role": "user", "content": "\n".join(told)}


def _retold(turn: dict[str, Any]) -> dict[str, Any]:
    calls = [f"{OPEN}\n{_json(call['function'])}\n{CLOSE}" for call in turn.get("tool_calls", ())]
    content = "\n".join([turn["content"], *calls] if turn["content"] else calls)
    return {"role": turn["role"], "content": content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


# Numbers stay text: nobody looks at them, and long ones would be refused.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused)


def _call(text: str, names: Collection[str]) -> Call | None:
    """The call that a text is, if it is one to something that there is."""
    try:
        told = _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(told.get("arguments", {}), dict):
        return None
    name = told.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    parts = _parts(text)
    members = dict(zip(map(_JSON.decode, parts[::2]), parts[1::2], strict=True))
    return Call(f"call_{secrets.token_hex(12)}", name, members.get("arguments", "{}"))


def _calls(text: str, names: Collection[str]) -> tuple[Call, ...]:
    """Those that a call or a list of calls is; none if one of them is none."""
    try:
        several = isinstance(_JSON.decode(text), list)
    except (ValueError, RecursionError):
        return ()
    calls = [_call(part, names) for part in (_parts(text) if several else [text])]
    return tuple(call for call in calls if call) if all(calls) else ()


def _parts(text: str) -> list[str]:
    """The items of a JSON list, or the keys and values of an object in turn, as they are written:
    read and written anew, numbers would be rounded.
    """
    parts, at = list[str](), len(text) - len(text.lstrip()) + 1
    while text[at := _behind(text, at)] not in "]}":
        start, at = at, _JSON.raw_decode(text, at)[1]
        parts.append(text[start:at])
    return parts


def _behind(text: str, at: int) -> int:
    """Where the next part begins, or what ends them all stands."""
    between = _BETWEEN.match(text, at)
    assert between is not None, "it may be empty"
    return between.end()


def _sure(before: str, unopened: str) -> int:
    """How much of a text is no part of a call that has not ended: what stands before it without
    white space at the end, or before what may become its beginning.
    """
    for size in range(min(len(OPEN) - 1, len(unopened)), 0, -1):
        if unopened.endswith(OPEN[:size]):
            before = unopened[:-size]
            break
    return len(before.rstrip())
