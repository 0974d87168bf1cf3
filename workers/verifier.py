"""The decode loop: drafts propose, the target checks all trees in one pass, the answers grow.

The loop has a thread of its own. Other threads queue requests in and receive deltas through sinks,
so nobody ever waits for a forward pass but the requests themselves.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from time import perf_counter

from torch import Tensor

from workers.answer import Answer
from workers.controller import Controller, Step
from workers.draft import DraftClient, DraftSpec, Features, Terms
from workers.draft_pool import Asking, DraftPool
from workers.engine.pack import Pack, Segment, chain_parents
from workers.engine.sampling import BadLogits, NothingAllowed
from workers.grammar import Grammars, GrammarSpec
from workers.logprobs import with_logprobs
from workers.pass_costs import PassCosts, measure_pass_costs, unknown_costs
from workers.request import Delta, GenerationRequest, StepTime
from workers.scheduler import Limits, LiveSequence, Scheduler, Sink, Turn
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal
from workers.target import Target
from workers.verification import verify

logger = logging.getLogger("outrider.verifier")


# Failed passes in a row after which the engine, not the requests, must be at fault.
PATIENCE = 3

OnVerdict = Callable[[Proposal, Verdict], object]
"""Hears of every verification, plain decoding's with an empty proposal too. For measuring: it runs
in the loop's thread, so what it costs every pass pays, and what it raises fails the pass.
"""


class QueueFull(RuntimeError):
    """Too many requests wait already. Try again later."""


class EngineError(RuntimeError):
    """The pass that this request was in failed. The request is over; others may go on."""


class EngineDown(EngineError):
    """The engine ends, or has ended. Another one can go on with what it was saying."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The verifier at one moment. draft_faults: proposals not had, by draft, since the start."""

    running: int
    waiting: int
    kv_pages_in_use: int
    kv_pages: int
    kv_host_pages_in_use: int
    steps: int
    draft_faults: dict[str, int]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds that all steps since the start took for proposals, and for the rest."""

    draft_s: float = 0.0
    pass_s: float = 0.0

    def more(self, draft_s: float, pass_s: float) -> "Spent":
        """With those of another step."""
        return Spent(self.draft_s + draft_s, self.pass_s + pass_s)


class Verifier:
    """Serves requests with one target and a pool of drafts.

    `learn`, `submit`, `cancel`, `gauges`, `spent`, `forget_prefixes` and `healthy` may be called
    from any thread.
    """

    def __init__(
        self,
        target: Target,
        drafts: DraftPool,
        limits: Limits,
        on_verdict: OnVerdict | None = None,
    ) -> None:
        self._target = target
        self._drafts = drafts
        self._limits = limits
        self._on_verdict = on_verdict
        self._scheduler = Scheduler(target.pool, limits)
        self._grammars = Grammars(target.tokenizer, target.vocab_size, target.eos_token_ids)
        self._numbers = count()
        self._controller: Controller | None = None  # from the first request that wants one on
        self._steps = 0
        self._spent = Spent()
        self._failures = 0  # in a row
        self._thread: threading.Thread | None = None
        self._stopping = False
        # Guards what other threads touch: new requests, cancellations, what they wish.
        self._doorbell = threading.Condition()
        self._arrived: list[LiveSequence] = []
        self._cancelled: set[str] = set()
        self._forgetting = False
        self._stepping = threading.Lock()  # held by a step

    # -- the loop ------------------------------------------------------------------------------

    def step(self) -> bool:
        """One pass over everybody who can run; False when there is nobody."""
        with self._stepping:
            return self._step()

    def _step(self) -> bool:
        self._take_in()
        turns = self._scheduler.turns()
        if not turns:
            return False
        began = perf_counter()
        proposals = self._guess(turns)
        guessed = perf_counter()
        pack = Pack(tuple(self._segment(turn, proposals) for turn in turns))
        output = self._target.forward(pack)
        logits, hidden = pack.split_rows(output.logits), pack.split_tokens(output.features)
        said = {}
        for turn, rows, states in zip(turns, logits, hidden, strict=True):
            number = turn.sequence.number
            proposal = proposals.get(number, Proposal.empty())
            try:
                delta = self._settle(turn, proposal, rows, states)
                said[number] = len(delta.tokens) if delta else 0
                if delta:
                    turn.sequence.sink(_timed(delta, turn.sequence.request, began, guessed))
            except BadLogits as error:  # of this sequence; its neighbours have rows of their own
                self._fail(turn.sequence, EngineError(str(error)))
            except NothingAllowed as error:
                self._fail(turn.sequence, error)
        self._target.pool.end_step()
        over = perf_counter()
        self._steps += 1
        self._spent = self._spent.more(guessed - began, over - guessed)
        if self._controller and any(turn.sequence.request.adaptive for turn in turns):
            self._controller.learn(
                Step(
                    rows=pack.size,
                    draft_s=guessed - began,
                    rest_s=over - guessed,
                    said={number: tokens for number, tokens in said.items() if tokens},
                    proposals=proposals,
                    prefill=any(turn.stop - turn.start > 1 for turn in turns),
                )
            )
        return True

    def _guess(self, turns: Sequence[Turn]) -> dict[int, Proposal]:
        """Proposals by sequence; of those who leave it to the controller, what pays."""
        decoding = sum(turn.decodes for turn in turns)
        terms = self._controller.terms(decoding) if self._controller and decoding else None
        askings = [asking for turn in turns if (asking := self._asking(turn, terms))]
        found = self._drafts.propose(askings)
        loose = {asking.sequence for asking in askings if asking.terms} & found.keys()
        # A sampled proposal is verified as it was drawn.
        loose = {sequence for sequence in loose if found[sequence].q is None}
        if self._controller is None or not loose:
            return found
        rows = sum(turn.stop - turn.start for turn in turns)
        rows += sum(len(own.tree) for sequence, own in found.items() if sequence not in loose)
        return found | self._controller.cut({s: found[s] for s in loose}, decoding, rows)

    def _asking(self, turn: Turn, terms: Terms | None) -> Asking | None:
        """What to ask a draft for; the last token of an answer needs no guess."""
        sequence, depth = turn.sequence, turn.sequence.answer.room - 1
        if not turn.decodes or sequence.draft is None or depth < 1:
            return None
        request = sequence.request
        if self._controller and request.adaptive and not self._controller.asks(sequence.number):
            return None
        return Asking(
            sequence.number,
            sequence.draft,
            sequence.tokens,
            request.budget,
            depth,
            request.sampling.seed,
            request.sampling.temperature,
            terms if request.adaptive else None,
        )

    def _segment(self, turn: Turn, proposals: Mapping[int, Proposal]) -> Segment:
        """The turn's own tokens as a chain, and the proposal's tree below the last of them."""
        number = turn.sequence.number
        own = turn.sequence.tokens[turn.start : turn.stop]
        tree = proposals.get(number, Proposal.empty()).tree
        last = len(own) - 1
        size = len(own) + len(tree)
        self._target.pool.reserve(number, size)
        return Segment(
            tokens=(*own, *tree.tokens),
            start=turn.start,
            parents=(*chain_parents(len(own)), *(parent + 1 + last for parent in tree.parents)),
            extents=self._target.pool.extents(number),
            rows=tuple(range(last, size)) if turn.decodes else (),
        )

    def _settle(self, turn: Turn, proposal: Proposal, rows: Tensor, states: Tensor) -> Delta | None:
        """Verify and keep the accepted path's KV: what it adds to the answer, if it does."""
        sequence, own = turn.sequence, range(turn.stop - turn.start)
        known = len(sequence.tokens)
        if not turn.decodes:
            self._keep(turn, own)
            # A copy: as a part of the pass's states they would be sent with all of them.
            self._tell_draft(turn, known, (), states.clone())
            return None
        verdict = verify(
            proposal, rows, sequence.request.sampling, sequence.history, position=known
        )
        if self._on_verdict is not None:
            self._on_verdict(proposal, verdict)
        delta = sequence.answer.add(proposal, verdict)
        if sequence.request.logprobs is not None:
            delta = with_logprobs(delta, verdict, rows, sequence.request.logprobs)
        sequence.extend(delta.tokens)
        path = verdict.path[: len(delta.tokens)]  # an answer may end on the way
        kept = (*own, *(len(own) + node for node in path))
        self._keep(turn, kept)
        if delta.finish_reason:
            self._end(sequence)
        else:
            self._tell_draft(turn, known, delta.tokens, states[list(kept)])
        return delta

    def _keep(self, turn: Turn, kept: Sequence[int]) -> None:
        """Commit these slots of the turn's segment: they hold what the sequence says from there."""
        tokens = turn.sequence.tokens[turn.start : turn.start + len(kept)]
        self._target.commit(turn.sequence.number, kept, tokens)

    def _tell_draft(self, turn: Turn, known: int, said: Sequence[int], states: Tensor) -> None:
        """What the target said after `known` tokens, and its hidden states since `turn.start`."""
        sequence, layers = turn.sequence, self._target.feature_layers
        if sequence.draft:
            features = Features(turn.start, layers, states) if layers else None
            self._drafts.commit(sequence.draft, sequence.number, known, said, features)

    def _take_in(self) -> None:
        """Let arrivals join the line, the cancelled go, and the first in line run."""
        with self._doorbell:
            self._scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
            cancelled, self._cancelled = self._cancelled, set()
            forgetting, self._forgetting = self._forgetting, False
        if forgetting:
            self._target.pool.forget_unheld()
        everybody = [*self._scheduler.waiting, *self._scheduler.running.values()]
        for sequence in everybody if cancelled else ():
            if sequence.request.id in cancelled:
                self._end(sequence)
        for sequence in self._scheduler.preempt():
            self._forget(sequence)
        if self._controller is None and not self._scheduler.running and self._wanted():
            self._controller = Controller(self._costs())
        for sequence in self._scheduler.admit():
            if sequence.draft:
                self._drafts.commit(sequence.draft, sequence.number, 0, sequence.tokens)

    def _wanted(self) -> bool:
        """Whether it is to be known what passes cost: a service with drafts asks before anybody
        comes, else somebody in line leaves it to the controller how much is guessed.
        """
        if self._thread:
            return bool(self._drafts.names())
        return any(s.draft and s.request.adaptive for s in self._scheduler.waiting)

    def _costs(self) -> PassCosts:
        """In the loop's thread: OpenMP keeps a team of threads for every thread that computes, and
        where they outnumber the cores all are slow.
        """
        try:
            return measure_pass_costs(self._target)
        except Exception:
            if self._target.sharded:  # the ranks are out of step
                raise
            logger.exception("passes could not be timed: requests will show what they cost")
            return unknown_costs()

    def _end(self, sequence: LiveSequence) -> None:
        self._scheduler.leave(sequence)
        self._forget(sequence)

    def _forget(self, sequence: LiveSequence) -> None:
        if sequence.draft:
            self._drafts.forget(sequence.draft, sequence.number)
        if self._controller:
            self._controller.forget(sequence.number)

    # -- its thread ----------------------------------------------------------------------------

    def start(self) -> None:
        """Run the loop in a thread of its own until `stop`. With drafts it begins with measuring
        what passes cost.
        """
        assert self._thread is None, "the loop is already running"
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decode-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop and the target's other ranks; unfinished requests get an EngineDown."""
        with self._doorbell:
            self._stopping = True
            self._doorbell.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._refuse_all(EngineDown("the verifier was stopped"))
        self._target.close()

    def _run(self) -> None:
        while not self._stopping:
            try:
                busy = self.step()
            except Exception as error:
                logger.exception("a pass failed")
                self._fail_pass(f"the forward pass failed: {error}")
                continue
            if busy:
                self._failures = 0
            else:
                self._wait()

    def _wait(self) -> None:
        with self._doorbell:
            self._doorbell.wait_for(lambda: self._stopping or self._arrived or self._cancelled)

    def _fail_pass(self, reason: str) -> None:
        """One bad pass ends the requests that were in it, and not the service."""
        self._failures += 1
        if self._target.sharded:  # out of step, the ranks would mix up the next pass
            self._refuse_all(EngineDown(reason))
            return
        for sequence in [*self._scheduler.running.values()]:
            self._fail(sequence, EngineError(reason))
        # It may have ended before a copy that the pool's book takes for made.
        self._target.pool.forget_unheld()

    def _refuse_all(self, error: EngineDown) -> None:
        """Nobody runs from now on, and nobody is left waiting for it."""
        with self._doorbell:
            self._stopping = True
            self._scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
        for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting]:
            self._fail(sequence, error)

    def _fail(self, sequence: LiveSequence, error: Exception) -> None:
        sequence.sink(error)  # first: whatever happens then, nobody waits for an answer
        self._end(sequence)

    # -- for other threads ---------------------------------------------------------------------

    def learn(self, grammar: GrammarSpec) -> None:
        """Compile a grammar, which may take seconds; requests that keep to it find it ready.

        Raises ValueError for one that is none.
        """
        self._grammars.start(grammar)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Queue a request. The loop's thread calls `sink` with its deltas, or with an EngineError,
        or with a ValueError where its grammar lets nothing follow.

        Raises QueueFull, ValueError naming the field that cannot be served, or EngineDown after
        `stop`.
        """
        self._check(request)
        answer = Answer(request, self._target.tokenizer, self._target.eos_token_ids)
        grammar = self._grammars.start(request.grammar) if request.grammar else None
        sequence = LiveSequence(next(self._numbers), request, answer, sink, grammar)
        self._scheduler.check(sequence)
        with self._doorbell:
            if self._stopping:
                raise EngineDown("the verifier was stopped")
            if self._line() >= self._limits.max_queued:
                raise QueueFull(f"{self._limits.max_queued} requests wait already; try again later")
            self._arrived.append(sequence)
            self._doorbell.notify()

    def _line(self) -> int:
        """Requests in line behind those whose places in the batch are free already."""
        places = self._limits.max_running - len(self._scheduler.running)
        return len(self._arrived) + len(self._scheduler.waiting) - places

    def cancel(self, request_id: str) -> None:
        """Forget a request, known or not, from the next step on; its sink hears nothing more."""
        with self._doorbell:
            self._cancelled.add(request_id)
            self._doorbell.notify()

    def gauges(self) -> Gauges:
        return Gauges(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._arrived),
            kv_pages_in_use=self._target.pool.pages_in_use,
            kv_pages=self._target.pool.pages,
            kv_host_pages_in_use=self._target.pool.host_pages_in_use,
            steps=self._steps,
            draft_faults=dict(self._drafts.faults),
        )

    def spent(self) -> Spent:
        """For measuring: unlike `gauges`, it waits for the end of the step that runs, which is
        later than that step's answers. No sink may ask.
        """
        with self._stepping:
            return self._spent

    def forget_prefixes(self) -> None:
        """Keep nothing of texts that are finished by the next step: for measuring, where every
        request is to read its own prompt.
        """
        with self._doorbell:
            self._forgetting = True

    def healthy(self) -> bool:
        """Whether the loop is alive and its passes succeed.

        A single failure may be the fault of its requests; but it leaves ranks out of step, so that
        a target with several must be restarted at once.
        """
        patience = 1 if self._target.sharded else PATIENCE
        alive = self._thread is not None and self._thread.is_alive()
        return alive and self._failures < patience

    def _check(self, request: GenerationRequest) -> None:
        request.sampling.check_vocabulary(self._target.vocab_size)
        if any(not 0 <= token < self._target.vocab_size for token in request.stop_tokens):
            raise ValueError(f"stop_token_ids: must be from 0 to {self._target.vocab_size - 1}")
        room = self._target.context_length - len(request.prompt)
        if request.max_tokens > room:
            raise ValueError(
                f"max_tokens: {request.max_tokens} do not fit: the prompt has "
                f"{len(request.prompt)} tokens and the context {self._target.context_length}"
            )
        if any(not 0 <= token < self._target.vocab_size for token in request.prompt):
            raise ValueError(f"prompt: token ids must be from 0 to {self._target.vocab_size - 1}")
        if request.draft is not None and request.draft not in self._drafts:
            names = ", ".join(self._drafts.names()) or "no drafts"
            raise ValueError(f"speculation.draft: no draft {request.draft!r}; there is: {names}")


def _timed(delta: Delta, request: GenerationRequest, began: float, guessed: float) -> Delta:
    """With how long the step took, for who wants to know; looking at the clock takes time too."""
    if not request.trace:
        return delta
    return replace(delta, took=StepTime(guessed - began, perf_counter() - guessed))


def build_verifier(
    target: Target,
    drafts: Mapping[str, DraftClient],
    limits: Limits,
    specs: Collection[DraftSpec] = (),
    on_verdict: OnVerdict | None = None,
) -> Verifier:
    """A verifier over a target and named drafts. `specs` are the drafts': those without one are
    verified by `invariant`, and do not read the target's hidden states.
    """
    pool = DraftPool(
        drafts,
        vocab_size=target.vocab_size,
        timeout_s=limits.draft_timeout_s,
        ratio=[spec.name for spec in specs if spec.verification == "ratio"],
        readers=[spec.name for spec in specs if spec.reads_features],
    )
    return Verifier(target, pool, limits, on_verdict)
