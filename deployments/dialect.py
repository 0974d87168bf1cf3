"""The wire format of answers: how each of OpenAI's two endpoints words what was said, whole or in a
stream, with the field `speculation` that is ours. Requests are in `deployments.openai_schema`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.logprobs import WordLogprob, chat_logprobs, completion_logprobs
from deployments.tool_calls import Call, Spoken
from workers.request import SpeculationStats


@dataclass(frozen=True, slots=True)
class Choice:
    """Which draft a request got, and why, in words a client can read."""

    draft: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body of one answer shares. `created` is in seconds since 1970; `drafted` says of
    each choice what it was drafted by.
    """

    id: str
    created: int
    model: str
    prompt_tokens: int
    drafted: tuple[Choice, ...]

    def usage(self, stats: SpeculationStats) -> dict[str, int]:
        """Tokens read and written: `emitted` is what was delivered, after a stop or cap."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": stats.emitted,
            "total_tokens": self.prompt_tokens + stats.emitted,
        }

    @property
    def choice(self) -> Choice:
        """The draft of all choices, or all of theirs."""
        drafts = {choice.draft for choice in self.drafted}
        if len(drafts) == 1:
            return self.drafted[0]
        names = ", ".join(sorted(draft or "none" for draft in drafts))
        return Choice(names, "several prompts: each has a draft of its own")

    def speculation(self, stats: SpeculationStats, choice: Choice) -> dict[str, Any]:
        """Our field: what the draft did for this answer. tau is tokens per target step; members
        are the accepted tokens by who guessed them.
        """
        return {
            "draft": choice.draft,
            "reason": choice.reason,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "members": dict(stats.members),
            "tau": round(stats.tau, 4),
        }


@dataclass(frozen=True, slots=True)
class Said:
    """A choice of an answer, or a piece of one in a stream. reason: why it ended, None while it
    goes on; words: its logprobs, if it has any; called: how many calls there were before.
    """

    spoken: Spoken
    reason: str | None
    words: Sequence[WordLogprob] | None
    called: int = 0

    @property
    def ended(self) -> str | None:
        """The reason as the client hears it: an answer that ended with a call made one."""
        made = self.called or self.spoken.calls
        return "tool_calls" if made and self.reason == "stop" else self.reason


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint words its bodies; all else about the two is the same.

    `answer` makes the choice's content of all that was said, `piece` of a chunk's, with the number
    of calls before it; `before` that of a choice's first chunk, of the prompt it begins with, None
    where there is nothing to say before the answer.
    """

    prefix: str
    object: str
    chunk_object: str
    before: Callable[[str], dict[str, Any] | None]
    answer: Callable[[Spoken], dict[str, Any]]
    piece: Callable[[Spoken, int], dict[str, Any]]
    logprobs: Callable[[Sequence[WordLogprob]], dict[str, Any]]

    def whole(
        self, envelope: Envelope, choices: Sequence[Said], stats: SpeculationStats
    ) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return {
            **_head(envelope, self.object),
            "choices": [
                self._choice(number, self.answer(said.spoken), said.ended, said.words)
                for number, said in enumerate(choices)
            ],
            "usage": envelope.usage(stats),
            "speculation": envelope.speculation(stats, envelope.choice),
        }

    def opening(self, envelope: Envelope, echoes: Sequence[str]) -> list[dict[str, Any]]:
        """The choices' first chunks, before any answer: who speaks, or the prompts."""
        return [
            self._chunk(envelope, self._choice(number, content, None, None))
            for number, content in enumerate(map(self.before, echoes))
            if content is not None
        ]

    def chunk(
        self, envelope: Envelope, number: int, said: Said, stats: SpeculationStats
    ) -> dict[str, Any]:
        """A piece of a choice; its last one says why it ended and what speculation did."""
        content = self.piece(said.spoken, said.called)
        body = self._chunk(envelope, self._choice(number, content, said.ended, said.words))
        if said.reason:
            body["speculation"] = envelope.speculation(stats, envelope.drafted[number])
        return body

    def usage_chunk(self, envelope: Envelope, stats: SpeculationStats) -> dict[str, Any]:
        """The chunk `stream_options.include_usage` asks for: no choices, only the counts."""
        return {
            **_head(envelope, self.chunk_object),
            "choices": [],
            "usage": envelope.usage(stats),
            "speculation": envelope.speculation(stats, envelope.choice),
        }

    def _chunk(self, envelope: Envelope, choice: dict[str, Any]) -> dict[str, Any]:
        return {**_head(envelope, self.chunk_object), "choices": [choice]}

    def _choice(
        self,
        number: int,
        content: dict[str, Any],
        reason: str | None,
        words: Sequence[WordLogprob] | None,
    ) -> dict[str, Any]:
        logprobs = None if words is None else self.logprobs(words)
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}


def _head(envelope: Envelope, object_: str) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "object": object_,
        "created": envelope.created,
        "model": envelope.model,
    }


def _message(spoken: Spoken) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": spoken.text}
    if spoken.calls:
        calls = [_told(call) for call in spoken.calls]
        message |= {"content": spoken.text or None, "tool_calls": calls}
    return {"message": message}


def _delta(spoken: Spoken, called: int) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": spoken.text}
    if spoken.calls:
        delta["tool_calls"] = [
            {"index": number, **_told(call)} for number, call in enumerate(spoken.calls, called)
        ]
    return {"delta": delta}


def _told(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


CHAT = Dialect(
    prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    before=lambda _: {"delta": {"role": "assistant", "content": ""}},
    answer=_message,
    piece=_delta,
    logprobs=chat_logprobs,
)

COMPLETION = Dialect(
    prefix="cmpl",
    object="text_completion",
    chunk_object="text_completion",
    before=lambda echo: {"text": echo} if echo else None,
    answer=lambda spoken: {"text": spoken.text},
    piece=lambda spoken, _: {"text": spoken.text},
    logprobs=completion_logprobs,
)


def model_list(name: str, created: int, context_length: int) -> dict[str, Any]:
    """The body of /v1/models. `max_model_len`: other servers say the context's length so."""
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": context_length,
    }
    return {"object": "list", "data": [card]}
