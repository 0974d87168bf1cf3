"""Whatever a draft does, its sequences decode plainly and everything else goes on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from workers.draft import (
    DraftRequest,
    DraftUnavailable,
    DraftUpdate,
    Features,
    InlineDraft,
    Terms,
)
from workers.draft_pool import Asking, DraftPool
from workers.speculation.tree import Proposal, SparseLaw, TokenTree

VOCABULARY = 10
GOOD = Proposal(TokenTree((1, 2), (-1, 0)), (0.5, 0.4))


class Scripted:
    """A client that answers as it is told, and notes what it hears."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.up = True
        self.heard: list[Any] = []

    def ready(self) -> bool:
        return self.up

    def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Any]]:
        self.heard.append(list(requests))
        answer = self.answers.pop(0)
        if answer == "dies when asked":
            raise DraftUnavailable("it is gone")

        def wait(timeout: float) -> list[Any]:
            self.heard.append(timeout)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return wait

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        self.heard.extend(updates)

    def forget(self, sequences: Sequence[int]) -> None:
        self.heard.append(("forget", *sequences))


def pool(ratio: Sequence[str] = (), **clients: Any) -> DraftPool:
    return DraftPool(clients, vocab_size=VOCABULARY, timeout_s=5, ratio=ratio)


def ask(sequence: int = 0, draft: str = "d", budget: int = 4, depth: int = 3) -> Asking:
    return Asking(sequence, draft, (7, 8, 9), budget, depth, seed=11, temperature=0.0)


def test_each_draft_is_asked_once_for_all_its_sequences() -> None:
    one, other = Scripted([GOOD, GOOD]), Scripted([GOOD])
    found = pool(one=one, other=other).propose([ask(0, "one"), ask(1, "other"), ask(2, "one")])
    assert found == {0: GOOD, 1: GOOD, 2: GOOD}
    assert one.heard[0] == [DraftRequest(0, 3, 4, 3), DraftRequest(2, 3, 4, 3)]
    assert other.heard[0] == [DraftRequest(1, 3, 4, 3)]


def test_what_is_sampled_is_small_where_as_many_nodes_as_pay_are_asked_for() -> None:
    """It is not cut afterwards."""
    sampled, plain = Scripted([GOOD] * 2), Scripted([GOOD])
    adaptive = replace(ask(0, "sampled", budget=32), terms=Terms(100.0, (0.1,) * 32))
    pool(ratio=["sampled"], sampled=sampled, plain=plain).propose(
        [adaptive, ask(1, "sampled", budget=32), replace(adaptive, draft="plain")]
    )
    assert [request.budget for request in sampled.heard[0]] == [8, 32]
    assert [request.budget for request in plain.heard[0]] == [32]


def test_all_are_asked_before_anybody_is_waited_for_and_share_one_deadline() -> None:
    order: list[str] = []

    class Noting(Scripted):
        def propose(self, requests: Sequence[DraftRequest]) -> Callable[[float], list[Any]]:
            order.append("asked")
            wait = super().propose(requests)
            return lambda timeout: order.append("waited") or wait(timeout)  # type: ignore[func-returns-value]

    one, other = Noting([GOOD]), Noting([GOOD])
    pool(one=one, other=other).propose([ask(0, "one"), ask(1, "other")])
    assert order == ["asked", "asked", "waited", "waited"]
    assert 0 <= other.heard[1] <= one.heard[1] <= 5


def test_only_ratio_drafts_are_told_to_sample() -> None:
    sampled, plain = Scripted([None]), Scripted([None])
    pool(ratio=["sampled"], sampled=sampled, plain=plain).propose(
        [ask(0, "sampled"), ask(1, "plain")]
    )
    assert sampled.heard[0] == [DraftRequest(0, 3, 4, 3, ratio_seed=11)]
    assert plain.heard[0] == [DraftRequest(1, 3, 4, 3)]


