"""Where answers end, what of a verdict belongs to them, and what is counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import EOS, tiny_tokenizer
from workers.answer import Answer
from workers.engine.sampling import SamplingParams
from workers.request import Beginning, Delta, GenerationRequest, SpeculationStats
from workers.speculation.acceptance import Verdict, walk
from workers.speculation.tree import Proposal, TokenTree

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(EOS)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def answer(
    max_tokens: int = 50,
    stop: Sequence[str] = (),
    budget: int = 8,
    **fields: Any,
) -> Answer:
    request = GenerationRequest(
        "r",
        (1,),
        max_tokens,
        SamplingParams(seed=0),
        tuple(stop),
        draft="d",
        budget=budget,
        **fields,
    )
    return Answer(request, TOKENIZER, frozenset({END}))


def chain(tokens: Sequence[int]) -> Proposal:
    return Proposal(TokenTree.chain(tokens), (0.5,) * len(tokens))


def whole_block(tokens: Sequence[int]) -> tuple[Proposal, Verdict]:
    """A chain of all but the last token, accepted whole; the last is the bonus."""
    size = len(tokens) - 1
    return chain(tokens[:-1]), Verdict(tuple(range(size)), tokens[-1], bonus=True, tested=size)


def blocks(tokens: Sequence[int], gamma: int, wrong: int) -> list[tuple[Proposal, Verdict]]:
    """Proposals of `gamma` guesses each for a known output; guess number `wrong` of each is not it.

    The output then repeats its last token, as a target would go on.
    """
    out, place = [], 0
    while place < len(tokens):
        rest = [*tokens[place:], *([tokens[-1]] * (gamma + 1))]
        guesses = [t if n != wrong else t + 1 for n, t in enumerate(rest[:gamma])]
        proposal = chain(guesses)
        verdict = walk(proposal.tree, lambda node, rest=rest: rest[node + 1])
        out.append((proposal, verdict))
        place += len(verdict.path) + 1
    return out


def test_all_guesses_of_a_whole_step_count_as_drafted_and_few_as_tested() -> None:
    proposal = chain(encode("the king sings and dances again"))
    given = answer()
    given.add(proposal, Verdict((), encode("a")[0], bonus=False, tested=1))
    drafted = len(proposal.tree)
    assert (given.stats.drafted, given.stats.tested, given.stats.accepted) == (drafted, 1, 0)


def played(answer: Answer, steps: Sequence[tuple[Proposal, Verdict]]) -> list[Delta]:
    deltas = []
    for proposal, verdict in steps:
        deltas.append(answer.add(proposal, verdict))
        if deltas[-1].finish_reason:
            break
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.tokens)


def test_a_stop_before_the_cap_in_one_block_wins() -> None:
    one = answer(max_tokens=4, stop=["c"])
    delta = one.add(*whole_block(encode("abcxyz")))
    assert (delta.text, delta.finish_reason) == ("ab", "stop")
    assert TOKENIZER.decode(delta.tokens) == "abc"
    assert delta.stats == SpeculationStats("d", 1, drafted=3, tested=3, accepted=3)


def test_a_cap_before_the_stop_in_one_block_wins() -> None:
    delta = answer(max_tokens=2, stop=["c"]).add(*whole_block(encode("abcxyz")))
    assert (delta.text, delta.finish_reason, len(delta.tokens)) == ("ab", "length", 2)


def test_a_stop_that_the_last_allowed_token_completes_is_a_stop() -> None:
    delta = answer(max_tokens=3, stop=["c"]).add(*whole_block(encode("abcxyz")))
    assert (delta.text, delta.finish_reason, len(delta.tokens)) == ("ab", "stop", 3)


def test_an_accepted_eos_ends_the_answer_and_what_lies_behind_counts_nowhere() -> None:
    one = answer()
    delta = one.add(*whole_block([*encode("ab"), END, *encode("xyz")]))
    assert (delta.text, delta.finish_reason) == ("ab", "stop")
    assert delta.tokens == (*encode("ab"), END)
    assert delta.stats == SpeculationStats("d", 1, drafted=3, tested=3, accepted=3)
    assert one.stats.emitted == 3
    assert one.stats.alpha == 1.0


def test_an_eos_as_bonus_or_recovered_token_is_counted_as_such() -> None:
    bonus = answer().add(*whole_block([*encode("ab"), END])).stats
    assert bonus == SpeculationStats("d", 1, drafted=2, tested=2, accepted=2, bonus=1)
    recovered = answer().add(chain(encode("ab")), Verdict((0,), END, bonus=False, tested=2)).stats
    assert recovered == SpeculationStats("d", 1, drafted=2, tested=2, accepted=1, recovered=1)


def test_a_stop_token_ends_an_answer_as_an_eos_does() -> None:
    stop_tokens = tuple(encode("x"))
    delta = answer(stop_tokens=stop_tokens).add(*whole_block(encode("abxyz")))
    assert (delta.text, delta.finish_reason) == ("ab", "stop")
    assert delta.tokens == tuple(encode("abx"))
    both = answer(stop_tokens=stop_tokens).add(*whole_block([*encode("a"), END, *encode("x")]))
    assert (both.text, both.finish_reason) == ("a", "stop")


def test_an_eos_that_is_ignored_is_no_text_and_no_end() -> None:
    one = answer(ignore_eos=True)
    tokens = [*encode("ab"), END, *encode("xyz")]
    delta = one.add(*whole_block(tokens))
    assert (delta.text, delta.finish_reason, delta.tokens) == ("abxyz", None, tuple(tokens))


def test_an_eos_flushes_what_was_held_back() -> None:
    one = answer(stop=["\nEND"])
    assert one.add(*whole_block(encode("a\nEN"))).text == "a"
    assert one.add(Proposal.empty(), Verdict((), END, True, 0)).text == "\nEN"


def test_a_cut_character_that_completes_a_stop_is_a_stop() -> None:
    one = answer(max_tokens=2, stop=["\N{REPLACEMENT CHARACTER}"])
    delta = one.add(*whole_block(encode("好")))
    assert (delta.text, delta.finish_reason) == ("", "stop")


def test_branches_deeper_than_the_answer_are_not_counted_as_drafted() -> None:
    tree = TokenTree.from_nodes([5, 6, 7, 8], [-1, -1, 0, 2])  # depths 1, 1, 2, 3
    one = answer(max_tokens=2)
    proposal = Proposal(tree, (0.5,) * 4)
    delta = one.add(proposal, Verdict((0, 2, 3), 9, bonus=True, tested=3))
    assert delta.stats == SpeculationStats("d", 1, drafted=3, tested=2, accepted=2)


def test_accepted_tokens_are_credited_to_the_members_that_guessed_them() -> None:
    """And no others: neither what was wrong, nor the target's own, nor what lies behind the end."""
    tree = TokenTree.from_nodes([5, 6, 7, 8], [-1, -1, 0, 2])  # level order: 5, 6, 7, 8
    proposal = Proposal(tree, (0.5,) * 4, members=("table", "suffix", "table", "neural"))
    one = answer(max_tokens=8)
    one.add(proposal, Verdict((0, 2), 9, bonus=False, tested=3))
    assert one.stats.members == (("table", 2),)
    one.add(proposal, Verdict((1,), 9, bonus=True, tested=1))
    assert one.stats.members == (("suffix", 1), ("table", 2))
    one.add(chain([5]), Verdict((0,), 9, bonus=True, tested=1))
    assert one.stats.members == (("suffix", 1), ("table", 2)), "this draft has one member only"
    delta = one.add(proposal, Verdict((0, 2, 3), 9, bonus=True, tested=3))
    assert len(delta.tokens) == 1
    assert delta.stats.members == (("suffix", 1), ("table", 3))


