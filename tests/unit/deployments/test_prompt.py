"""Chats as a real tokenizer words them, with the templates that targets come with."""

from typing import Any

import pytest

from deployments.openai_schema import ChatRequest
from deployments.prompt import Prompter
from tests.tiny import tiny_tokenizer

# As in Hermes' and Qwen's, shortened.
HERMES = """\
{%- if tools %}{{ '<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '</tools> say <tool_call>' }}{% endif %}
{%- for message in messages %}{{ '|' + message.role + ': ' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{%- endfor %}{% endfor %}"""
PLAIN = "{% for message in messages %}{{ '|' + message.role + ': ' + message.content }}{% endfor %}"
LLAMA = PLAIN + "{% if tools %}{{ tools | tojson }}{% endif %}"
ALTERNATING = (
    "{% for message in messages %}{% if loop.index0 and message.role == messages[loop.index0 - 1]"
    ".role %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)

CALL: Any = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": "x"}'}}
BODY = ChatRequest.model_validate(
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "d"}]},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
            {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "3"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "sums"}}],
    }
)


async def read(template: str | dict[str, str], *, told: bool = True) -> str:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    prompt = await Prompter(tokenizer).chat(BODY.messages, BODY.callable_tools if told else ())
    text: str = tokenizer.decode(prompt.ids)
    return text


TOOL = '{"type": "function", "function": {"name": "add", "description": "sums"}}'
SAID = '{"name": "add", "arguments": {"a": "x"}}'
NATIVE = f"|user: Hi|assistant: <tool_call>{SAID}<tool_call>{SAID}|tool: 2|tool: 3"
RETOLD = (
    f"|user: Hi|assistant: <tool_call>\n{SAID}\n</tool_call>\n<tool_call>\n{SAID}\n</tool_call>"
    "|user: <tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
)


@pytest.mark.parametrize("template", [HERMES, {"default": PLAIN, "tool_use": HERMES}])
async def test_a_template_that_knows_tools_words_them(template: str | dict[str, str]) -> None:
    assert await read(template) == f"<tools>{TOOL}</tools> say <tool_call>{NATIVE}"


async def test_without_tools_such_a_template_still_words_the_calls_there_were() -> None:
    assert await read(HERMES, told=False) == NATIVE


@pytest.mark.parametrize("template", [PLAIN, LLAMA, ALTERNATING, {"default": PLAIN}])
async def test_for_all_others_they_are_described(template: str | dict[str, str]) -> None:
    system, answers = (await read(template)).split("</tool_call>|", 1)
    assert system.startswith("|system: ")
    assert f"<tools>\n{TOOL}\n</tools>" in system
    assert f"|{answers}" == RETOLD
    assert await read(template, told=False) == RETOLD
