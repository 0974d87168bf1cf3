"""Many clients for a long time, and nothing may be left of them.

    python -m tests.endurance.soak --seconds 1800 [--target default] [--json OUT]

Starts a server of its own. First each request of the catalogue is answered alone and without a
draft; then clients mix streams, departures at random moments, wrong requests and every way of
sampling. Exit code 1, and the reasons, when a text differed, a wrong request was not refused for
its field, somebody was turned away without being told when to come back, anything is still held at
the end, or memory grew.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.endurance.client import STAYING, End, Leaving, Said, drafts_of, oracle, send
from tests.endurance.requests import Ask, Wrong, catalogue, speculated, unsettled, wrong
from tests.endurance.service import Service, default_settings, interruptible, tiny_settings
from tests.endurance.verdict import conclude
from tests.serving import busy, wait_until

GROWTH = 0.03
"""What memory may grow by from the middle third of the time to the last one."""

SAMPLES = 90
SLOWEST_SAMPLE_S = 5.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many clients at once, and the seed of what they do."""

    seconds: float
    clients: int = 16
    seed: int = 0


@dataclass(slots=True)
class Record:
    """What clients saw, written by all of them."""

    ends: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, end: End, fault: str | None) -> None:
        with self.lock:
            self.ends[kind][end.how] += 1
            self.seconds[end.how].append(end.seconds)
            self.tokens += end.heard.completion_tokens or 0
            self.drafted += end.heard.speculation.get("drafted", 0)
            self.accepted += end.heard.speculation.get("accepted", 0)
            if fault:
                self.faults.append(f"{kind}: {fault}")


class Soaker:
    """One client: asks one thing after the other until the time is over."""

    def __init__(
        self, asks: Sequence[Ask], alone: Sequence[Said], drafts: Sequence[str], record: Record
    ) -> None:
        self._asks = asks
        self._alone = alone
        self._drafts = drafts
        self._wrong = wrong()
        self._record = record

    def run(self, http: httpx.Client, rng: random.Random, until: float) -> None:
        """Returns after the first request that ends later than that."""
        turns = (self._settled, self._hurried, self._unsettled, self._refused)
        while time.monotonic() < until:
            (turn,) = rng.choices(turns, (80, 6, 6, 8))
            end = turn(http, rng)
            if end.how == "busy":
                time.sleep(float(end.retry_after or 1))

    def _settled(self, http: httpx.Client, rng: random.Random) -> End:
        number = rng.randrange(len(self._asks))
        ask = speculated(self._asks[number], self._drafts, rng)
        leaving = STAYING
        if rng.random() < 0.5:
            ask = ask.streamed(usage=rng.random() < 0.5)
            if rng.random() < 0.25:
                leaving = Leaving(events=rng.randrange(20))
        elif rng.random() < 0.15:
            leaving = Leaving(silence_s=rng.uniform(0.005, 0.5))
        end = send(http, ask, leaving)
        self._record.add(ask.kind, end, fault_of(ask, end, self._alone[number]))
        return end

    def _hurried(self, http: httpx.Client, rng: random.Random) -> End:
        number = rng.randrange(len(self._asks))
        ask = speculated(self._asks[number], self._drafts, rng).hurried()
        if rng.random() < 0.5:
            ask = ask.streamed(usage=False)
        end = send(http, ask)
        fault = None if end.how == "late" else fault_of(ask, end, self._alone[number])
        self._record.add("hurried", end, fault)
        return end

    def _unsettled(self, http: httpx.Client, rng: random.Random) -> End:
        ask = speculated(unsettled(rng), self._drafts, rng)
        end = send(http, ask)
        fault = fault_of(ask, end, None)
        if (
            end.how == "text"
            and not 1 <= (end.heard.completion_tokens or 0) <= ask.body["max_tokens"]
        ):
            fault = f"{end.heard.completion_tokens} tokens: {ask.body}"
        self._record.add(ask.kind, end, fault)
        return end

    def refused_all(self, http: httpx.Client) -> None:
        """Every wrong request once, while nobody else asks."""
        for each in self._wrong:
            self._refuse(http, each)

    def _refused(self, http: httpx.Client, rng: random.Random) -> End:
        return self._refuse(http, rng.choice(self._wrong))

    def _refuse(self, http: httpx.Client, each: Wrong) -> End:
        end = send(http, each.ask)
        self._record.add("wrong", end, leniency_of(each, end))
        return end


def fault_of(ask: Ask, end: End, alone: Said | None) -> str | None:
    """What is wrong with the end of a request that is right; None: nothing is."""
    said = end.heard.said()
    told = f"{end.status} {end.error} to {ask.body}"
    if end.how == "text":
        if alone is not None and not said.same(alone):
            return f"{said} and not {alone} to {ask.body}"
        return None
    if end.how == "left":
        if alone is not None and not said.begins(alone):
            return f"{said} is no beginning of {alone} to {ask.body}"
        return None
    if end.how == "busy":
        return None if end.retry_after else f"no Retry-After: {told}"
    return told


