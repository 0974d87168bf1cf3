"""Request bodies of any kind: nearly right, wrong in one place or several, and no JSON at all.

Number n is always the same body. Most are made from the schema of what the endpoint takes, so that
a new field is tried as soon as it is there; then some of them are spoilt.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from deployments.openai_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

ENDPOINTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SCHEMAS = {path: model.model_json_schema() for path, model in ENDPOINTS.items()}

TEXTS = (
    *("", " ", "Hi", "the thing and the other thing", "你好，世界", "🦜", "e\u0301", "\x00"),
    *("\ud800", "\udfff\ud800", "a\ud83d", "\ufeff", "\uffff", "\u2028", "null", "-1", "%s%n"),
    *("../../etc/passwd", "{{ 7 * 7 }}", "{% raw %}", "<|end|>", "<|user|><|end|>", "'", "a.b"),
    *("x" * 3000, "你" * 200),
)
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 0.5, 1.0, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**64)),
    *(10**30, 10**400, float("nan"), float("inf"), float("-inf"), True, False),
)
# What a field is given so that most requests are answered, and soon.
USUAL: dict[str, Callable[[random.Random], Any]] = {
    "model": lambda draw: draw.choice((None, "tiny", "tiny", "other")),
    "max_tokens": lambda draw: draw.randint(1, 4),
    "max_completion_tokens": lambda draw: draw.randint(1, 4),
    "min_tokens": lambda draw: draw.randint(0, 1),
    "n": lambda draw: draw.choice((1, 1, 1, 2, 3)),
    "role": lambda draw: draw.choice(("user", "user", "system", "assistant")),
    "content": lambda draw: draw.choice((*TEXTS[1:6], [{"type": "text", "text": "Hi"}])),
    "id": lambda draw: draw.choice(("call_1", "call_2")),
    "arguments": lambda draw: draw.choice(("{}", '{"a": [1, "b"]}', '{"a": ', "[]", "")),
    "parameters": lambda draw: draw.choice(
        ({}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {"$ref": "#/x"}, None)
    ),
    "tool_choice": lambda draw: draw.choice(("auto", "none", "required")),
    "draft": lambda draw: draw.choice(("auto", "none", "twin", "self", "nobody")),
    "logit_bias": lambda draw: {str(draw.randint(0, 280)): draw.choice((-100, 0, 2.5))},
    "regex": lambda draw: draw.choice(("a+b", "[你好]{1,3}", "(", "a{2,1}", "\\d+(\\.\\d+)?", "")),
    "grammar": lambda draw: draw.choice(('root ::= "x" | "y"', 'root ::= root "x"', "root", "")),
    "schema": lambda draw: draw.choice(
        ({}, {"enum": [1, "a"]}, {"type": "object"}, {"type": 3}, {"$ref": "#/x"}, {"enum": []})
    ),
    "stream_options": lambda draw: {"include_usage": draw.random() < 0.5},
    "deadline_s": lambda draw: draw.choice((60, 60, 1e-9)),
    "temperature": lambda draw: draw.choice((0, 0.7, 1, 2)),
    "repetition_penalty": lambda draw: draw.choice((0.01, 1, 1.3, 100)),
}
# Fields that may stand in a request and mostly do.
LIKELY = ("max_tokens", "prompt", "messages", "tokens", "content")


@dataclass(frozen=True)
class Sent:
    """One request. type_: its Content-Type, None for none."""

    path: str
    body: bytes
    type_: str | None
    pieces: int

    @property
    def json(self) -> Any:
        """What the body says, as far as it is JSON that was called so; None else."""
        if self.type_ is None or self.type_.partition(";")[0] != "application/json":
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


def sent(number: int) -> Sent:
    """Request number `number`."""
    draw = random.Random(number)
    path = draw.choice((*ENDPOINTS, "/v1/chat/completions", "/v1/completions"))
    body: Any = _like(draw, SCHEMAS[path], SCHEMAS[path].get("$defs", {}), "")
    for _ in range(draw.choice((0, 0, 0, 0, 1, 1, 2, 5))):
        body = _spoilt(draw, body)
    return Sent(path, _written(draw, body), _content_type(draw), draw.choice((1, 1, 1, 2, 7)))


def _like(draw: random.Random, schema: dict[str, Any], known: dict[str, Any], field: str) -> Any:
    """Something that a schema allows, nearly always."""
    if field in USUAL and draw.random() < 0.9:
        return USUAL[field](draw)
    if "$ref" in schema:
        return _like(draw, known[schema["$ref"].rsplit("/", 1)[1]], known, "")
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _like(draw, draw.choice(schema[several]), known, field)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw.choice(schema["enum"])
    return _of_type(draw, schema, known)


def _of_type(draw: random.Random, schema: dict[str, Any], known: dict[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        return _object(draw, schema, known)
    if kind == "object":
        return {draw.choice(("a", "1", "b")): _junk(draw) for _ in range(draw.randint(0, 2))}
    if kind == "array":
        least, most = schema.get("minItems", 0), schema.get("maxItems", 4)
        size = min(draw.randint(least, max(least, 3)), most)
        return [_like(draw, schema.get("items", {}), known, "") for _ in range(size)]
    if kind == "string":
        return draw.choice(TEXTS[1:6])
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -2), min(schema.get("maximum", 250), 250)
        return draw.randint(int(low), int(high)) if kind == "integer" else draw.uniform(low, high)
    return {"boolean": draw.random() < 0.5, "null": None}.get(kind, "any")


def _object(draw: random.Random, schema: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """With all it must have, and few of the others."""
    must = schema.get("required", [])
    return {
        name: _like(draw, own, known, name)
        for name, own in schema["properties"].items()
        if name in must or draw.random() < (0.93 if name in LIKELY else 0.08)
    }


def _junk(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return None
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 6:
        return draw.choice(TEXTS)
    if kind == 6:
        return [_junk(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    if kind == 7:
        return {draw.choice(TEXTS): _junk(draw, depth + 1) for _ in range(draw.randint(0, 3))}
    return draw.choice((_nested, _wide))(draw)


def _nested(draw: random.Random) -> Any:
    """Deeper than anybody means to, and now and then than a parser can go."""
    value: Any = draw.choice(NUMBERS[:4])
    for _ in range(draw.choice((5, 60, 300))):
        value = [value] if draw.random() < 0.5 else {"a": value}
    return value


def _wide(draw: random.Random) -> Any:
    return [draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS[:6])))] * draw.choice((17, 3000))


def _spoilt(draw: random.Random, value: Any) -> Any:
    """The same but for one place somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice([*value])
        return draw.choice((_without, _renamed, _with_more, _deeper, _deeper, _deeper))(
            draw, value, name
        )
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return [*value[:at], _spoilt(draw, value[at]), *value[at + draw.randint(0, 1) :]]
    return _junk(draw)


