"""What all request bodies are made of: strict fields, texts that are text, lists with one fault."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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


class Strict(BaseModel):
    """Nothing is ignored or bent: "1" is not a number and 1.0 is not a count, as at OpenAI."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
