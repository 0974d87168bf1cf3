"""The `lm` draft: a small causal language model that speaks the target's vocabulary.

It runs on the target's own engine, with a KV pool of its own. A tree grows level by level, for all
sequences of a call in one pass: the likeliest nodes of the newest level get children, and the nodes
with the likeliest paths stay (Li et al., EAGLE-2, 2024, section 4).
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from cache.kv_pool import KVPool, OutOfPages
from workers.draft import DraftRequest, DraftSpec, DraftUpdate
from workers.engine.model import load_model
from workers.engine.model_store import resolve
from workers.engine.pack import Pack, Segment, chain_parents, tree_parents
from workers.engine.runner import Runner
from workers.engine.vocabulary import vocabulary_of
from workers.sampled_proposal import Comb
from workers.speculation.tree import Proposal, SparseLaw, TokenTree, level_order

CHILDREN = 3
# Nodes of a level that get children; wider levels seldom hold the accepted path.
BEAM = 4
DEEPEST = 6
# Tokens of a prompt taken in per call, so that a long one does not make the others wait.
CATCH_UP = 256
# Tokens of q that are sampled from, and sent, under the ratio test.
RATIO_TOKENS = 32
LEAST_CONFIDENCE = 0.02
PAGE_SIZE = 16
KV_TOKENS = 65536


@dataclass(slots=True)
class _Growing:
    """One request's tree while it grows. Nodes are in parent-before-child order."""

    request: DraftRequest
    depth: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    beam: list[int] = field(default_factory=lambda: [-1])  # nodes that get children next

    def add_level(self, laws: Tensor) -> None:
        """Give the beam's nodes their likeliest children. laws: [beam, vocabulary]."""
        top = laws.topk(min(CHILDREN, laws.shape[-1]), dim=-1)
        first = len(self.tokens)
        terms = self.request.terms
        least = max(LEAST_CONFIDENCE, min(terms.least)) if terms else LEAST_CONFIDENCE
        for node, ids, probs in zip(
            self.beam, top.indices.tolist(), top.values.tolist(), strict=True
        ):
            reached = 1.0 if node < 0 else self.confidence[node]
            for token, prob in zip(ids, probs, strict=True):
                if reached * prob >= least:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.confidence.append(reached * prob)
        newest = self._prune(first)
        likeliest = heapq.nlargest(BEAM, newest, key=self.confidence.__getitem__)
        self.depth -= 1
        self.beam = sorted(likeliest) if self.depth else []

    def _prune(self, first: int) -> list[int]:
        """Keep the likeliest nodes within budget; return those that were from `first` on.

        A parent is at least as likely as its child and comes before it, so it stays with it.
        """
        likeliest = sorted(range(len(self.tokens)), key=lambda n: (-self.confidence[n], n))
        kept = sorted(likeliest[: self.request.budget])
        place = {-1: -1} | {node: index for index, node in enumerate(kept)}
        self.tokens = [self.tokens[node] for node in kept]
        self.parents = [place[self.parents[node]] for node in kept]
        self.confidence = [self.confidence[node] for node in kept]
        return [place[node] for node in kept if node >= first]

    def proposal(self) -> Proposal:
        order = level_order(self.parents)
        return Proposal(
            TokenTree.from_nodes(self.tokens, self.parents),
            tuple(self.confidence[node] for node in order),
        )