def _without(_draw: random.Random, value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: own for key, own in value.items() if key != name}


def _renamed(draw: random.Random, value: dict[str, Any], name: str) -> dict[str, Any]:
    other = draw.choice((name.upper(), name + "s", name + ".0", f" {name}", draw.choice(TEXTS)))
    return {(other if key == name else key): own for key, own in value.items()}


def _with_more(draw: random.Random, value: dict[str, Any], _name: str) -> dict[str, Any]:
    return {**value, draw.choice((*TEXTS, "user", "store", "tools", "functions")): _junk(draw)}


def _deeper(draw: random.Random, value: dict[str, Any], name: str) -> dict[str, Any]:
    return {**value, name: _spoilt(draw, value[name])}


def _written(draw: random.Random, body: Any) -> bytes:
    """As bytes, mostly as they should be."""
    text = json.dumps(body, ensure_ascii=draw.random() < 0.5)
    whole = text.encode("utf-8", "surrogatepass")
    kind = draw.randrange(40)
    if kind == 0:
        return draw.choice((b"", b" ", b"null", b"[]", b"0", b'"a"', b"{", b"\xff\xfe", b"\x00"))
    if kind == 1:
        return whole[: draw.randrange(len(whole))]
    if kind == 2:
        return text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")), "surrogatepass")
    if kind == 3:
        at = draw.randrange(len(whole))
        return whole[:at] + draw.randbytes(draw.randint(1, 3)) + whole[at + 1 :]
    if kind == 4:
        return draw.choice((b"[", b'{"a":')) * draw.choice((50, 900, 20_000))
    if kind == 5:
        return whole + draw.choice((b"}", b"\n", b"// what", b"\x00", whole))
    if kind == 6 and isinstance(body, dict) and body:
        twice = json.dumps({draw.choice([*body]): _junk(draw)})
        return (text[:-1] + ", " + twice[1:]).encode("utf-8", "surrogatepass")
    return whole


def _content_type(draw: random.Random) -> str | None:
    if draw.random() < 0.95:
        return "application/json"
    return draw.choice(
        (
            *(None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"),
            *("application/json; charset=utf-16", "application/jsonx", "application/json;q=\xff"),
        )
    )