@pytest.mark.parametrize(
    "answer", ["dies when asked", DraftUnavailable("too late")], ids=["asked", "waited for"]
)
def test_a_draft_that_is_lost_is_counted_and_the_others_go_on(answer: Any) -> None:
    drafts = pool(bad=Scripted(answer), good=Scripted([GOOD]))
    assert drafts.propose([ask(0, "bad"), ask(1, "good")]) == {1: GOOD}
    assert drafts.faults == {"bad": 1}


def test_one_that_is_not_ready_is_left_alone() -> None:
    client = Scripted()
    client.up = False
    drafts = pool(d=client)
    assert drafts.propose([ask()]) == {}
    drafts.commit("d", 0, 3, (1,))
    drafts.forget("d", 0)
    assert client.heard == []
    assert drafts.faults == {}


def test_one_that_was_only_slow_is_told_what_ended_meanwhile() -> None:
    """Or it would keep those sequences, and their pages, for ever."""
    client = Scripted([GOOD], [GOOD])
    drafts = pool(d=client)
    client.up = False
    drafts.forget("d", 3)
    drafts.forget("d", 4)
    client.up = True
    drafts.propose([ask()])
    assert client.heard[0] == ("forget", 3, 4)
    drafts.forget("d", 5)
    assert client.heard[-1] == ("forget", 5)


def test_a_sequence_it_does_not_know_is_sent_from_the_beginning() -> None:
    client = Scripted([None, GOOD])
    drafts = pool(d=client)
    assert drafts.propose([ask(0), ask(1)]) == {1: GOOD}
    assert client.heard[-1] == DraftUpdate(0, 0, (7, 8, 9))
    assert drafts.faults == {}, "a restart is no fault of its answer"


def test_hidden_states_are_told_to_those_that_read_them() -> None:
    reader, other = Scripted(), Scripted()
    drafts = DraftPool(
        {"reader": reader, "other": other}, vocab_size=9, timeout_s=5, readers=["reader"]
    )
    features = Features(0, (1,), torch.zeros(3, 1, 2))
    for draft in ("reader", "other"):
        drafts.commit(draft, 0, 4, (), features)
        drafts.commit(draft, 0, 4, (7,), features)
        drafts.commit(draft, 0, 5, ())
    assert reader.heard == [DraftUpdate(0, 4, (), features), DraftUpdate(0, 4, (7,), features)]
    assert other.heard == [DraftUpdate(0, 4, (7,))], "a prompt's chunk is no news to it"
    assert drafts.faults == {}


def test_the_temperature_of_a_request_is_passed_on() -> None:
    client = Scripted([GOOD])
    asking = Asking(0, "d", (7, 8, 9), 4, 3, seed=11, temperature=0.8)
    pool(d=client).propose([asking])
    assert client.heard[0] == [DraftRequest(0, 3, 4, 3, temperature=0.8)]


