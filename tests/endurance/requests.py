"""What is asked in long runs: a bounded catalogue, so that each text can be known beforehand."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.serving import SONG

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

PROMPTS = (
    "the thing and the other thing and the",
    "def fibonacci(n):\n    ",
    "你好,我想知道",
    "Sing of the king of far away, and of all that the king has lost. " * 4,
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"temperature": 0.8, "top_p": 0.95, "seed": 3},
    "hot": {"temperature": 1.2, "top_k": 50, "min_p": 0.02, "seed": 11},
}
GRAMMAR = 'root ::= "the " ("king" | "thing") (" sings" | " and " root)'
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["an", "\n\n", "ing"]},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "bias": {"logit_bias": {"5": -100, "70": 2.5, "110": 1}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [*range(16)]},
    "stop_tokens": {"stop_token_ids": [*range(60, 76)]},
    "ignore_eos": {"ignore_eos": True},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "song", "schema": SONG},
        }
    },
    "regex": {"response_format": {"type": "regex", "regex": "[a-f]{4,40}(x|yz)[0-9]{3}"}},
    "grammar": {"response_format": {"type": "grammar", "grammar": GRAMMAR}},
    "choices": {"n": 3},
    "deadline": {"deadline_s": 600},
    "logprobs": {},  # the endpoints spell it differently
    "prompts": {},  # completions only
}
BUDGETS = (None, "auto", 0, 1, 4, 8)
HURRY_S = 0.1
"""A deadline that some answers meet and some do not."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its kind, for the report, and where it goes."""

    kind: str
    path: str
    body: dict[str, Any]

    def drafted(self, draft: str, budget: int | str | None = None) -> "Ask":
        """The same with a draft: the text is the same too."""
        return self._with(speculation={"draft": draft, "budget": budget})

    def streamed(self, *, usage: bool) -> "Ask":
        """The same as a stream."""
        options = {"stream_options": {"include_usage": True}} if usage else {}
        return self._with(stream=True, **options)

    def hurried(self) -> "Ask":
        """The same, or an error that it is late."""
        return self._with(deadline_s=HURRY_S)

    def _with(self, **fields: Any) -> "Ask":
        return Ask(self.kind, self.path, {**self.body, **fields})


@dataclass(frozen=True, slots=True)
class Wrong:
    """A request that is refused with this status, for the field it is about; None: for no field."""

    ask: Ask
    status: int
    field: str | None


def catalogue() -> tuple[Ask, ...]:
    """Requests whose texts are settled: temperature 0, or a seed. Always the same ones."""
    rng = random.Random(0)
    crossed = itertools.product(FEATURES, SAMPLINGS.values(), (0, 1))
    return tuple(
        _settled(feature, sampling, number, rng.randrange(20, 64))
        for number, (feature, sampling, _) in enumerate(crossed)
    )


def _settled(feature: str, sampling: dict[str, Any], number: int, max_tokens: int) -> Ask:
    prompt = PROMPTS[number % len(PROMPTS)]
    body = {**FEATURES[feature], **sampling, "max_tokens": max_tokens}
    if feature == "prompts":
        return Ask(feature, COMPLETION, {**body, "prompt": [*PROMPTS[:3]], "echo": number % 2 == 0})
    if number % 2:
        logprobs = {"logprobs": 2} if feature == "logprobs" else {}
        return Ask(feature, COMPLETION, {**body, **logprobs, "prompt": prompt})
    logprobs = {"logprobs": True, "top_logprobs": 2} if feature == "logprobs" else {}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    return Ask(feature, CHAT, {**body, **logprobs, "messages": messages})


def unsettled(rng: random.Random) -> Ask:
    """A prompt that nobody sent before, and no seed: any text is right."""
    words = " ".join(
        f"{rng.choice(('king', 'def', 'sum', '你好'))}{rng.random():.4f}" for _ in "abc"
    )
    body = {"prompt": words, "max_tokens": rng.randrange(1, 40), "temperature": 1.0}
    return Ask("unseeded", COMPLETION, body)


def speculated(ask: Ask, drafts: Sequence[str], rng: random.Random) -> Ask:
    """The request with any draft of the pool, the router's choice or none, and any budget."""
    return ask.drafted(rng.choice((*drafts, "auto", "auto", "none")), rng.choice(BUDGETS))


def wrong() -> tuple[Wrong, ...]:
    """Requests that are refused."""
    return (*_wrong_fields(), *_wrong_wholes())


def _wrong_fields() -> Iterator[Wrong]:
    fine = {"prompt": "the", "max_tokens": 8}
    fields: dict[str, tuple[dict[str, Any], str]] = {
        "unknown": ({"best_off": 3}, "best_off"),
        "type": ({"max_tokens": "8"}, "max_tokens"),
        "null": ({"prompt": None}, "prompt"),
        "temperature": ({"temperature": 2.5}, "temperature"),
        "top_p": ({"top_p": 0}, "top_p"),
        "seed": ({"seed": 2**64}, "seed"),
        "bias": ({"logit_bias": {"the": 1}}, "logit_bias"),
        "bias vocabulary": ({"logit_bias": {"999999": 1}}, "logit_bias"),
        "stop": ({"stop": [""]}, "stop.0"),
        "stop vocabulary": ({"stop_token_ids": [999_999]}, "stop_token_ids"),
        "prompt vocabulary": ({"prompt": [1, 999_999]}, "prompt"),
        "min_tokens": ({"min_tokens": 9}, "min_tokens"),
        "n": ({"n": 17}, "n"),
        "best_of": ({"best_of": 2}, "best_of"),
        "deadline": ({"deadline_s": 0}, "deadline_s"),
        "draft": ({"speculation": {"draft": "nobody"}}, "speculation.draft"),
        "budget": ({"speculation": {"budget": 99_999}}, "speculation.budget"),
        "options": ({"stream_options": {"include_usage": True}}, "stream_options"),
        "format": ({"response_format": {"type": "yaml"}}, "response_format"),
        "regex": ({"response_format": {"type": "regex", "regex": "(open"}}, "response_format"),
        "regex stream": (
            {"response_format": {"type": "regex", "regex": "(open"}, "stream": True},
            "response_format",
        ),
        "context": ({"prompt": [5] * 100_000}, "prompt"),
        "surrogate": ({"prompt": "\ud800"}, "prompt"),
    }
    for kind, (changes, field) in fields.items():
        yield Wrong(Ask(kind, COMPLETION, {**fine, **changes}), 400, field)
    yield Wrong(Ask("model", COMPLETION, {**fine, "model": "another"}), 404, "model")


def _wrong_wholes() -> Iterator[Wrong]:
    yield Wrong(Ask("messages", CHAT, {"messages": []}), 400, "messages")
    yield Wrong(Ask("no messages", CHAT, {"prompt": "the"}), 400, "messages")
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    asked = {"messages": [{"role": "user", "content": picture}]}
    yield Wrong(Ask("picture", CHAT, asked), 400, "messages.0.content.0.type")
    yield Wrong(Ask("path", "/v1/embeddings", {"input": "the"}), 404, None)
