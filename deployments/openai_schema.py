"""The wire format of requests: OpenAI's, and the field `speculation` that is ours.

A field that is not served is refused, never ignored. Some clients always send OpenAI's defaults
along (`n: 1`, `logprobs: false`): a field of theirs that we do not serve is accepted with the one
value that asks for nothing. Answers are worded in `deployments.dialect`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployments.tool_calls import ToolUse
from deployments.tool_schema import (
    MAX_TOOLS,
    Function,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
    call_schema,
)
from deployments.wire import JsonDict, OneFault, Strict, Text
from workers.grammar import GrammarSpec

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20
SEED_LIMIT = 2**64

_Count = Annotated[int, Field(ge=1)]
_One = Annotated[int, Field(ge=1, le=1)]
_TokenId = Annotated[int, Field(ge=0)]
_Top = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Model = Annotated[
    str | None,
    Field(max_length=512, description="as /v1/models says; unset: the one that is served"),
]

_Name = Annotated[
    str | None, Field(max_length=512, description="says who asks; changes nothing of the answer")
]

_Stop = Annotated[Text, Field(min_length=1)]


class SpeculationOptions(Strict):
    """Which draft rides ahead (`auto`: the router chooses; `none`: plain decoding), and how far."""

    draft: str = Field(default="auto", max_length=64)
    budget: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        default=None,
        description="nodes of the token tree; auto: as many as pay, 0: decode plainly; without it, "
        "as the server is configured",
    )

    @field_validator("draft", mode="before")
    @classmethod
    def _null_is_the_default(cls, draft: Any) -> Any:
        return "auto" if draft is None else draft


class StreamOptions(Strict):
    """OpenAI's: `include_usage` asks for one more chunk that holds the usage."""

    include_usage: bool = False


class TextPart(Strict):
    """A piece of a message. Only text is served."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[OneFault[ToolCall], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="what the assistant called"
    )
    tool_call_id: Text | None = Field(
        default=None, validate_default=True, description="whose result a tool's message is"
    )
    name: Text | None = Field(
        default=None, max_length=512, description="of the function whose result it is"
    )
    content: Text | OneFault[TextPart] | None = Field(default=None, validate_default=True)
    # What the official client's own answers hold, so that they can be sent back as they are.
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @field_validator("tool_calls")
    @classmethod
    def _only_the_assistant_calls(
        cls, calls: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        if calls and info.data.get("role") != "assistant":
            raise ValueError("only the assistant's messages have any")
        return calls

    @field_validator("tool_call_id")
    @classmethod
    def _a_result_names_its_call(cls, id_: str | None, info: ValidationInfo) -> str | None:
        is_result = info.data.get("role") == "tool"
        if id_ is None and is_result:
            raise PydanticCustomError("missing", "a tool's message names the call it answers")
        if id_ is not None and not is_result:
            raise ValueError("only a tool's messages have one")
        return id_

    @field_validator("name")
    @classmethod
    def _only_results_have_names(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is not None and info.data.get("role") != "tool":
            raise ValueError("only a tool's messages may have one")
        return name

    @field_validator("content")
    @classmethod
    def _something_is_said(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and not info.data.get("tool_calls", True):
            raise PydanticCustomError("missing", "must be a text, or a list of texts")
        return content

    @property
    def text(self) -> str:
        """The content in one string, its parts joined as they come."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Strict):
    """Any text at all."""

    type: Literal["text"]

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to."""
        return None


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to."""
        return GrammarSpec("json_schema", '{"type": "object"}')


