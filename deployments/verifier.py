"""The verifier's Serve deployment: between the decode loop's thread and async streams.

The replica is rank 0. Its event loop only queues requests in and deltas out, so health checks,
cancellations and streams never wait for a forward pass.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayTaskError
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from deployments.config import OutriderConfig, TracingConfig
from deployments.draft_actor import DraftWorker, RayDraft
from deployments.links import TargetFacts, VerifierStatus
from deployments.metrics import VerifierMetrics
from deployments.placement import Threads, bundles, child_options, draft_bundle, threads_for
from deployments.target_ranks import RankSet
from deployments.tracing import AnswerSpans, open_tracer
from workers.draft import InlineDraft
from workers.engine.model_store import resolve
from workers.grammar import GrammarSpec
from workers.load_draft import feature_layers_of, load_draft
from workers.request import Delta, GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target
from workers.verifier import Gauges, build_verifier

logger = logging.getLogger("outrider.verifier")

_Loaded = TypeVar("_Loaded")

DRAFT_LOADING_S = 120.0
"""How long the pool may take to load before the server starts without those that are missing."""

STUCK_AFTER_S = 300.0
"""Without a step for so long, though there is work, the loop hangs. A pass of a 7B target over a
prompt chunk takes tens of seconds on a few cores."""


GOODBYE_S = 5.0
"""How long the decode loop may take to end its last pass, and the ranks with it."""


class DecodeLoop(Protocol):
    """The part of `workers.verifier.Verifier` that is used here."""

    def learn(self, grammar: GrammarSpec) -> None:
        """Makes a grammar ready for the requests that keep to it, which may take a while."""

    def submit(
        self, request: GenerationRequest, sink: Callable[[Delta | BaseException], None]
    ) -> None:
        """Queues a request; `sink` hears the rest, from the loop's thread."""

    def cancel(self, request_id: str) -> None:
        """Ends a request, known or not."""

    def gauges(self) -> Gauges:
        """How busy it is."""

    def healthy(self) -> bool:
        """Whether the loop's thread is alive and well."""

    def stop(self) -> None:
        """Ends the loop."""


class PoolMember(Protocol):
    """The part of a `workers.draft.DraftClient` that is used here."""

    def ready(self) -> bool:
        """Whether it can be asked now. Asking is what brings one back that was away."""


class Ranks(Protocol):
    """The part of a `RankSet` that is used here."""

    def check(self) -> None:
        """Raises RuntimeError when a rank is gone."""

    def stop(self) -> None:
        """Ends the ranks."""


@dataclass(frozen=True, slots=True)
class Engine:
    """All that a replica holds. `loop` is running."""

    loop: DecodeLoop
    facts: TargetFacts
    drafts: Mapping[str, PoolMember]
    ranks: Ranks | None


class VerifierDeployment:
    """Streams answers. A plain class: `app.build` makes it a deployment."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        tracing: TracingConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = open_engine()
        self._tracer = open_tracer(tracing, "verifier")
        self._metrics = VerifierMetrics()
        self._clock = clock
        self._last_step = (-1, clock())

    async def facts(self) -> TargetFacts:
        """What is served."""
        return self._engine.facts

    async def status(self) -> VerifierStatus:
        """How busy the loop is, and who is away."""
        gauges = self._engine.loop.gauges()
        return VerifierStatus(
            healthy=self._engine.loop.healthy(),
            running=gauges.running,
            waiting=gauges.waiting,
            kv_pages_in_use=gauges.kv_pages_in_use,
            kv_pages=gauges.kv_pages,
            kv_host_pages_in_use=gauges.kv_host_pages_in_use,
            steps=gauges.steps,
            drafts={
                name: "ready" if draft.ready() else "away"
                for name, draft in self._engine.drafts.items()
            },
            draft_faults=gauges.draft_faults,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer, delta by delta. Leaving early, however, cancels the request in the loop.

        Raises:
            QueueFull: too many wait already.
            ValueError: what only the loop can check.
            EngineError: the forward pass that this request was in failed.
            EngineDown: the engine has ended; Serve replaces the replica.
        """
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

        def sink(item: Delta | BaseException) -> None:
            here.call_soon_threadsafe(arrived.put_nowait, item)

        if request.grammar is not None:
            await asyncio.to_thread(self._engine.loop.learn, request.grammar)
        spans = AnswerSpans(self._tracer, request)
        self._engine.loop.submit(request, sink)
        ended = False
        try:
            while not ended:
                delta = await arrived.get()
                if isinstance(delta, BaseException):
                    ended = True
                    raise delta
                spans.add(delta)
                ended = delta.finish_reason is not None
                if ended:
                    self._metrics.finished(delta.stats)
                yield delta
        finally:
            if not ended:
                self._engine.loop.cancel(request.id)

    async def check_health(self) -> None:
        """Serve calls this; raising three times in a row gets the replica replaced.

        Raises:
            RuntimeError: a rank is gone, or the decode loop is dead, failing or stuck.
        """
        if self._engine.ranks is not None:
            self._engine.ranks.check()
        gauges = self._engine.loop.gauges()
        self._metrics.gauged(gauges)
        for draft in self._engine.drafts.values():
            draft.ready()
        self._check_progress(gauges)
        if not self._engine.loop.healthy():
            raise RuntimeError("the decode loop is dead, or its last pass failed")

    async def close(self) -> None:
        """Ends what was started; nothing was when the constructor failed.

        The ranks are told that it is over, and ended if that takes long: a pass that waits for one
        that hangs fails then.
        """
        if not hasattr(self, "_engine"):
            return
        stopping = asyncio.ensure_future(asyncio.to_thread(self._engine.loop.stop))
        await asyncio.wait([stopping], timeout=GOODBYE_S)
        if self._engine.ranks is not None:
            self._engine.ranks.stop()
        await stopping

    def _check_progress(self, gauges: Gauges) -> None:
        steps, since = self._last_step
        if gauges.steps != steps or not gauges.running:
            self._last_step = (gauges.steps, self._clock())
        elif self._clock() - since > STUCK_AFTER_S:
            raise RuntimeError(f"the decode loop made no step for {STUCK_AFTER_S:.0f} s")


