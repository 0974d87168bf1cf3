"""A token tree that grows best first: `workers.tree_growth` in compiled form."""

from math import exp, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workers.engine.kernels.compiling import compiled
from workers.engine.kernels.ngram import Scratch, Text, law

SUFFIX, TABLE, NEURAL = range(3)
"""Members, as numbers."""

# Of a pool: what weighs what.
BIAS, NGRAM, BY_NEURAL, SURER, FARTHER = range(5)


class Rules(NamedTuple):
    """What a tree grows by. pools [orders of n-grams, then those with the neural member too, then
    the neural one's, 5]; least [most nodes]: by how many nodes there are, the least confidence of
    another one; the rest is named as in the modules where it is from.
    """

    pools: NDArray[np.float64]
    least: NDArray[np.float64]
    depth: int
    children: int
    ngrams: bool
    order: int
    local_weight: int
    ngram_negligible: float
    counted: int
    negligible: float
    least_confidence: float
    floor: float
    farthest: int


class Nodes(NamedTuple):
    """Everything that was ever in the tree or asked about; 0 is the root.

    token, parent, depth; heard: which of the laws was heard of it, -1 for none; guesses: how many
    tokens may follow, -1 where that is not known yet; guess_*: those, likeliest first.
    """

    token: NDArray[np.int32]
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    heard: NDArray[np.int32]
    guesses: NDArray[np.int32]
    guess_token: NDArray[np.int32]  # [nodes, children]
    guess_confidence: NDArray[np.float64]
    guess_member: NDArray[np.int32]


class Laws(NamedTuple):
    """What was heard: sizes [n], ids and probabilities [n, likeliest]."""

    sizes: NDArray[np.int32]
    ids: NDArray[np.int32]
    probabilities: NDArray[np.float64]


class Sources(NamedTuple):
    """All that guesses are made from, and where they are kept: of the domain and of the draft,
    then of the request. tokens: the request's own, int32.
    """

    rules: Rules
    text: Text
    scratch: Scratch
    tokens: NDArray[np.int32]
    laws: Laws
    nodes: Nodes


class Grown(NamedTuple):
    """The tree: its nodes among all, in the order of their growing, each with the confidence of its
    path and the number of its parent in this order, -1 for the root, and its member.
    """

    node: NDArray[np.int32]
    confidence: NDArray[np.float64]
    parent: NDArray[np.int32]
    member: NDArray[np.int32]


class Waiting(NamedTuple):
    """A heap of what may be added next: by confidence, of equal ones the first that came."""

    confidence: NDArray[np.float64]
    came: NDArray[np.int32]
    parent: NDArray[np.int32]  # in the tree's order
    guess: NDArray[np.int32]


# -- guesses ---------------------------------------------------------------------------------------


@compiled()
def _log_odds(rules: Any, probability: Any) -> Any:
    p = min(max(probability, rules.floor), 1.0 - rules.floor)
    return log(p / (1.0 - p))


@compiled()
def _confidence(rules: Any, pool: Any, ngram: Any, neural: Any, level: Any) -> Any:
    odds = pool[BIAS] + pool[FARTHER] * min(level, rules.farthest)
    if pool[NGRAM] != 0.0:
        odds += pool[NGRAM] * _log_odds(rules, ngram)
    if pool[BY_NEURAL] != 0.0:
        odds += pool[BY_NEURAL] * _log_odds(rules, neural)
    if pool[SURER] != 0.0:
        odds += pool[SURER] * _log_odds(rules, max(ngram, neural))
    return 1.0 / (1.0 + exp(-odds))


@compiled()
def _context(nodes: Any, node: Any, tokens: Any, order: Any, context: Any) -> Any:
    """The last tokens down to a node, at the end of `context` [order]; how many."""
    size = 0
    while node > 0 and size < order:
        size += 1
        context[order - size] = nodes.token[node]
        node = nodes.parent[node]
    place = len(tokens)
    while place > 0 and size < order:
        size, place = size + 1, place - 1
        context[order - size] = tokens[place]
    return size


@compiled()
def _insert(rules: Any, nodes: Any, node: Any, token: Any, confidence: Any, member: Any) -> None:
    """A guess where it belongs: likeliest first, of equal ones the smallest token."""
    tokens, confidences = nodes.guess_token[node], nodes.guess_confidence[node]
    members, size = nodes.guess_member[node], nodes.guesses[node]
    if size < rules.children:
        nodes.guesses[node] = size + 1
        place = size
    else:
        place = size - 1
        after = confidences[place] == confidence and tokens[place] < token
        if confidences[place] > confidence or after:
            return
    while place > 0 and (
        confidences[place - 1] < confidence
        or (confidences[place - 1] == confidence and tokens[place - 1] > token)
    ):
        tokens[place], confidences[place] = tokens[place - 1], confidences[place - 1]
        members[place] = members[place - 1]
        place -= 1
    tokens[place], confidences[place], members[place] = token, confidence, member


@compiled()
def _heard_of(laws: Any, heard: Any, token: Any) -> Any:
    for place in range(laws.sizes[heard]):
        if laws.ids[heard, place] == token:
            return laws.probabilities[heard, place]
    return 0.0


