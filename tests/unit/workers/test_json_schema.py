"""Whatever a schema says that is not refused, answers keep to."""

import json
import random
from itertools import combinations
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tests.tiny import EOS, tiny_tokenizer
from workers.grammar import Grammars, GrammarSpec
from workers.json_schema import keepable

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), {END})
CLOSING = [TOKENIZER.convert_tokens_to_ids(each) for each in ('"', "]", "}", ",")]

INTEGER, NULL = {"type": "integer"}, {"type": "null"}
NODES: list[dict[str, Any]] = [
    {"type": "string", "minLength": 2, "maxLength": 4, "format": "date", "pattern": "^[a-c]+$"},
    {"type": "integer", "minimum": -3, "exclusiveMinimum": -5, "maximum": 20, "multipleOf": 3},
    {"type": "number", "exclusiveMinimum": -3.5, "maximum": 20, "multipleOf": 0.5},
    {"type": "array", "items": INTEGER, "prefixItems": [NULL], "minItems": 2, "maxItems": 3},
    {
        "type": "object",
        "properties": {"b": NULL, "c": INTEGER},
        "required": ["b", "z"],
        "additionalProperties": {"type": "boolean"},
        "minProperties": 2,
        "maxProperties": 3,
    },
    {
        "type": "object",
        "properties": {"x": NULL},
        "required": ["z"],
        "patternProperties": {"^[xy]": {"type": "string"}},
        "propertyNames": {"pattern": "^[xz]+$"},
        "additionalProperties": True,
    },
    {"type": ["string", "integer", "object"], "minLength": 3, "minimum": 5, "required": ["q"]},
    {"type": "integer", "enum": [1, "x", 7], "minimum": 5},
    {"type": "boolean", "const": 1},
    {"type": "integer", "anyOf": [{"minimum": 3}, {"type": "string"}], "minimum": 5},
    {"allOf": [INTEGER, {"minimum": 3}], "not": {"const": 4}},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "contains": {"const": 2}},
    {"type": "object", "properties": {"b": NULL}, "required": ["b"], "if": True, "then": False},
]
PARTS = [
    {key: node[key] for key in some}
    for node in NODES
    for size in range(1, len(node) + 1)
    for some in combinations(node, size)
]


def said(schema: dict[str, Any], choices: random.Random) -> str | None:
    """A random answer, if it comes to an end."""
    state = GRAMMARS.start(GrammarSpec("json_schema", json.dumps(schema)))
    tokens: list[int] = []
    while len(tokens) < 300:
        found = state.allowed([])
        assert found is not None
        allowed = found.nonzero()[:, 0].tolist()
        if END in allowed:
            return str(TOKENIZER.decode(tokens, skip_special_tokens=True))
        ways_out = [token for token in allowed if token in CLOSING]
        token = choices.choice(ways_out if ways_out and choices.random() < 0.4 else allowed)
        state.advance([token])
        tokens.append(token)
    return None


@given(st.sampled_from(PARTS), st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_answers_keep_to_all_of_a_schema_or_it_is_refused(node: dict[str, Any], seed: int) -> None:
    schema = {"type": "object", "properties": {"a": node}, "required": ["a"]}
    try:
        answer = said(schema, random.Random(seed))
    except ValueError as error:
        assert str(error).startswith("response_format: ")
        return
    if answer is not None:
        jsonschema.validate(json.loads(answer), schema)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"items": {"uniqueItems": True}}, "#/items: uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: not"),
        ({"$defs": {"a": {"contains": {}}}}, "#/$defs/a: contains"),
        ({"anyOf": [{}, {"if": {}}]}, "#/anyOf/1: if"),
        ({"dependentRequired": {"a": ["b"]}}, "#: dependentRequired"),
        ({"unevaluatedProperties": {}}, "#: unevaluatedProperties"),
        ({"allOf": [{}, {}]}, "#: allOf with several schemas"),
        ({"$ref": "#", "minimum": 3}, "#: minimum beside $ref"),
        ({"anyOf": [{}], "required": ["a"]}, "#: required beside anyOf"),
        ({"type": "string", "oneOf": [{}]}, "#: type beside oneOf"),
        ({"pattern": "a", "maxLength": 3}, "#: maxLength beside pattern"),
        ({"pattern": "^(?!a)"}, "#: a pattern that looks ahead"),
        ({"patternProperties": {"(?<=a)": {}}}, "#: a pattern that looks ahead or back"),
        ({"type": "integer", "multipleOf": 3, "maximum": 9}, "#: multipleOf beside maximum"),
        ({"multipleOf": 3}, "#: multipleOf of other than integers"),
        ({"properties": {}, "patternProperties": {}}, "#: patternProperties beside properties"),
        ({"required": ["a"], "additionalProperties": False}, "#: required: there are no"),
        ({"minProperties": 1, "additionalProperties": True}, "#: minProperties where"),
        ({"type": "integer", "enum": ["x", True, 1.5, float("inf")]}, "#: no value of enum"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_its_place(
    schema: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError) as error:
        keepable(schema)
    assert str(error.value).startswith(what)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": INTEGER, "if": {"enum": ["uniqueItems"]}}, "type": "object"},
        {"enum": [{"not": 1, "uniqueItems": True}], "default": {"contains": 1}},
        {"type": "array", "uniqueItems": False, "items": INTEGER},
        {"$ref": "#/$defs/a", "description": "an a", "$defs": {"a": INTEGER}, "default": 3},
        True,
    ],
)
def test_names_and_values_are_no_keywords_and_annotations_say_nothing(schema: Any) -> None:
    assert keepable(schema) == schema


class Part(BaseModel):
    kind: Literal["part"]
    length: float = Field(gt=0, le=9)


class Note(BaseModel):
    kind: Literal["note", "remark"]
    text: str = Field(min_length=1, max_length=200)


class Order(BaseModel):
    id: int = Field(ge=1, description="a number")
    parts: list[Part | Note] = Field(min_length=1, max_length=2)
    one: Part | None = None
    either: Part | Note = Field(discriminator="kind")
    prices: dict[str, int] = {}
    pair: tuple[int, str]
    code: str = Field(pattern="^[A-Z]{2}[0-9]+$", description="a code")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_what_pydantic_says_of_a_model_is_kept_to(seed: int) -> None:
    answer = said(Order.model_json_schema(), random.Random(seed))
    if answer is not None:
        Order.model_validate_json(answer)


def test_strings_with_a_length_hold_no_control_characters() -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "string", "maxLength": 5000}))
    quote = TOKENIZER('"')["input_ids"]
    allowed = GRAMMARS.start(spec).allowed(quote)
    assert allowed is not None
    words = [TOKENIZER.decode([token]) for token in allowed.nonzero()[:, 0].tolist()]
    assert {"a", " the", "}"} <= set(words)
    assert not [word for word in words if word != EOS and min(word) < " "]