def test_no_budget_no_draft() -> None:
    assert answer(budget=0).stats.draft is None
    assert (answer().stats.tau, answer().stats.alpha) == (0.0, None)


GREEDY = encode("the thing said: 你好, and on and on\n\n🦜 well then")


def plain(max_tokens: int, stop: Sequence[str], tokens: Sequence[int]) -> list[Delta]:
    one = answer(max_tokens, stop, budget=0)
    return played(one, [(Proposal.empty(), Verdict((), t, True, 0)) for t in tokens])


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("wrong", [0, 2, 99])
def test_a_stop_at_every_offset_cuts_as_plain_decoding_does(gamma: int, wrong: int) -> None:
    whole = TOKENIZER.decode(GREEDY)
    for at in range(2 * gamma + 12):
        for size in (1, 2, 3):
            stop = [whole[at : at + size]]
            expected = plain(len(GREEDY), stop, GREEDY)
            got = played(answer(len(GREEDY), stop), blocks(GREEDY, gamma, wrong))
            assert text_of(got) == text_of(expected) == whole[: whole.index(stop[0])]
            assert tokens_of(got) == tokens_of(expected)
            assert got[-1].finish_reason == expected[-1].finish_reason == "stop"


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_every_cap_is_met_exactly(gamma: int) -> None:
    for cap in range(1, 2 * gamma + 3):
        got = played(answer(cap), blocks(GREEDY, gamma, wrong=99))
        assert tokens_of(got) == tuple(GREEDY[:cap])
        assert text_of(got) == TOKENIZER.decode(GREEDY[:cap])
        assert got[-1].finish_reason == "length"
        assert got[-1].stats.emitted == cap


