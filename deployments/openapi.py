"""What the OpenAPI document says of answers: requests are described by their own models.

Nothing is checked against these while serving; the tests hold every answer against the document.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from deployments.links import VerifierStatus


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Fault(_Answer):
    """What is wrong. param: the path of the field at fault, such as `messages.0.content`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Answer):
    """OpenAI's error body; in a stream that fails in the middle, an event."""

    error: Fault


class Usage(_Answer):
    """Tokens read and delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Speculation(_Answer):
    """What the draft did for this answer. tau: tokens per target step; members: accepted tokens by
    the part of the draft that guessed them.
    """

    draft: str | None
    reason: str
    steps: int
    drafted: int
    accepted: int
    members: dict[str, int]
    tau: float


class Token(_Answer):
    """A token and the natural logarithm of its probability; bytes null where they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(Token):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[Token]


class ChatLogprobs(_Answer):
    """One entry for each token."""

    content: list[ChosenToken]
    refusal: None


class CompletionLogprobs(_Answer):
    """One entry in each list for each token; text_offset in characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunction(_Answer):
    """arguments: JSON, as a text."""

    name: str
    arguments: str


class Called(_Answer):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    """The answer: text, calls of tools, or both."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[Called] | SkipJsonSchema[None] = Field(
        default=None, description="only where there are any"
    )


class ChatChoice(_Answer):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionChoice(_Answer):
    """One of the answers."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class _Whole(_Answer):
    id: str
    created: int
    model: str
    usage: Usage
    speculation: Speculation


class ChatCompletion(_Whole):
    """A chat's answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Whole):
    """A text's continuation."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Tokenized(_Answer):
    """The ids that the target reads."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(_Answer):
    """The text of ids."""

    prompt: str


class ModelCard(_Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(_Answer):
    """All models: the one that is served."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(_Answer):
    """Whether answers can be had."""

    status: Literal["ok", "unhealthy"]
    verifier: VerifierStatus


Responses = dict[int | str, dict[str, Any]]

_STREAM = {
    "itemSchema": {
        "type": "object",
        "properties": {
            "data": {
                "type": "string",
                "description": "a part of the answer, or an error, as JSON; of the last event "
                "`[DONE]`",
            }
        },
        "required": ["data"],
    }
}
"""Of each event, as FastAPI and OpenAPI 3.2 have it."""

_WRONG: Responses = {
    400: {"model": ErrorBody, "description": "A field is wrong: `param` names it"},
    401: {"model": ErrorBody, "description": "The server asks for a key (`api.key`)"},
    404: {"model": ErrorBody, "description": "Another model is served"},
    413: {"model": ErrorBody, "description": "The body is too large (`api.max_body_bytes`)"},
    503: {
        "model": ErrorBody,
        "description": "Too many requests, or the verifier is restarting; see `Retry-After`",
    },
    "default": {"model": ErrorBody, "description": "Any other error"},
}

_LATE: Responses = {
    504: {"model": ErrorBody, "description": "Not complete within `deadline_s`"},
}


def answers(model: type[BaseModel]) -> Responses:
    """An answer, and what may come instead of it."""
    return {200: {"model": model, "description": "The answer"}, **_WRONG}


def streams(model: type[BaseModel]) -> Responses:
    """An answer that may be asked for as a stream, and what may come instead of it."""
    whole = {
        "model": model,
        "description": "The answer; with `stream` as server-sent events, each a part of it as "
        "JSON, the last one `[DONE]`",
        "content": {"text/event-stream": _STREAM},
    }
    return {200: whole, **_WRONG, **_LATE}


HEALTH: Responses = {
    200: {"model": Health, "description": "Answers can be had"},
    503: {
        "model": Health | ErrorBody,
        "description": "No answers can be had; an error if the verifier does not even say so",
    },
    "default": {"model": ErrorBody, "description": "Any other error"},
}
