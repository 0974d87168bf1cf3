"""What is counted, through `ray.serve.metrics`: Prometheus sees it with deployment, replica and
application tags.

Ray prefixes the names with `ray_`. Counters rise by what each request, decision or step adds, so
that an idle server shows zeros and never a NaN; ratios (acceptance, tau) are left to the query.
"""

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.answer import Pace
from router.router import RouterStats
from workers.request import SpeculationStats
from workers.verifier import Gauges

PLAIN = "none"
"""The `draft` tag of plain decoding."""

_FIRST_TOKEN_MS = [10.0, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000]
_PER_TOKEN_MS = [1.0, 2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1000]


class RisingTotal:
    """A counter fed with running totals: it rises by what each total is above the last.

    A total that fell belongs to a restarted source and counts from zero.
    """

    def __init__(self, name: str, description: str, tag: str | None = None) -> None:
        self._counter = Counter(name, description=description, tag_keys=(tag,) if tag else None)
        self._tag = tag
        self._last: dict[str, int] = {}

    def set(self, total: int, tag: str = "") -> None:
        """The total by now."""
        last = self._last.get(tag, 0)
        rise = total - last if total >= last else total
        self._last[tag] = total
        if rise:
            self._counter.inc(rise, {self._tag: tag} if self._tag else {})


class IngressMetrics:
    """Requests and how long their tokens took."""

    def __init__(self) -> None:
        self._requests = Counter(
            "outrider_requests_total",
            description="Requests by endpoint and end: HTTP status, or `cancelled` by the client.",
            tag_keys=("endpoint", "end"),  # type: ignore[arg-type]  # theirs is Tuple[str]
        )
        self._broken = Counter(
            "outrider_broken_streams_total",
            description="Streams that ended with an error event.",
        )
        self._first_token = Histogram(
            "outrider_time_to_first_token_ms",
            description="From a request's arrival to its first token.",
            boundaries=_FIRST_TOKEN_MS,
            tag_keys=("draft",),
        )
        self._per_token = Histogram(
            "outrider_time_per_output_token_ms",
            description="Between tokens after the first chunk, averaged over an answer.",
            boundaries=_PER_TOKEN_MS,
            tag_keys=("draft",),
        )

    def ended(self, endpoint: str, end: str) -> None:
        """One request is over."""
        self._requests.inc(tags={"endpoint": endpoint, "end": end})

    def broken(self) -> None:
        """One stream had to end with an error event."""
        self._broken.inc()

    def paced(self, draft: str | None, pace: Pace) -> None:
        """One answer was complete."""
        tags = {"draft": draft or PLAIN}
        self._first_token.observe(pace.to_first_token * 1000, tags)
        if pace.per_token is not None:
            self._per_token.observe(pace.per_token * 1000, tags)


class VerifierMetrics:
    """Speculation by draft, and the state of the decode loop."""

    def __init__(self) -> None:
        self._by_draft = {
            name: Counter(f"outrider_{name}_total", description=text, tag_keys=("draft",))
            for name, text in {
                "steps": "Target steps in finished answers.",
                "drafted_tokens": "Draft tokens verified.",
                "tested_positions": "Positions with a guess where all before it were right.",
                "accepted_tokens": "Draft tokens accepted.",
                "recovered_tokens": "Tokens of the target's own after a wrong guess.",
                "bonus_tokens": "Tokens of the target's own after a wholly accepted path.",
                "emitted_tokens": "Tokens delivered: accepted, recovered and bonus ones.",
                "resumptions": "Times an answer went on after its verifier was lost.",
            }.items()
        }
        self._gauges = {
            name: Gauge(f"outrider_{name}", description=text)
            for name, text in {
                "running_sequences": "Sequences being decoded.",
                "waiting_requests": "Requests waiting for a place.",
                "kv_pages_in_use": "Pages of the KV pool that hold something.",
                "kv_pages": "Pages of the KV pool.",
                "kv_host_pages_in_use": "Pages that the host keeps for requests to come.",
            }.items()
        }
        self._loop_steps = RisingTotal(
            "outrider_loop_steps_total", "Target forwards, whatever was in the batch."
        )
        self._faults = RisingTotal(
            "outrider_draft_faults_total", "Times a draft died, failed or was late.", "draft"
        )

    def finished(self, stats: SpeculationStats) -> None:
        """One answer was complete."""
        counts = {
            "steps": stats.steps,
            "drafted_tokens": stats.drafted,
            "tested_positions": stats.tested,
            "accepted_tokens": stats.accepted,
            "recovered_tokens": stats.recovered,
            "bonus_tokens": stats.bonus,
            "emitted_tokens": stats.emitted,
            "resumptions": stats.resumed,
        }
        tags = {"draft": stats.draft or PLAIN}
        for name, count in counts.items():
            if count:
                self._by_draft[name].inc(count, tags)

    def gauged(self, gauges: Gauges) -> None:
        """The loop's state now."""
        self._gauges["running_sequences"].set(gauges.running)
        self._gauges["waiting_requests"].set(gauges.waiting)
        self._gauges["kv_pages_in_use"].set(gauges.kv_pages_in_use)
        self._gauges["kv_pages"].set(gauges.kv_pages)
        self._gauges["kv_host_pages_in_use"].set(gauges.kv_host_pages_in_use)
        self._loop_steps.set(gauges.steps)
        for draft, count in gauges.draft_faults.items():
            self._faults.set(count, draft)


class RouterMetrics:
    """What the router decided, and what its cache knew."""

    def __init__(self) -> None:
        self._decisions = RisingTotal(
            "outrider_router_decisions_total", "Drafts chosen, by reason.", "reason"
        )
        self._hits = RisingTotal(
            "outrider_router_cache_hits_total", "Decisions that found a similar prompt."
        )
        self._misses = RisingTotal(
            "outrider_router_cache_misses_total", "Decisions that found none."
        )
        self._dropped = RisingTotal(
            "outrider_router_dropped_writes_total", "Outcomes that Redis did not take."
        )
        self._entries = Gauge(
            "outrider_router_cache_entries", description="Prompts in the local matrix."
        )

    def counted(self, stats: RouterStats) -> None:
        """The router's totals now."""
        for reason, count in stats.decisions.items():
            self._decisions.set(count, reason)
        self._hits.set(stats.cache_hits)
        self._misses.set(stats.cache_misses)
        self._dropped.set(stats.dropped_writes)
        self._entries.set(stats.cache_entries)