class LMDraft:
    """A pool member that runs a model.

    vocab_size: ids from here on are padding and never guessed; context_length: the model's own.
    """

    def __init__(self, name: str, runner: Runner, *, vocab_size: int, context_length: int) -> None:
        self.name = name
        self._runner = runner
        self._pool = KVPool(KV_TOKENS // PAGE_SIZE, PAGE_SIZE)
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._known: dict[int, list[int]] = {}
        self._unreadable: set[int] = set()  # they hold tokens that this model does not have

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            if update.start == 0:
                self.forget([update.sequence])
                self._known[update.sequence] = []
                self._pool.open(update.sequence, update.tokens)
            known = self._known.get(update.sequence)
            if known is not None and len(known) == update.start:
                known.extend(update.tokens)
                if max(update.tokens, default=0) >= self._vocab_size:
                    self._unreadable.add(update.sequence)

    def forget(self, sequences: Sequence[int]) -> None:
        self._unreadable.difference_update(sequences)
        for sequence in sequences:
            if self._known.pop(sequence, None) is not None:
                self._pool.close(sequence)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        known = [r for r in requests if len(self._known.get(r.sequence, ())) == r.length]
        # One still busy with its prompt, or past this model's context, guesses nothing for now.
        answers = {r.sequence: Proposal.empty() for r in known}
        ready = self._catch_up([r for r in known if r.sequence not in self._unreadable])
        answers |= self._grow([r for r in ready if r.ratio_seed is None])
        answers |= self._sample([r for r in ready if r.ratio_seed is not None])
        self._pool.end_step()
        return [answers.get(r.sequence) for r in requests]

    def _catch_up(self, requests: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Take in what the target said meanwhile, but for the last token; return who is ready."""
        with self._scratch(requests):
            chunks = {r.sequence: chunk for r in requests if (chunk := self._chunk(r))}
            if chunks:
                self._runner.forward(Pack(tuple(chunks.values())))
            for sequence, chunk in chunks.items():
                self._pool.commit(sequence, range(len(chunk.tokens)), chunk.tokens)
        return [r for r in requests if self._pool.committed(r.sequence) == r.length - 1]

    def _chunk(self, request: DraftRequest) -> Segment | None:
        """The next tokens to take in, None when there are none or no place for them."""
        start = self._pool.committed(request.sequence)
        stop = min(request.length - 1, start + CATCH_UP)
        if stop <= start or request.length >= self._context_length:
            return None
        own = self._known[request.sequence][start:stop]
        return self._segment(request.sequence, own, chain_parents(len(own)), ())

    def _segment(
        self, sequence: int, tokens: Sequence[int], parents: tuple[int, ...], rows: Iterable[int]
    ) -> Segment | None:
        """Reserve scratch for the tokens; None when the pool is full."""
        try:
            self._pool.reserve(sequence, len(tokens))
        except OutOfPages:
            return None
        return Segment(
            tokens=tuple(tokens),
            start=self._pool.committed(sequence),
            parents=parents,
            extents=self._pool.extents(sequence),
            rows=tuple(rows),
        )

    def _grow(self, requests: Sequence[DraftRequest]) -> dict[int, Proposal]:
        """Trees for all requests, one pass per level."""
        trees = [_Growing(r, self._depth(r)) for r in requests]
        growing = [tree for tree in trees if tree.depth > 0 and tree.request.budget > 0]
        while growing:
            laws = self._laws([(t.request, t.tokens, t.parents, t.beam) for t in growing])
            for tree, own in zip(growing, laws, strict=True):
                if own is None:
                    tree.beam = []
                else:
                    tree.add_level(own)
            growing = [tree for tree in growing if tree.beam]
        return {tree.request.sequence: tree.proposal() for tree in trees}

    def _laws(
        self,
        wanted: Sequence[tuple[DraftRequest, Sequence[int], Sequence[int], Sequence[int]]],
    ) -> list[Tensor | None]:
        """q after some nodes (-1: the root) of each (request, tree tokens, tree parents, nodes):
        [nodes, vocabulary] float32 each, None where the pool is full.

        The whole tree is run again at every level: its KV is scratch, and for a draft's few layers
        a dozen rows cost as much as one.
        """
        segments: list[Segment | None] = []
        with self._scratch([request for request, *_ in wanted]):
            for request, tokens, parents, nodes in wanted:
                root = self._known[request.sequence][-1]
                rows = [node + 1 for node in nodes]
                segments.append(
                    self._segment(request.sequence, (root, *tokens), tree_parents(parents), rows)
                )
            pack = Pack(tuple(segment for segment in segments if segment is not None))
            if not pack.segments:
                return [None] * len(wanted)
            logits = self._runner.forward(pack).logits[:, : self._vocab_size]
        parts = iter(pack.split_rows(logits.float().softmax(-1)))
        return [None if segment is None else next(parts) for segment in segments]

    @contextmanager
    def _scratch(self, requests: Sequence[DraftRequest]) -> Iterator[None]:
        """Afterwards what they reserved and did not commit is given back, whatever happened."""
        try:
            yield
        finally:
            for request in requests:
                self._pool.rollback(request.sequence)

    def _sample(self, requests: Sequence[DraftRequest]) -> dict[int, Proposal]:
        """Combs for the ratio test, one pass per level."""
        combs = [Comb(replace(r, depth=self._depth(r)), CHILDREN) for r in requests]
        while growing := [comb for comb in combs if comb.open]:
            laws = self._laws(
                [
                    (c.request, c.path, chain_parents(len(c.path)), [len(c.path) - 1])
                    for c in growing
                ]
            )
            for comb, own in zip(growing, laws, strict=True):
                comb.grow(None if own is None else _sparse(own[0]))
        return {comb.request.sequence: comb.proposal() for comb in combs}

    def _depth(self, request: DraftRequest) -> int:
        """Levels that are worth it, and that this model's context has room for."""
        return min(request.depth, DEEPEST, self._context_length - request.length)


def _sparse(law: Tensor) -> SparseLaw:
    """The likeliest tokens of a law [vocabulary], renormalised: exactly what is sampled from."""
    top = law.topk(min(RATIO_TOKENS, len(law)))
    probs = top.values.double() / top.values.double().sum()
    return SparseLaw(tuple(top.indices.tolist()), tuple(probs.tolist()))


def load_lm_draft(
    spec: DraftSpec, target: Path, *, dtype: str, threads: int, device: str
) -> LMDraft:
    """`spec.path` is a hub name, a folder or a GGUF file, as a target's.

    Raises ValueError when the model cannot be had or run, or speaks another vocabulary.
    """
    folder = resolve(spec.path) if spec.path else target
    vocabulary = vocabulary_of(target)
    vocabulary.check_same(vocabulary_of(folder), f"drafts.{spec.name}")
    torch.set_num_threads(threads)
    model = load_model(folder, dtype=dtype, device=torch.device(device), layers=spec.layers)
    text = model.config.get_text_config()
    if text.vocab_size < vocabulary.size:
        raise ValueError(
            f"drafts.{spec.name}: its model scores {text.vocab_size} tokens, but its own tokenizer "
            f"has {vocabulary.size}; the weights do not belong to this tokenizer"
        )
    return LMDraft(
        spec.name,
        Runner(model, KV_TOKENS),
        vocab_size=vocabulary.size,
        context_length=text.max_position_embeddings,
    )
