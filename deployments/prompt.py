"""From a request's words to the target's token ids, and to what the router looks at."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from deployments.errors import bad_request
from deployments.openai_schema import Message
from deployments.tool_calls import calls_told, described, knows_tools
from deployments.tool_schema import Tool
from router.decision import RouteRequest

# The template decides what a role looks like; it knows OpenAI's newer name for "system" by the
# old one only.
_TEMPLATE_ROLES = {"developer": "system"}


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: str | dict[str, str] | None

    def __call__(self, text: str, *, add_special_tokens: bool) -> Mapping[str, list[int]]:
        """Token ids under "input_ids"."""

    def get_chat_template(self, *, tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The template that is used with these tools; there may be several."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> Any:
        """The chat in the target's own format."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target reads, and what the router judges by."""

    ids: tuple[int, ...]
    route: RouteRequest


class Prompter:
    """Encodes prompts with the target's tokenizer, in a thread: a long prompt takes a while."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The chat in the target's template, ready for the assistant's turn.

        Raises:
            ApiError: the target has no template, or its template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise bad_request(
                "messages", "this target has no chat template; use /v1/completions instead"
            )
        return await asyncio.to_thread(self._chat, messages, tools)

    async def completion(self, field: str, prompt: str | list[int], vocab_size: int) -> Prompt:
        """A text, or ids as they are.

        Raises:
            ApiError: the field holds nothing to continue, or an id outside the vocabulary.
        """
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._text, field, prompt)
        return await asyncio.to_thread(self._tokens, field, prompt, vocab_size)

    async def ids_of(self, text: str) -> tuple[int, ...]:
        """The ids of a completion's prompt; none of an empty one."""
        return await asyncio.to_thread(self._ids, text, add_special_tokens=True)

    async def text_of(self, ids: Sequence[int], vocab_size: int) -> str:
        """The text of ids.

        Raises:
            ApiError: an id outside the vocabulary.
        """
        _check_ids("tokens", ids, vocab_size)
        return await asyncio.to_thread(self._tokenizer.decode, ids)

    def _chat(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        conversation = [_turn(message) for message in messages]
        told = [tool.model_dump(exclude_none=True) for tool in tools] or None
        if not knows_tools(self._tokenizer.get_chat_template(tools=told)):
            conversation, told = described(conversation, tools), None
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, told, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise bad_request("messages", f"the target's chat template refuses: {error}") from error
        return Prompt(self._ids(text, add_special_tokens=False), _chat_route(messages))

    def _text(self, field: str, prompt: str) -> Prompt:
        ids = self._ids(prompt, add_special_tokens=True)
        if not prompt or not ids:
            raise bad_request(field, f"{field}: empty, there is nothing to continue")
        return Prompt(ids, RouteRequest(query=prompt, context=""))

    def _tokens(self, field: str, ids: list[int], vocab_size: int) -> Prompt:
        _check_ids(field, ids, vocab_size)
        return Prompt(tuple(ids), RouteRequest(query=self._tokenizer.decode(ids), context=""))

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _turn(message: Message) -> dict[str, Any]:
    """As chat templates read it."""
    role = _TEMPLATE_ROLES.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        turn["tool_calls"] = calls_told(message.tool_calls)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    foreign = max(ids, default=0)
    if foreign >= vocab_size:
        raise bad_request(
            field, f"{field}: token {foreign} is outside the vocabulary of {vocab_size}"
        )


def _chat_route(messages: Sequence[Message]) -> RouteRequest:
    """The last user turn is the query, all before it the context."""
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=len(messages) - 1)
    before = "\n".join(message.text for message in messages[:last])
    return RouteRequest(query=messages[last].text, context=before)