def leniency_of(wrong: Wrong, end: End) -> str | None:
    """What is wrong with how a wrong request was refused; None: nothing is."""
    said = f"{end.how} {end.status} {end.error} to {wrong.ask.kind}"
    if (end.how, end.status) != ("refused", wrong.status):
        return said
    names = wrong.field is None or end.error["param"] == wrong.field
    return None if names else f"not for {wrong.field}: {said}"


class Scale(threading.Thread):
    """Weighs the service from time to time, until it is stopped."""

    def __init__(self, service: Service, period_s: float) -> None:
        super().__init__(daemon=True)
        self._service = service
        self._period_s = period_s
        self._over = threading.Event()
        self.samples: list[Counter[str]] = []

    def run(self) -> None:
        while not self._over.wait(self._period_s):
            self.samples.append(self._service.memory())

    def stop(self) -> None:
        self._over.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Memory:
    """Mean bytes in the middle third of the time and in the last one, by kind of process."""

    middle: dict[str, float]
    last: dict[str, float]

    @property
    def growth(self) -> float:
        """Of all together; .01 is a hundredth."""
        return sum(self.last.values()) / sum(self.middle.values()) - 1

    @classmethod
    def of(cls, samples: Sequence[Counter[str]]) -> "Memory":
        third = len(samples) // 3
        assert third, "too short a time to weigh anything thrice"
        return cls(_mean(samples[third : 2 * third]), _mean(samples[2 * third :]))


def _mean(samples: Sequence[Counter[str]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for sample in samples:
        total.update(sample)
    return {kind: size / len(samples) for kind, size in total.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """How it went."""

    plan: Plan
    record: Record
    memory: Memory
    held: tuple[int, int, int]
    """Requests running and waiting, and pages taken, when all clients had gone."""

    @property
    def faults(self) -> list[str]:
        """All that is wrong; empty: nothing is."""
        found = list(self.record.faults)
        if any(self.held):
            found.append(f"still running, waiting, pages: {self.held}")
        if not self.record.drafted:
            found.append("nothing was drafted")
        if self.memory.growth > GROWTH:
            found.append(f"memory grew by {self.memory.growth:.1%}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Seconds, bytes."""
        record = self.record
        return {
            "seconds": self.plan.seconds,
            "clients": self.plan.clients,
            "seed": self.plan.seed,
            "ends": {kind: dict(ends) for kind, ends in sorted(record.ends.items())},
            "tokens": record.tokens,
            "drafted": record.drafted,
            "accepted": record.accepted,
            "latency": {how: _latency(all_) for how, all_ in sorted(record.seconds.items())},
            "memory": {"middle": self.memory.middle, "last": self.memory.last},
            "growth": self.memory.growth,
            "held": self.held,
            "faults": self.faults,
        }

    def table(self) -> str:
        """For people."""
        record, memory = self.record, self.memory
        hows = sorted(record.seconds)
        lines = [f"{'kind':14}" + "".join(f"{how:>9}" for how in hows)]
        for kind, ends in sorted(record.ends.items()):
            lines.append(f"{kind:14}" + "".join(f"{ends[how]:9}" for how in hows))
        slow = {how: _latency(all_) for how, all_ in record.seconds.items()}
        for name in ("median", "worst"):
            lines.append(f"{name + ' s':14}" + "".join(f"{slow[how][name]:9.2f}" for how in hows))
        lines += [
            f"tokens told of {record.tokens}, drafted {record.drafted}, accepted {record.accepted}",
            f"at the end running, waiting, pages: {self.held}",
            "MiB, middle and last third:",
        ]
        for kind in sorted(memory.last, key=lambda kind: -memory.last[kind]):
            before, after = memory.middle.get(kind, 0) / MIB, memory.last[kind] / MIB
            lines.append(f"  {kind:36}{before:9.1f}{after:9.1f}")
        before, after = sum(memory.middle.values()) / MIB, sum(memory.last.values()) / MIB
        lines.append(f"  {'all':36}{before:9.1f}{after:9.1f}  {memory.growth:+.2%}")
        return "\n".join(lines)


def _latency(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": ordered[len(ordered) // 2], "worst": ordered[-1]}


def soak(service: Service, plan: Plan) -> Report:
    """Keeps the service busy as planned, and says how it went."""
    asks, record = catalogue(), Record()
    with service.client() as http:
        drafts = drafts_of(http)
        soaker = Soaker(asks, oracle(http, asks), drafts, record)
        soaker.refused_all(http)
    scale = Scale(service, min(SLOWEST_SAMPLE_S, plan.seconds / SAMPLES))
    scale.start()
    until = time.monotonic() + plan.seconds

    def one(number: int) -> None:
        with service.client() as http:
            soaker.run(http, random.Random(f"{plan.seed}-{number}"), until)

    with ThreadPoolExecutor(plan.clients) as pool:
        list(pool.map(one, range(plan.clients)))
    scale.stop()
    with service.client() as http:
        wait_until(lambda: not any(busy(http)))
        held = busy(http)
    return Report(plan, record, Memory.of(scale.samples), held)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    with interruptible(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = tiny_settings(folder) if args.target == "tiny" else default_settings()
        with Service(settings, folder) as service:
            report = soak(service, Plan(args.seconds, args.clients, args.seed))
    return conclude(report, args.target, args.json)


if __name__ == "__main__":
    sys.exit(main())