@compiled()
def _guess(sources: Any, node: Any) -> None:
    """Find what may follow a node, unless that is known."""
    rules, nodes, laws, scratch = sources.rules, sources.nodes, sources.laws, sources.scratch
    if nodes.guesses[node] >= 0:
        return
    nodes.guesses[node] = 0
    heard, level = nodes.heard[node], nodes.depth[node]
    named = order = 0
    if rules.ngrams:
        context = np.empty(rules.order, np.int32)
        size = _context(nodes, node, sources.tokens, rules.order, context)
        named, order = law(
            sources.text,
            sources.tokens,
            context[rules.order - size :],
            size,
            rules.local_weight,
            rules.ngram_negligible,
            rules.counted,
            scratch,
        )
    number = len(rules.pools) - 1
    if rules.ngrams:
        number = order if heard < 0 else rules.order + 1 + order
    pool = rules.pools[number]
    for place in range(named):
        token, suffix, table = scratch.ids[place], scratch.suffix[place], scratch.table[place]
        ngram = suffix + table
        neural = 0.0 if heard < 0 else _heard_of(laws, heard, token)
        neural = neural if neural >= rules.negligible else 0.0
        if ngram < rules.negligible:
            if neural == 0.0:
                continue
            ngram = 0.0
        member = SUFFIX if suffix >= table else TABLE
        member = NEURAL if neural > ngram else member
        confidence = _confidence(rules, pool, ngram, neural, level)
        _insert(rules, nodes, node, token, confidence, member)
    for place in range(0 if heard < 0 else laws.sizes[heard]):
        token, neural = laws.ids[heard, place], laws.probabilities[heard, place]
        known = False
        for other in range(named):
            known |= scratch.ids[other] == token
        if neural >= rules.negligible and not known:
            confidence = _confidence(rules, pool, 0.0, neural, level)
            _insert(rules, nodes, node, token, confidence, NEURAL)


# -- the heap --------------------------------------------------------------------------------------


@compiled()
def _before(waiting: Any, one: Any, other: Any) -> Any:
    a, b = waiting.confidence[one], waiting.confidence[other]
    return a > b or (a == b and waiting.came[one] < waiting.came[other])


@compiled()
def _swap(waiting: Any, one: Any, other: Any) -> None:
    for part in (waiting.came, waiting.parent, waiting.guess):
        part[one], part[other] = part[other], part[one]
    confidence = waiting.confidence
    confidence[one], confidence[other] = confidence[other], confidence[one]


@compiled()
def _push(waiting: Any, size: Any, confidence: Any, came: Any, parent: Any, guess: Any) -> None:
    waiting.confidence[size], waiting.came[size] = confidence, came
    waiting.parent[size], waiting.guess[size] = parent, guess
    place = size
    while place > 0 and _before(waiting, place, (place - 1) // 2):
        _swap(waiting, place, (place - 1) // 2)
        place = (place - 1) // 2


@compiled()
def _pop(waiting: Any, size: Any) -> None:
    """The first one goes to the end of `size`."""
    last = size - 1
    _swap(waiting, 0, last)
    place = 0
    while 2 * place + 1 < last:
        best = 2 * place + 1
        if best + 1 < last and _before(waiting, best + 1, best):
            best += 1
        if not _before(waiting, best, place):
            break
        _swap(waiting, place, best)
        place = best


# -- the tree --------------------------------------------------------------------------------------


@compiled()
def child_of(nodes: Any, size: Any, parent: Any, token: Any) -> Any:
    """The number of a node's child among `size` nodes, `size` if it is not there."""
    for node in range(parent + 1, size):
        if nodes.parent[node] == parent and nodes.token[node] == token:
            return node
    return size


@compiled()
def add_child(nodes: Any, size: Any, parent: Any, token: Any) -> None:
    """A new node, as number `size`."""
    nodes.token[size], nodes.parent[size] = token, parent
    nodes.depth[size] = nodes.depth[parent] + 1
    nodes.heard[size] = nodes.guesses[size] = -1


@compiled()
def grow(sources: Any, known: Any, waiting: Any, grown: Any) -> Any:
    """Anew, best first: always add the node with the likeliest path of all not yet in it. How many
    nodes the tree has, and how many of `nodes` are in use then, of which `known` were.
    """
    rules, nodes = sources.rules, sources.nodes
    size = held = came = 0
    node, place, reached = 0, -1, 1.0
    while len(rules.least):
        if nodes.depth[node] < rules.depth:
            _guess(sources, node)
            for guess in range(nodes.guesses[node]):
                likely = reached * nodes.guess_confidence[node, guess]
                if likely < rules.least_confidence:
                    break
                _push(waiting, held, likely, came, place, guess)
                held, came = held + 1, came + 1
        if held == 0 or size == len(rules.least) or waiting.confidence[0] < rules.least[size]:
            break
        _pop(waiting, held)
        held -= 1
        reached, parent, guess = waiting.confidence[held], waiting.parent[held], waiting.guess[held]
        above = 0 if parent < 0 else grown.node[parent]
        token = nodes.guess_token[above, guess]
        node = child_of(nodes, known, above, token)
        if node == known:
            add_child(nodes, known, above, token)
            known += 1
        place = size
        grown.node[place], grown.confidence[place] = node, reached
        grown.parent[place], grown.member[place] = parent, nodes.guess_member[above, guess]
        size += 1
    return size, known


@compiled()
def worths(sources: Any, grown: Any, size: Any, worth: Any) -> None:
    """To worth [1 + nodes of the tree], the root first: the probability that the walk comes to a
    node and finds no child, of those that the neural member may be asked about; -1 for the others.
    """
    rules, nodes = sources.rules, sources.nodes
    for place in range(-1, size):
        node = 0 if place < 0 else grown.node[place]
        askable = nodes.depth[node] < rules.depth and nodes.heard[node] < 0
        if not askable or (node > 0 and nodes.heard[nodes.parent[node]] < 0):
            worth[place + 1] = -1.0
            continue
        _guess(sources, node)
        covered = 0.0
        for guess in range(nodes.guesses[node]):
            covered += nodes.guess_confidence[node, guess]
        reached = 1.0 if place < 0 else grown.confidence[place]
        worth[place + 1] = reached * max(0.0, 1.0 - covered)
