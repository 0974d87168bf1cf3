"""The wire format of tools: functions that a chat may call, and their calls."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from deployments.wire import JsonDict, Strict, Text, writable

MAX_TOOLS = 128

_FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _an_object(arguments: str) -> str:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object, as text")
    writable(given)
    return arguments


class Function(Strict):
    """What can be called. A forced call's arguments always fit `parameters`, whatever `strict`
    says; without them it has none.
    """

    name: _FunctionName
    description: Text | None = None
    parameters: JsonDict | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of a call's arguments."""
        return {"type": "object", "properties": {}, **(self.parameters or {})}


class Tool(Strict):
    """A function is the only kind there is."""

    type: Literal["function"]
    function: Function


class _Named(Strict):
    name: _FunctionName


class NamedTool(Strict):
    """The one to be called."""

    type: Literal["function"]
    function: _Named


class CalledFunction(Strict):
    """A name, and its arguments as JSON text."""

    name: _FunctionName
    arguments: Annotated[Text, AfterValidator(_an_object)]


class ToolCall(Strict):
    """A call in a message of the assistant's."""

    id: Text = Field(min_length=1, max_length=256)
    type: Literal["function"]
    function: CalledFunction

    @property
    def as_told(self) -> dict[str, Any]:
        """Name and arguments, as a target says and reads them."""
        return {"name": self.function.name, "arguments": json.loads(self.function.arguments)}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def call_schema(functions: Sequence[Function], *, several: bool) -> dict[str, Any]:
    """The JSON schema of a call to one of them, or of a list of such calls."""
    if several:
        return {"type": "array", "items": _any_call(functions, "#/items"), "minItems": 1}
    return _any_call(functions, "#")


def _any_call(functions: Sequence[Function], place: str) -> dict[str, Any]:
    if len(functions) == 1:
        return _call_schema(functions[0], place)
    return {
        "anyOf": [
            _call_schema(function, f"{place}/anyOf/{number}")
            for number, function in enumerate(functions)
        ]
    }


def _call_schema(function: Function, place: str) -> dict[str, Any]:
    arguments = _moved(function.arguments_schema, f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """With its references as they must be where it is a part of a larger one."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