def open_engine(config: OutriderConfig) -> Engine:
    """Starts everything a replica needs: drafts, ranks, the target and the loop.

    Draft actors load while the target does. Call it in the replica: the children go into its
    placement group.

    Raises:
        ValueError: the target or a draft cannot be served, with the reason.
    """
    group = get_current_placement_group()
    assert group is not None, "app.build gives the replica a placement group"
    threads = threads_for(config)
    actors = start_draft_actors(config, group, threads)
    inline = _apart(load_inline_drafts, config, threads)
    ranks = RankSet(config, group, threads) if config.target.tensor_parallel > 1 else None
    target = _apart(load_target, _target_spec(config, threads), ranks.launch if ranks else None)
    for name, actor in actors.items():
        wait_for_draft(name, actor.loading)
    drafts: dict[str, RayDraft | InlineDraft] = {**actors, **inline}
    loop = build_verifier(
        target,
        drafts,
        _limits(config),
        [draft.spec() for draft in config.pool],
    )
    loop.start()
    return Engine(loop, facts_of(config, target), drafts, ranks)


def _apart(load: Callable[..., _Loaded], *arguments: object) -> _Loaded:
    """Loads something that runs on torch in a thread that ends with it.

    OpenMP keeps a team of threads for every thread that ever computed. Where all teams together
    outnumber the cores, it no longer spins while it waits for work, and a pass of the decode loop,
    which is another thread, takes two to three times as long.
    """
    with ThreadPoolExecutor(1) as once:
        return once.submit(load, *arguments).result()


def load_inline_drafts(config: OutriderConfig, threads: Threads) -> dict[str, InlineDraft]:
    """The pool members that run in this process, loaded.

    Raises:
        ValueError: one is not for this target.
    """
    path = resolve(config.target.model)
    return {
        draft.name: InlineDraft(
            load_draft(
                draft.spec(),
                path,
                dtype=config.target.dtype,
                threads=threads.of(draft),
                device=config.target.device,
            )
        )
        for draft in config.pool
        if draft.inline
    }


def start_draft_actors(
    config: OutriderConfig, group: PlacementGroup, threads: Threads
) -> dict[str, RayDraft]:
    """The pool members with a process of their own, loading. They restart by themselves."""
    path = resolve(config.target.model)
    return {
        draft.name: _start_draft_actor(config, number, path, group, threads)
        for number, draft in enumerate(config.draft_actors)
    }


def _start_draft_actor(
    config: OutriderConfig, number: int, target: Path, group: PlacementGroup, threads: Threads
) -> RayDraft:
    draft = config.draft_actors[number]
    bundle = draft_bundle(number)
    options = child_options(group, bundle, bundles(config)[bundle], threads.of(draft))
    worker: Any = ray.remote(DraftWorker).options(max_restarts=-1, max_task_retries=0, **options)
    return RayDraft(
        draft.name,
        worker.remote(draft.spec(), target, config.target.dtype, threads.of(draft)),
    )


def wait_for_draft(name: str, loading: "Future[None]", patience_s: float = DRAFT_LOADING_S) -> None:
    """Waits until a draft is loaded. One that is late or failed may join later; a wrong one not.

    Raises:
        ValueError: the draft is not one for this target; a setting must be mended.
    """
    try:
        loading.result(patience_s)
    except Exception as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, ValueError):
            raise ValueError(str(error.cause)) from error
        logger.warning("starting without draft %s, it joins when it is there: %r", name, error)


def facts_of(config: OutriderConfig, target: Target) -> TargetFacts:
    """What requests are checked against: the smallest of context, KV pool and configured limit.

    Raises:
        ValueError: the pool has no room for the smallest request.
    """
    slots = target.pool.pages * target.pool.page_size
    room = slots - config.speculation.max_budget
    if room < 2:
        raise ValueError(
            f"target.kv_tokens: {slots} slots cannot hold a proposal of speculation.max_budget "
            f"{config.speculation.max_budget} nodes and a request beside it; give it more"
        )
    return TargetFacts(
        model=config.target.served_name,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        request_tokens=min(
            target.context_length,
            room,
            config.limits.max_request_tokens or target.context_length,
        ),
        drafts=tuple(draft.name for draft in config.pool),
        created=int(time.time()),
    )


def _target_spec(config: OutriderConfig, threads: Threads) -> TargetSpec:
    target = config.target
    return TargetSpec(
        model=target.model,
        dtype=target.dtype,
        device=target.device,
        tensor_parallel=target.tensor_parallel,
        kv_tokens=target.kv_tokens,
        host_kv_tokens=target.host_kv_tokens,
        threads=threads.rank,
        context_length=target.context_length,
        feature_layers=feature_layers_of([draft.spec() for draft in config.pool]),
    )


def _limits(config: OutriderConfig) -> Limits:
    return Limits(
        max_running=config.limits.max_running,
        max_queued=config.limits.max_queued,
        prefill_tokens=config.limits.prefill_tokens,
        draft_timeout_s=config.speculation.draft_timeout_ms / 1000,
    )
