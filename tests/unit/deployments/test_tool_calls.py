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


def read(pieces: list[str], *, forced: bool = False, single: bool = False) -> Spoken:
    """All that is told of these pieces, put together."""
    reader = reader_for(ToolUse(NAMES, forced, single))
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
        *(
            (said, said, [])
            for said in (
                '<tool_call>{"name": ["add"]}</tool_call>',
                '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
                '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 9999 + "</tool_call>",
            )
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
    for form in ({}, {"forced": True}, {"single": True}):
        assert facts(read(pieces, **form)) == facts(read([text], **form))


def test_text_is_told_as_soon_as_it_is_no_call() -> None:
    reader = reader_for(ToolUse(NAMES, forced=False, single=False))
    told = [
        reader.read(piece, last=False) for piece in ("Look: <", "tool", "s> x <tool_call>{", "}")
    ]
    assert [each.text for each in told] == ["Look:", "", " <tools> x", ""]


def test_calls_have_ids_of_their_own() -> None:
    first, second = read([call(a=1) + call(a=1)]).calls
    assert first.id.startswith("call_")
    assert first.id != second.id


def test_a_forced_call_is_bare_and_comes_in_one_piece() -> None:
    reader = reader_for(ToolUse(NAMES, forced=True, single=False))
    assert reader.read('{"name": "add", ', last=False) == Spoken("")
    spoken = reader.read('"arguments": {"a": 1}}', last=True)
    assert facts(spoken) == ("", [("add", {"a": 1})])


@pytest.mark.parametrize(
    "said",
    [
        '{"name": "add", "argum',
        '{"name": "add", "arguments": {"a": ' + "[" * 9999,
        '[{"name": "look", "arguments": {}}, {"name": "add"',
        "[",
        "",
    ],
)
def test_a_forced_call_that_was_cut_off_is_told_as_text(said: str) -> None:
    assert read([said], forced=True) == Spoken(said)


def test_forced_calls_may_be_several() -> None:
    said = '[{"name": "add", "arguments": {"a": 1}}, {"name": "look", "arguments": {}}]'
    for pieces in ([said], [said[:20], said[20:]], list(said)):
        assert facts(read(pieces, forced=True)) == ("", [("add", {"a": 1}), ("look", {})])


def test_where_one_call_is_wanted_later_ones_are_left_out() -> None:
    said = f"One: {call(a=1)} two: {call('look')}{call(a=2)} end"
    assert facts(read([said])) == (
        "One: two: end",
        [("add", {"a": 1}), ("look", {}), ("add", {"a": 2})],
    )
    assert facts(read([said], single=True)) == ("One: two: end", [("add", {"a": 1})])


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{ "a" :[1e999,-0.12345678901234567890 , {"}":"]"}],"b":"你\\n\\u4f60"}',
        '{"a": ' + "1" * 5000 + "}",
        '{"a": 1, "a": 2}',
    ],
)
def test_arguments_are_told_as_they_were_said(arguments: str) -> None:
    """Numbers are not rounded, and no escape is put for what had none."""
    for said in (
        f'{{"name": "add", "arguments": {arguments}}}',
        f' {{ "arguments" :\n{arguments} ,"x": [{{}}], "name":"add"}} ',
    ):
        (told,) = read([f"<tool_call>{said}</tool_call>"]).calls
        assert told.arguments == arguments
        assert read([said], forced=True).calls[0].arguments == arguments


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


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("others", [[], [Function(name="look")]])
def test_the_schema_of_a_call_is_that_of_its_arguments(
    others: list[Function], several: bool
) -> None:
    validator = jsonschema.Draft202012Validator(
        call_schema([Function(name="add", parameters=TREE), *others], several=several)
    )

    def fits(name: str, arguments: Any) -> bool:
        call = {"name": name, "arguments": arguments}
        return bool(validator.is_valid([call, call] if several else call))

    assert fits("add", {"root": {"left": {"left": {}}}, "again": {"root": {}}})
    assert not fits("add", {"root": {"left": 3}})
    assert not fits("add", {"root": {}, "again": {}})
    assert not fits("add", {})
    assert not fits("sub", {"root": {}})
    assert fits("look", {}) is bool(others)
    assert not validator.is_valid([])


# -- prompts -------------------------------------------------------------------------------------

ADD = Tool.model_validate(
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
)


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        ("{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}", True),
        ("{% generation %}{{ '<tool_call>' + tools }}{% endgeneration %}", True),
        ("{% if tools %}{{ tools | tojson }} [TOOL_CALLS]{% endif %}", False),
        ("{{ messages[0]['content'] }} no tools {# tools #}{{ 'tools' }} <tool_call>", False),
        ("{{ toolset }}<tool_call>", False),
    ],
)
def test_a_template_says_whether_it_knows_tools_as_they_are_read_here(
    template: str, knows: bool
) -> None:
    assert knows_tools(template) is knows


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
        {"role": "tool", "content": "3", "tool_call_id": "y"},
        {"role": "user", "content": "So?"},
        {"role": "tool", "content": "4", "tool_call_id": "z"},
    ]
    said = '<tool_call>\n{"name": "add", "arguments": {"a": "你"}}\n</tool_call>'
    assert described(turns, []) == [
        {"role": "assistant", "content": f"Well:\n{said}"},
        {"role": "assistant", "content": said},
        {
            "role": "user",
            "content": "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>",
        },
        {"role": "user", "content": "So?"},
        {"role": "user", "content": "<tool_response>\n4\n</tool_response>"},
    ]
