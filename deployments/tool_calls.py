"""Tools between a chat and its target: how they stand in the prompt, and how calls are read out of
what is said.

Where the target's chat template knows tools, they are its own concern. Where it does not, a system
turn describes them in the form of Hermes, which many models were trained on:

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
from typing import Any, Protocol

from deployments.tool_schema import Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_MENTIONS_TOOLS = re.compile(r"\btools\b")
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
    """A call that the target made. arguments: a JSON object, as text."""

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
    """The answer is one call. It comes in one piece; if the answer ended before it did, what there
    is of it comes as text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""

    def read(self, text: str, *, last: bool) -> Spoken:
        """Nothing, until all is there."""
        self._held += text
        if not last:
            return Spoken("")
        call = _call(self._held, self._names)
        return Spoken("", (call,)) if call else Spoken(self._held)


class CallReader:
    """Text with calls in it. White space between a call and what follows it is not content, that
    before it only where text follows. What looks like a call and is none is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
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
                yield call
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
    """What a chat may call. forced: whether it must, and says nothing else."""

    names: frozenset[str]
    forced: bool

    def reader(self) -> Reader:
        """For one answer."""
        return ForcedReader(self.names) if self.forced else CallReader(self.names)


def reader_for(tools: ToolUse | None) -> Reader:
    """For one answer of a chat with these tools, or of anything else."""
    return tools.reader() if tools else TextReader()


def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for them."""
    return _MENTIONS_TOOLS.search(template) is not None


def described(
    conversation: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: those there are stand in the first
    system turn, calls in the assistant's, and their results are told by the user.
    """
    turns = [_retold(turn) for turn in conversation]
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


def _retold(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{turn['content']}\n</tool_response>",
        }
    calls = [f"{OPEN}\n{_json(call['function'])}\n{CLOSE}" for call in turn.get("tool_calls", ())]
    content = "\n".join([turn["content"], *calls] if turn["content"] else calls)
    return {"role": turn["role"], "content": content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(text: str, names: Collection[str]) -> Call | None:
    """The call that a text is, if it is one to something that there is."""
    try:
        told = json.loads(text)
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("name") not in names:
        return None
    arguments = told.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(f"call_{secrets.token_hex(12)}", told["name"], json.dumps(arguments))


def _sure(before: str, unopened: str) -> int:
    """How much of a text is no part of a call that has not ended: what stands before it without
    white space at the end, or before what may become its beginning.
    """
    for size in range(min(len(OPEN) - 1, len(unopened)), 0, -1):
        if unopened.endswith(OPEN[:size]):
            before = unopened[:-size]
            break
    return len(before.rstrip())