Q = SparseLaw((1, 2), (0.5, 0.5))
NONSENSE = {
    "more nodes than asked for": Proposal(
        TokenTree.from_nodes([1, 2, 3, 4, 5], [-1] * 5), (1,) * 5
    ),
    "deeper than asked for": Proposal(TokenTree.chain([1, 2, 3, 4]), (1,) * 4),
    "a token that the target has not": Proposal(TokenTree.chain([VOCABULARY]), (1,)),
    "a law where none was asked for": Proposal(TokenTree.chain([1]), (1,), (Q,)),
}
LAWLESS = {
    "a token that its law cannot draw": Proposal(TokenTree.chain([3]), (1,), (Q,)),
    "a law that gives it nothing": Proposal(
        TokenTree.chain([1]), (1,), (SparseLaw((1, 2), (0.0, 1.0)),)
    ),
    "no law at all": Proposal(TokenTree.chain([1]), (1,), (SparseLaw((), ()),)),
    "a law that names a token twice": Proposal(
        TokenTree.chain([1]), (1,), (SparseLaw((1, 1), (0.5, 0.5)),)
    ),
    "a law that is no number": Proposal(
        TokenTree.chain([1]), (1,), (SparseLaw((1, 2), (0.5, math.nan)),)
    ),
    "a law over a negative token": Proposal(
        TokenTree.chain([1]), (1,), (SparseLaw((1, -1), (0.5, 0.5)),)
    ),
    "siblings from two laws": Proposal(
        TokenTree((1, 2), (-1, -1)),
        (1, 1),
        (SparseLaw((1, 2), (0.5, 0.5)), SparseLaw((1, 2), (0.4, 0.6))),
    ),
    "a law over foreign tokens": Proposal(
        TokenTree.chain([1]), (1,), (SparseLaw((1, VOCABULARY), (0.5, 0.5)),)
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_thrown_away_and_counted(what: str) -> None:
    drafts = pool(d=Scripted([NONSENSE[what], GOOD]))
    assert drafts.propose([ask(0), ask(1)]) == {1: GOOD}
    assert drafts.faults == {"d": 1}


@pytest.mark.parametrize("what", LAWLESS)
def test_under_ratio_the_law_must_fit_the_tokens(what: str) -> None:
    lawful = Proposal(TokenTree.chain([1]), (1,), (Q,))
    drafts = pool(ratio=["d"], d=Scripted([LAWLESS[what], lawful, Proposal.empty()]))
    assert drafts.propose([ask(0), ask(1), ask(2)]) == {1: lawful, 2: Proposal.empty()}
    assert drafts.faults == {"d": 1}


@pytest.mark.parametrize("answers", [[], [GOOD], [GOOD] * 3])
def test_too_few_or_too_many_answers_are_none(answers: list[Proposal]) -> None:
    drafts = pool(d=Scripted(answers))
    assert drafts.propose([ask(0), ask(1)]) == {}
    assert drafts.faults == {"d": 1}


def test_it_knows_its_members() -> None:
    drafts = pool(one=Scripted(), other=Scripted())
    assert drafts.names() == ("one", "other")
    assert "one" in drafts
    assert "third" not in drafts


def test_a_draft_in_this_process_is_a_client() -> None:
    class Echo:
        name = "echo"
        heard: list[Any] = []

        def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
            return [GOOD for _ in requests]

        def commit(self, updates: Sequence[DraftUpdate]) -> None:
            self.heard.extend(updates)

        def forget(self, sequences: Sequence[int]) -> None:
            self.heard.extend(sequences)

    client = InlineDraft(Echo())
    assert client.ready()
    drafts = pool(d=client)
    assert drafts.propose([ask(0), ask(1)]) == {0: GOOD, 1: GOOD}
    drafts.commit("d", 0, 3, (1, 2))
    drafts.forget("d", 0)
    assert Echo.heard == [DraftUpdate(0, 3, (1, 2)), 0]


class Broken(Scripted):
    """Fails in one of its methods with what nobody expects."""

    def __init__(self, where: str) -> None:
        super().__init__([GOOD], [GOOD], [GOOD])
        self._where = where

    def _maybe(self, what: str) -> None:
        if what == self._where:
            raise MemoryError(what)

    def ready(self) -> bool:
        self._maybe("ready")
        return True

    def propose(self, requests: Sequence[DraftRequest]) -> Any:
        self._maybe("propose")
        return self._wait if self._where == "answer" else super().propose(requests)

    def _wait(self, timeout: float) -> Any:
        self._maybe("answer")

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        self._maybe("commit")

    def forget(self, sequences: Sequence[int]) -> None:
        self._maybe("forget")


@pytest.mark.parametrize("where", ["ready", "propose", "answer", "commit", "forget"])
def test_whatever_fails_in_a_draft_costs_its_guesses_alone(where: str) -> None:
    drafts = pool(broken=Broken(where), good=Scripted([GOOD]))
    drafts.commit("broken", 0, 0, (1, 2, 3))
    assert drafts.propose([ask(0, "broken"), ask(1, "good")])[1] == GOOD
    drafts.forget("broken", 0)
    assert drafts.faults["broken"] >= 1


@pytest.mark.parametrize("answer", [None, 7, [[3]], ["tree"], [GOOD.tree]])
def test_an_answer_that_is_no_list_of_proposals_is_none(answer: Any) -> None:
    drafts = pool(d=Scripted(answer))
    assert drafts.propose([ask()]) == {}
    assert drafts.faults == {"d": 1}
