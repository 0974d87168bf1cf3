"""Whatever is drawn from what a grammar allows is a text of it."""

import json
import random
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import EOS, tiny_tokenizer
from workers import grammar
from workers.engine.sampling import NothingAllowed
from workers.grammar import Grammars, GrammarSpec, GrammarState

TOKENIZER = tiny_tokenizer()
SIZE = len(TOKENIZER) + 3  # a target's vocabulary may be padded
END = TOKENIZER.convert_tokens_to_ids(EOS)
GRAMMARS = Grammars(TOKENIZER, SIZE, {END})

SCHEMA = {
    "type": "object",
    "properties": {
        "sung": {"type": "boolean"},
        "by": {"enum": ["the king", "\u4f60\u597d"]},
        "times": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["sung", "by"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json_schema", json.dumps(SCHEMA))
REGEX = GrammarSpec("regex", "(the |a )*king( sings){1,3}[.!]")
EBNF = GrammarSpec("ebnf", 'root ::= "(" root ")" | "x"')


def allowed(state: GrammarState, path: list[int]) -> list[int]:
    found = state.allowed(path)
    assert found is not None
    assert found.shape == (SIZE,)
    tokens: list[int] = found.nonzero()[:, 0].tolist()
    return tokens


def walk(spec: GrammarSpec, choices: random.Random, step: int) -> list[int]:
    """A random answer, looked at from `step` tokens before its newest one."""
    state, tokens, path = GRAMMARS.start(spec), list[int](), list[int]()
    while len(tokens) + len(path) < 200:
        token = choices.choice(allowed(state, path))
        path.append(token)
        if token == END:
            assert state.allowed(path) is None, "what comes behind the end is nobody's concern"
            state.advance([*path, 5, 5])
            assert state.allowed([]) is None
            return [*tokens, *path]
        if len(path) > step:
            state.advance(path)
            tokens, path = [*tokens, *path], []
    return []


def says(spec: GrammarSpec, text: str) -> bool:
    if spec is JSON:
        jsonschema.validate(json.loads(text), SCHEMA)
        return "\n" not in text
    if spec is REGEX:
        return re.fullmatch(REGEX.text, text) is not None
    return re.fullmatch(r"\(*x\)*", text) is not None and text.count("(") == text.count(")")


@pytest.mark.parametrize("spec", [JSON, REGEX, EBNF], ids=lambda spec: spec.kind)
@given(seed=st.integers(0, 2**32), step=st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_every_answer_keeps_to_it(spec: GrammarSpec, seed: int, step: int) -> None:
    answer = walk(spec, random.Random(seed), step)
    if answer:
        assert says(spec, TOKENIZER.decode(answer, skip_special_tokens=True))


def test_answers_do_end() -> None:
    for spec in (JSON, REGEX, EBNF):
        assert any(walk(spec, random.Random(seed), 1) for seed in range(20))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_path_is_looked_at_and_not_taken(seed: int) -> None:
    choices = random.Random(seed)
    state, path = GRAMMARS.start(JSON), list[int]()
    before = allowed(state, [])
    for _ in range(10):
        path.append(choices.choice([t for t in allowed(state, path) if t != END] or [END]))
        if path[-1] == END:
            break
    assert allowed(state, []) == before
    if path[-1] != END:
        ahead = allowed(state, path)
        state.advance(path)
        assert allowed(state, []) == ahead


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", '{"type": "nothing"}'),
        GrammarSpec("json_schema", '{"$ref": "#/definitions/none"}'),
        GrammarSpec("regex", "(unclosed"),
        GrammarSpec("ebnf", "rule ::="),
        GrammarSpec("ebnf", 'other ::= "x"'),
        GrammarSpec("ebnf", "root ::= " + "你" * 200),
        GrammarSpec("json_schema", '{"most": 1' + "0" * 400 + "}"),
    ],
    ids=lambda spec: f"{spec.kind} {spec.text[:40]}",
)
def test_what_is_no_grammar_is_refused(spec: GrammarSpec) -> None:
    """With the reason, and not with where in xgrammar's source it was found."""
    with pytest.raises(ValueError, match=f"^response_format: this {spec.kind} is none: .") as error:
        GRAMMARS.start(spec)
    assert ".cc:" not in str(error.value)


def test_where_nothing_may_follow_is_said_for_the_field_that_led_there() -> None:
    state = GRAMMARS.start(GrammarSpec("ebnf", 'root ::= "ab" d\nd ::= d "x"', "tools"))
    path: list[int] = TOKENIZER("ab")["input_ids"]
    assert allowed(state, path[:-1]) == path[-1:]
    for _ in range(2):  # asked about, it is not taken
        with pytest.raises(NothingAllowed, match="^tools: it leads to where nothing may follow"):
            state.allowed(path)
    state.advance(path)
    with pytest.raises(NothingAllowed):
        state.allowed([])


def test_grammars_that_are_no_longer_used_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", 20_000)
    grammars, sizes = Grammars(TOKENIZER, SIZE, {END}), []
    for number in range(60):
        assert grammars.start(GrammarSpec("regex", f"[a-z]+{number}")).allowed([]) is not None
        sizes.append(grammars._compiler.get_cache_size_bytes())
    assert max(sizes) <= 20_000
    assert sizes[0] * 60 > 20_000, "not all of them were kept"
