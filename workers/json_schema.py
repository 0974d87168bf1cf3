"""JSON schemas, put so that xgrammar keeps to all that they say.

It passes over keywords that it does not read, or not beside certain others, and an answer would
not be what was asked for. What is made here allows nothing that the given schema does not, maybe
less; what cannot be made so is refused by name.
"""

import re
from collections.abc import Iterable
from typing import Any

_Node = dict[str, Any]

_UNREAD = (
    *("not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef"),
)

_ALONE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Where one of them is, nothing else in the node is read."""

_TYPES = {
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    ),
}
_BOUNDS = _TYPES["number"][:4]
_KINDS = {"string": str, "number": int | float, "array": list, "object": dict, "null": type(None)}
_LOOKS = re.compile(r"\(\?<?[=!]")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames")


def keepable(schema: Any) -> Any:
    """The schema as xgrammar is to be given it. `oneOf` is read as `anyOf`.

    Raises ValueError for what no answer could be kept to, with its place.
    """
    return _put(schema, "#")


def _put(schema: Any, place: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    for keyword in _UNREAD:
        if schema.get(keyword, False) is not False:
            raise _unkept(place, keyword)
    node = {key: _inner(key, value, place) for key, value in schema.items()}
    alone = [keyword for keyword in _ALONE if keyword in node]
    if alone:
        return _lonely(node, alone[0], place)
    _say_types(node)
    _put_string(node, place)
    _check_number(node, place)
    _put_object(node, place)
    return node


def _inner(key: str, value: Any, place: str) -> Any:
    place = f"{place}/{key}"
    if key in _NAMED and isinstance(value, dict):
        return {name: _put(each, f"{place}/{name}") for name, each in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [_put(each, f"{place}/{number}") for number, each in enumerate(value)]
    return _put(value, place) if key in _SINGLE else value


def _lonely(node: _Node, keyword: str, place: str) -> _Node:
    """A node of which one keyword is read: values may have a type beside them."""
    values = {"enum": node.get("enum"), "const": [node.get("const")]}.get(keyword)
    if isinstance(values, list) and "type" in node:
        types = node.pop("type")
        fitting = [each for each in values if any(_is(each, type_) for type_ in _listed(types))]
        if not fitting:
            raise ValueError(f"{place}: no value of {keyword} is of type {types}")
        node[keyword] = fitting if keyword == "enum" else fitting[0]
    for other in ("type", *_ALONE, *_flat(_TYPES.values())):
        if other in node and other != keyword:
            raise _unkept(place, f"{other} beside {keyword}")
    if keyword == "allOf" and len(_listed(node["allOf"])) != 1:
        raise _unkept(place, "allOf with several schemas")
    return node


def _say_types(node: _Node) -> None:
    """Without a type, keywords of one are not read."""
    meant = [type_ for type_, keywords in _TYPES.items() if any(each in node for each in keywords)]
    if meant and "type" not in node:
        node["type"] = meant


def _put_string(node: _Node, place: str) -> None:
    told = [keyword for keyword in _TYPES["string"] if keyword in node]
    if told:
        node.pop("format", None)  # an annotation, that would be read instead
    if "pattern" in told and len(told) > 1:
        raise _unkept(place, f"{told[0]} beside pattern")
    _check_pattern(str(node.get("pattern", "")), place)


def _check_pattern(pattern: str, place: str) -> None:
    if _LOOKS.search(pattern):
        raise _unkept(place, "a pattern that looks ahead or back")


def _check_number(node: _Node, place: str) -> None:
    if "multipleOf" in node:
        if "number" in _listed(node["type"]):
            raise _unkept(place, "multipleOf of other than integers")
        for bound in _BOUNDS:
            if bound in node:
                raise _unkept(place, f"multipleOf beside {bound}")


def _put_object(node: _Node, place: str) -> None:
    """Names that are required must have a schema, and all names one at most; those that are free
    cannot be counted, as one may come twice.
    """
    more = node.get("additionalProperties", False)
    for one, other in (
        ("properties", "patternProperties"),
        ("properties", "propertyNames"),
        ("patternProperties", "propertyNames"),
    ):
        if one in node and other in node:
            raise _unkept(place, f"{other} beside {one}")
    free = [keyword for keyword in ("patternProperties", "propertyNames") if keyword in node]
    for pattern in node.get("patternProperties") or ():
        _check_pattern(str(pattern), place)
    if "patternProperties" in node and more is not False:
        raise _unkept(place, "patternProperties beside additionalProperties")
    if node.get("minProperties") and (free or more is not False):
        raise _unkept(place, "minProperties where names are free")
    known, required = node.get("properties", {}), _listed(node.get("required", []))
    if not isinstance(known, dict):
        return  # xgrammar says what is wrong
    missing = [name for name in required if isinstance(name, str) and name not in known]
    if not missing:
        return
    if free or node.get("additionalProperties") is False:
        raise _unkept(place, f"required: there are no properties {', '.join(missing)}")
    node["properties"] = known | {name: {} if more is False else more for name in missing}


def _is(value: Any, type_: Any) -> bool:
    """Whether a JSON value is of a type."""
    if isinstance(value, bool) or type_ == "boolean":
        return isinstance(value, bool) and type_ == "boolean"
    if type_ == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(type_, str) and isinstance(value, _KINDS.get(type_, ()))


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _flat(lists: Iterable[Iterable[str]]) -> list[str]:
    return [each for some in lists for each in some]


def _unkept(place: str, what: str) -> ValueError:
    return ValueError(f"{place}: {what} is nothing that a grammar can keep to; leave it out")