class NamedSchema(Strict):
    """OpenAI's wrapping of a JSON schema. It is always kept to, whatever `strict` says."""

    name: Text = Field(max_length=64)
    description: Text | None = None
    schema_: JsonDict = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to."""
        return GrammarSpec("json_schema", json.dumps(self.json_schema.schema_))


class Regex(Strict):
    """A text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Text = Field(min_length=1)

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to."""
        return GrammarSpec("regex", self.regex)


class Ebnf(Strict):
    """A text of a context-free grammar, in the form of GGML's GBNF; its first rule is `root`."""

    type: Literal["grammar"]
    grammar_: Text = Field(alias="grammar", min_length=1)

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to."""
        return GrammarSpec("ebnf", self.grammar_)


_Format = Annotated[
    TextFormat | JsonObject | JsonSchema | Regex | Ebnf, Field(discriminator="type")
]


class _Generation(Strict):
    """What both endpoints take. Ranges are OpenAI's where they have the field."""

    model: _Model = None
    max_tokens: _Count | None = Field(
        default=None, description="unset: to the end of the answer or context"
    )
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, description="0: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=SEED_LIMIT, description="unset: a random one")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="tokens that end the answer, as the target's own end does"
    )
    min_tokens: int | None = Field(
        default=None, ge=0, description="before which no token ends the answer; stop strings do"
    )
    ignore_eos: bool | None = Field(
        default=None, description="go on where the target would have ended"
    )
    response_format: _Format | None = Field(default=None, description="what the answer keeps to")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        default=None, description="choices; number k is what seed + k gives"
    )
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        description="seconds within which all of the answer must be there; else it is an error",
    )
    user: _Name = None
    safety_identifier: _Name = None
    prompt_cache_key: _Name = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None

    @field_validator("speculation", mode="before")
    @classmethod
    def _null_is_the_default(cls, speculation: Any) -> Any:
        return {} if speculation is None else speculation

    @field_validator("response_format")
    @classmethod
    def _a_format_says_where_it_ends(cls, response_format: Any, info: ValidationInfo) -> Any:
        if response_format is not None and response_format.grammar is not None:
            for field in ("min_tokens", "ignore_eos"):
                if info.data.get(field):
                    raise ValueError(f"says itself where the answer ends: leave {field} out")
        return response_format

    @field_validator("stream_options")
    @classmethod
    def _options_belong_to_a_stream(
        cls, options: StreamOptions | None, info: ValidationInfo
    ) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("only allowed together with stream: true")
        return options

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none, one or several."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def grammar(self) -> GrammarSpec | None:
        """What the answer keeps to; None: any text."""
        return self.response_format.grammar if self.response_format else None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants; None: as many as there is room for."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told of at each place; None: no logprobs."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt."""
        return False

    @property
    def tool_use(self) -> ToolUse | None:
        """What the answer may call; None: nothing."""
        return None


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[OneFault[Message], Field(min_length=1)]
    max_completion_tokens: _Count | None = Field(
        default=None, description="OpenAI's new name for max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: _Top | None = Field(
        default=None, description="how many of the likeliest tokens to tell at each place"
    )

    tools: Annotated[OneFault[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = Field(
        default=None, description="functions that the answer may call"
    )
    tool_choice: ToolChoice | None = Field(
        default=None, description="auto: what is said decides; required, or a name: it is a call"
    )
    parallel_tool_calls: bool | None = Field(
        default=None,
        description="false: no answer has more than one call, those after it are left out; true: "
        "where tool_choice is required, an answer may be several; unset: it is one there",
    )

    @field_validator("tools")
    @classmethod
    def _names_are_unique(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise ValueError(f"two functions are called {name!r}")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _there_is_a_choice(
        cls, choice: ToolChoice | None, info: ValidationInfo
    ) -> ToolChoice | None:
        if choice in (None, "none"):
            return choice
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if not names and "tools" in info.data:
            raise ValueError("there are no tools to choose from: send some, or leave it out")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"there is no function {choice.function.name!r} among the tools")
        if choice != "auto":
            for field in ("response_format", "min_tokens", "ignore_eos"):
                if info.data.get(field):
                    raise ValueError(f"an answer that must be a call has its own form: no {field}")
        return choice

    @field_validator("parallel_tool_calls")
    @classmethod
    def _only_with_tools(cls, parallel: bool | None, info: ValidationInfo) -> bool | None:
        if parallel is not None and info.data.get("tools", ()) is None:
            raise ValueError("there are no tools to call: send some, or leave it out")
        return parallel

    @property
    def callable_tools(self) -> list[Tool]:
        """Those that the target is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def forced(self) -> list[Function]:
        """The functions of which the answer must call one; none where it need not."""
        if self.tool_choice in (None, "none", "auto"):
            return []
        functions = [tool.function for tool in self.callable_tools]
        if isinstance(self.tool_choice, NamedTool):
            return [each for each in functions if each.name == self.tool_choice.function.name]
        return functions

    @property
    def tool_use(self) -> ToolUse | None:
        names = frozenset(tool.function.name for tool in self.callable_tools)
        if not names:
            return None
        return ToolUse(names, bool(self.forced), single=self.parallel_tool_calls is False)

    @property
    def grammar(self) -> GrammarSpec | None:
        if self.forced:
            several = self.tool_choice == "required" and bool(self.parallel_tool_calls)
            schema = call_schema(self.forced, several=several)
            return GrammarSpec("json_schema", json.dumps(schema), "tools")
        return super().grammar

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top and not info.data.get("logprobs"):
            raise ValueError("only allowed together with logprobs: true")
        return top

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, limit: int | None, info: ValidationInfo) -> int | None:
        old = info.data.get("max_tokens")
        if None not in (limit, old) and limit != old:
            raise ValueError("disagrees with max_tokens: send one of the two")
        return limit

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


_Tokens = Annotated[OneFault[_TokenId], Field(min_length=1)]


_Texts = Annotated[OneFault[Text], Field(min_length=1)]
_TokenLists = Annotated[OneFault[_Tokens], Field(min_length=1)]


class CompletionRequest(_Generation):
    """POST /v1/completions. A prompt is a text or token ids; those of a list are answered each as
    if it had been sent alone.
    """

    prompt: Text | _Tokens | _Texts | _TokenLists
    best_of: _One | None = None
    echo: bool | None = Field(default=None, description="whether an answer begins with its prompt")
    logprobs: _Top | None = Field(
        default=None,
        description="tell how likely each token was, and as many of the likeliest at its place",
    )
    suffix: Literal[""] | None = None

    @field_validator("logprobs")
    @classmethod
    def _of_the_answer_alone(cls, logprobs: int | None, info: ValidationInfo) -> int | None:
        if logprobs is not None and info.data.get("echo"):
            raise ValueError("those of a prompt are not served: leave it or echo out")
        return logprobs

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """What is to be continued, by the field that says it."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            return {f"prompt.{number}": each for number, each in enumerate(prompt)}
        return {"prompt": prompt}


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a chat as the target reads it."""

    model: _Model = None
    prompt: Text | None = None
    messages: Annotated[OneFault[Message], Field(min_length=1)] | None = Field(
        default=None, validate_default=True
    )

    @field_validator("messages")
    @classmethod
    def _one_of_both(
        cls, messages: list[Message] | None, info: ValidationInfo
    ) -> list[Message] | None:
        prompt = info.data.get("prompt", "")  # not there: it is wrong, which is told already
        if messages is None and prompt is None:
            raise PydanticCustomError("missing", "send them, or a prompt")
        if messages is not None and prompt is not None:
            raise ValueError("not allowed beside a prompt: send one of the two")
        return messages


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: _Model = None
    tokens: OneFault[_TokenId]
