"""What all request bodies are made of: strict fields, texts that are text, lists with one fault,
JSON that can be written."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_DEPTH = 64

_Item = TypeVar("_Item")
OneFault = Annotated[list[_Item], Field(fail_fast=True)]
"""One fault is told of: a list of 100,000 bad items would hold everybody up with as many."""


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


def writable(value: Any) -> Any:
    """As JSON, in a prompt or a grammar: a schema of 900 levels takes minutes to compile."""
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return value


def _depth(value: Any) -> int:
    """Levels of a JSON value, counted as far as is allowed."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        parts = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        level = [part for some in parts for part in some]
    return depth


JsonDict = Annotated[dict[str, Any], AfterValidator(writable)]


class Strict(BaseModel):
    """Nothing is ignored or bent: "1" is not a number and 1.0 is not a count, as at OpenAI."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