TOKENS = st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=25)
STOPS = st.lists(st.text("abit 好", min_size=1, max_size=3), max_size=2)


@given(TOKENS, st.integers(1, 30), STOPS, st.integers(0, 5), st.integers(0, 6))
def test_any_blocks_give_what_plain_decoding_gives_and_the_books_balance(
    tokens: list[int], cap: int, stop: list[str], gamma: int, wrong: int
) -> None:
    """The cap may lie behind the known output; then the answer is not over, and both say so."""
    one = answer(cap, stop)
    got = played(one, blocks(tokens, gamma, wrong))
    endless = [*tokens, *([tokens[-1]] * (gamma + 1))][: sum(len(d.tokens) for d in got)]
    expected = plain(cap, stop, endless)
    assert text_of(got) == text_of(expected)
    assert tokens_of(got) == tokens_of(expected)
    assert got[-1].finish_reason == expected[-1].finish_reason
    stats = one.stats
    assert stats.emitted == stats.accepted + stats.recovered + stats.bonus == len(tokens_of(got))
    assert stats.accepted <= stats.tested <= stats.drafted
    assert stats.steps == len(got)


@given(TOKENS, st.integers(1, 30), STOPS, st.integers(0, 5), st.integers(0, 6), st.data())
def test_an_answer_that_changes_hands_is_the_same_and_counts_the_same(
    tokens: list[int], cap: int, stop: list[str], gamma: int, wrong: int, data: st.DataObject
) -> None:
    """Whatever was held back of a stop string or a character when it was left."""
    steps = blocks(tokens, gamma, wrong)
    whole = played(answer(cap, stop), steps)
    left = data.draw(st.integers(0, len(whole) - 1), label="deltas before it changes hands")
    if left == 0:
        return
    beginning = Beginning(tokens_of(whole[:left]), whole[left - 1].stats)
    rest = played(answer(cap, stop, beginning=beginning), steps[left:])
    assert [(d.text, d.tokens, d.finish_reason) for d in rest] == [
        (d.text, d.tokens, d.finish_reason) for d in whole[left:]
    ]
    assert rest[-1].stats == replace(whole[-1].stats, resumed=1)
