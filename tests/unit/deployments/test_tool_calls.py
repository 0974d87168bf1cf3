"""What a target says about its tools, read as calls, and what it is told about them."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.tool_calls import Spoken, ToolUse, described, knows_tools, reader_for
from deployments.tool_schema import Function, Tool, call_schema

NAMES = frozenset({"add", "look"})


def call(name: str = "add", **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def read(pieces: list[str], *, forced: bool = False) -> Spoken:
    """All that is told of these pieces, put together."""
    reader = reader_for(ToolUse(NAMES, forced))
    told = [reader.read(piece, last=False) for piece in pieces[:-1]]
    told.append(reader.read(pieces[-1], last=True))
    return Spoken("".join(each.text for each in told), sum((each.calls for each in told), ()))


def facts(spoken: Spoken) -> tuple[str, list[tuple[str, Any]]]:
    """Without the ids, which are drawn."""
    return spoken.text, [(each.name, json.loads(each.arguments)) for each in spoken.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        (call(a=1), "", [("add", {"a": 1})]),
        (f"Well:\n{call(a=1)}\n", "Well:", [("add", {"a": 1})]),
        (f"{call(a=1)}\n{call('look')}", "", [("add", {"a": 1}), ("look", {})]),
        (f"{call(a=1)} and {call('look')} .", "and .", [("add", {"a": 1}), ("look", {})]),
        (f"Now \n{call(a=1)}\n{call('look')} go", "Now \ngo", [("add", {"a": 1}), ("look", {})]),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", {})]),
        (call("unknown"), call("unknown"), []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("<tool_call>[1]</tool_call> x", "<tool_call>[1]</tool_call> x", []),
        (
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            '<tool_call>{"name": "add", "arguments": 3}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "add"', '<tool_call>{"name": "add"', []),
        ("a < b <tool", "a < b <tool", []),
        ("  spaces stay  ", "  spaces stay  ", []),
    ],
)
def test_calls_are_read_and_all_else_is_text(
    text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    assert facts(read([text])) == (content, calls)


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", "_call>", "<", " ", "\n", "x", "</", call(a=1)]
    + [call("look"), call("unknown"), '{"name": "add"}', "你好"]
)


@given(st.lists(PARTS, max_size=12).map("".join), st.data())
def test_it_does_not_matter_in_what_pieces_a_text_comes(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for forced in (False, True):
        assert facts(read(pieces, forced=forced)) == facts(read([text], forced=forced))


def test_text_is_told_as_soon_as_it_is_no_call() -> None:
    reader = reader_for(ToolUse(NAMES, forced=False))
    told = [
        reader.read(piece, last=False) for piece in ("Look: <", "tool", "s> x <tool_call>{", "}")
    ]
    assert [each.text for each in told] == ["Look:", "", " <tools> x", ""]


def test_calls_have_ids_of_their_own() -> None:
    first, second = read([call(a=1) + call(a=1)]).calls
    assert first.id.startswith("call_")
    assert first.id != second.id


def test_a_forced_call_is_bare_and_comes_in_one_piece() -> None:
    reader = reader_for(ToolUse(NAMES, forced=True))
    assert reader.read('{"name": "add", ', last=False) == Spoken("")
    spoken = reader.read('"arguments": {"a": 1}}', last=True)
    assert facts(spoken) == ("", [("add", {"a": 1})])


def test_a_forced_call_that_was_cut_off_is_told_as_text() -> None:
    assert read(['{"name": "add", "argum'], forced=True) == Spoken('{"name": "add", "argum')


def test_an_answer_without_tools_is_left_alone() -> None:
    assert reader_for(None).read(call(a=1), last=False) == Spoken(call(a=1))


# -- schemas -------------------------------------------------------------------------------------

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}}},
    },
}


@pytest.mark.parametrize("others", [[], [Function(name="look")]])
def test_the_schema_of_a_call_is_that_of_its_arguments(others: list[Function]) -> None:
    validator = jsonschema.Draft202012Validator(
        call_schema([Function(name="add", parameters=TREE), *others])
    )

    def fits(name: str, arguments: Any) -> bool:
        return bool(validator.is_valid({"name": name, "arguments": arguments}))

    assert fits("add", {"root": {"left": {"left": {}}}, "again": {"root": {}}})
    assert not fits("add", {"root": {"left": 3}})
    assert not fits("add", {"root": {}, "again": {}})
    assert not fits("add", {})
    assert not fits("sub", {"root": {}})
    assert fits("look", {}) is bool(others)


# -- prompts -------------------------------------------------------------------------------------

ADD = Tool.model_validate(
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
)


def test_a_template_says_whether_it_knows_tools() -> None:
    assert knows_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
    assert not knows_tools("{{ messages[0]['content'] }} toolset")


@pytest.mark.parametrize("system", ["", "Be kind."])
def test_a_target_is_told_of_tools_in_its_system_turn(system: str) -> None:
    user = {"role": "user", "content": "1 + 1?"}
    first = [{"role": "system", "content": system}] if system else []
    told, *rest = described([*first, user], [ADD])
    assert rest == [user]
    assert told["role"] == "system"
    assert told["content"].startswith(system)
    assert json.dumps(ADD.model_dump(exclude_none=True)) in told["content"]
    assert call("a name").replace("\n", "") in told["content"].replace("\n", "")


def test_calls_and_results_are_retold_in_the_form_that_calls_are_asked_for() -> None:
    function = {"name": "add", "arguments": {"a": "你"}}
    turns = [
        {"role": "assistant", "content": "Well:", "tool_calls": [{"function": function}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    said = '<tool_call>\n{"name": "add", "arguments": {"a": "你"}}\n</tool_call>'
    assert described(turns, []) == [
        {"role": "assistant", "content": f"Well:\n{said}"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "<tool_response>\n2\n</tool_response>"},
    ]
