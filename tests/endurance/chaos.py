"""A fault every so often under load, and what each of them costs.

    python -m tests.endurance.chaos --seconds 600 [--target default] [--ranks 1] [--json OUT]

Starts a server of its own. Clients ask for answers whose texts are known while a random process is
killed, or frozen for a while. Every request ends with its whole text or with an explicit error. A
client that could not be served (no connection, or 503) asks again, for two minutes at most; a
stream that broke in the middle is an explicit error and stays one.

A fault's recovery time is that until every draft saves as many steps as before, for the same
prompt, and the router chooses one again: from the kill, or from the end of the freeze. The next
fault comes after that, and no sooner than the period says. Exit code 1, and the reasons, when a
text differed, fewer than 99 of 100 requests got theirs, or a fault was not recovered from.
"""

import argparse
import itertools
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.endurance.client import End, Said, drafts_of, oracle, send
from tests.endurance.requests import COMPLETION, Ask, catalogue, speculated
from tests.endurance.service import Service, default_settings, interruptible, tiny_settings
from tests.endurance.verdict import conclude
from tests.serving import RESTART_S, wait_until

SERVED = 0.99
"""The share of requests that get their text."""

AGAIN_AFTER_S = 0.5
TRIES_S = 120.0
"""How long a client goes on asking a server that it cannot reach."""

RECOVERY_S = 2 * RESTART_S
FROZEN_S = 5.0
PROBE_EVERY_S = 0.2
SLACK = 1.2
"""A probe's steps, of those before: answers that meet a late draft take a few more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of the processes whose title begins so is killed; or frozen for so many seconds."""

    name: str
    title: str
    frozen_s: float | None = None

    def strike(self, service: Service, rng: random.Random) -> tuple[float, int]:
        """When it was over, on the monotonic clock, and whom it hit.

        Raises:
            RuntimeError: there is no such process.
        """
        victims = sorted(service.find(self.title))
        if not victims:
            raise RuntimeError(f"{self.name}: no process {self.title}")
        victim = rng.choice(victims)
        if self.frozen_s is None:
            os.kill(victim, signal.SIGKILL)
        else:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(self.frozen_s)
            os.kill(victim, signal.SIGCONT)
        return time.monotonic(), victim


DRAFT, VALKEY = "ray::DraftWorker", "valkey-server"
CHEAP = (
    Fault("draft killed", DRAFT),
    Fault("draft frozen", DRAFT, FROZEN_S),
    Fault("router killed", "ray::ServeReplica:outrider:DraftRouter"),
    Fault("valkey killed", VALKEY),
    Fault("valkey frozen", VALKEY, FROZEN_S),
)
"""Those that are over in seconds."""

DEAR = (
    Fault("verifier killed", "ray::ServeReplica:outrider:Verifier"),
    Fault("proxy killed", "ray::ProxyActor"),
)
RANK = Fault("rank killed", "ray::TargetRank")


@dataclass(frozen=True, slots=True)
class Plan:
    """Faults in random order, each of them before any comes again, until the time is over or they
    came so often; the seed of their order and of what clients ask."""

    faults: tuple[Fault, ...]
    seconds: float = math.inf
    rounds: int | None = None
    period_s: float = 20.0
    clients: int = 8
    seed: int = 0

    def order(self, rng: random.Random) -> Iterator[Fault]:
        """All faults, round by round."""
        for _ in itertools.count() if self.rounds is None else range(self.rounds):
            yield from rng.sample(self.faults, len(self.faults))


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault, when it came, and how long it took until all was as before; None: it never was."""

    fault: str
    at_s: float
    recovery_s: float | None


@dataclass(slots=True)
class Record:
    """What clients saw, written by all of them."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    asked_again: int = 0
    worst_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, ask: Ask, end: End, alone: Said, tries: int) -> None:
        with self.lock:
            self.ends[end.how] += 1
            self.asked_again += tries > 1
            self.worst_s = max(self.worst_s, end.seconds)
            if end.how != "text":
                self.errors[str(end.error.get("message"))[:120]] += 1
            elif not end.heard.said().same(alone):
                self.wrong.append(f"{end.heard.said()} and not {alone} to {ask.body}")


class Client:
    """Asks one thing after the other until it is told to stop."""

    def __init__(
        self,
        asks: Sequence[Ask],
        alone: Sequence[Said],
        drafts: Sequence[str],
        record: Record,
        over: threading.Event,
    ) -> None:
        self._asks = asks
        self._alone = alone
        self._drafts = drafts
        self._record = record
        self._over = over

    def run(self, http: httpx.Client, rng: random.Random) -> None:
        while not self._over.is_set():
            number = rng.randrange(len(self._asks))
            ask = speculated(self._asks[number], self._drafts, rng)
            if rng.random() < 0.5:
                ask = ask.streamed(usage=True)
            end, tries = patiently(http, ask)
            self._record.add(ask, end, self._alone[number], tries)


def patiently(http: httpx.Client, ask: Ask) -> tuple[End, int]:
    """The end, and how often it took asking. Only what has not begun is asked for again."""
    deadline, tries = time.monotonic() + TRIES_S, 1
    while True:
        end = send(http, ask)
        begun = bool(end.heard.texts)
        if end.how not in ("busy", "broken") or begun or time.monotonic() > deadline:
            return end, tries
        time.sleep(float(end.retry_after or AGAIN_AFTER_S))
        tries += 1


class Probe:
    """Whether speculation is what it was when this was made."""

    def __init__(self, service: Service, drafts: Sequence[str]) -> None:
        self._service = service
        ask = Ask("probe", COMPLETION, {"prompt": "the king and the", "max_tokens": 24})
        settled = {**ask.body, "temperature": 0, "ignore_eos": True}
        self._asks = [Ask("probe", COMPLETION, settled).drafted(each, 4) for each in drafts]
        self._auto = Ask("probe", COMPLETION, settled).drafted("auto", 4)
        self._before = [self._steps(ask) for ask in self._asks]
        if None in self._before:
            raise RuntimeError(f"not all drafts work before anything happens: {self._before}")

    def passes(self) -> bool:
        """Asks for all of it at once."""
        with ThreadPoolExecutor(len(self._asks) + 1) as pool:
            routed = pool.submit(self._steps, self._auto)
            now = list(pool.map(self._steps, self._asks))
        return routed.result() is not None and all(
            steps is not None and before is not None and steps <= SLACK * before
            for steps, before in zip(now, self._before, strict=True)
        )

    def _steps(self, ask: Ask) -> int | None:
        """None: not answered, or without a draft."""
        with self._service.client() as http:
            end = send(http, ask)
        told = end.heard.speculation
        drafted = end.how == "text" and told["draft"] is not None and told["drafted"] > 0
        return told["steps"] if drafted else None


@dataclass(frozen=True, slots=True)
class Report:
    """How it went."""

    plan: Plan
    record: Record
    struck: tuple[Struck, ...]
    undisturbed_s: float
    """What a probe takes under load when nothing is wrong: no recovery time can be shorter."""

    @property
    def served(self) -> float:
        """The share of requests that got their text."""
        return self.record.ends["text"] / self.record.ends.total()

    @property
    def recovery(self) -> dict[str, list[float]]:
        """Seconds by fault."""
        found: dict[str, list[float]] = defaultdict(list)
        for each in self.struck:
            if each.recovery_s is not None:
                found[each.fault].append(each.recovery_s)
        return dict(found)

    @property
    def faults(self) -> list[str]:
        """All that is wrong; empty: nothing is."""
        found = list(self.record.wrong)
        found += [f"{one.fault}: not recovered" for one in self.struck if one.recovery_s is None]
        if self.served < SERVED:
            found.append(f"only {self.served:.2%} got their text: {self.record.errors}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Seconds."""
        return {
            "seconds": self.plan.seconds,
            "period_s": self.plan.period_s,
            "clients": self.plan.clients,
            "seed": self.plan.seed,
            "ends": dict(self.record.ends),
            "errors": dict(self.record.errors),
            "asked_again": self.record.asked_again,
            "worst_s": self.record.worst_s,
            "served": self.served,
            "undisturbed_s": self.undisturbed_s,
            "struck": [asdict(each) for each in self.struck],
            "faults": self.faults,
        }

    def table(self) -> str:
        """For people."""
        record = self.record
        lines = [f"{'fault':18}{'times':>6}{'median s':>10}{'worst s':>9}"]
        for fault, seconds in sorted(self.recovery.items()):
            median = sorted(seconds)[len(seconds) // 2]
            lines.append(f"{fault:18}{len(seconds):6}{median:10.1f}{max(seconds):9.1f}")
        ends = ", ".join(f"{how} {count}" for how, count in sorted(record.ends.items()))
        lines.append(f"requests: {ends}; {self.served:.2%} with their text")
        lines.append(f"a probe without a fault takes {self.undisturbed_s:.1f} s")
        lines.append(f"asked more than once: {record.asked_again}; slowest {record.worst_s:.1f} s")
        lines += [f"  {count} x {message}" for message, count in record.errors.most_common(5)]
        return "\n".join(lines)


def chaos(service: Service, plan: Plan) -> Report:
    """Strikes as planned, under load, and says how it went."""
    asks, record, over = catalogue(), Record(), threading.Event()
    with service.client() as http:
        drafts = drafts_of(http)
        client = Client(asks, oracle(http, asks), drafts, record, over)
    probe = Probe(service, drafts)

    def one(number: int) -> None:
        with service.client() as http:
            client.run(http, random.Random(f"{plan.seed}-{number}"))

    with ThreadPoolExecutor(plan.clients) as pool:
        running = [pool.submit(one, number) for number in range(plan.clients)]
        try:
            undisturbed_s = _seconds(probe.passes)
            struck = strikes(service, plan, probe.passes)
        finally:
            over.set()
        for each in running:
            each.result()
    return Report(plan, record, tuple(struck), undisturbed_s)


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def strikes(service: Service, plan: Plan, recovered: Callable[[], bool]) -> list[Struck]:
    """One fault after the other, each when the one before it is over."""
    rng, began, struck = random.Random(plan.seed), time.monotonic(), []
    for fault in plan.order(rng):
        if (at := time.monotonic()) - began > plan.seconds:
            break
        over, victim = fault.strike(service, rng)
        replaced = fault.frozen_s is not None or wait_until(
            lambda fault=fault, victim=victim: set(service.find(fault.title)) - {victim} != set(),
            RECOVERY_S,
        )
        back = replaced and wait_until(recovered, RECOVERY_S)
        took = time.monotonic() - over
        struck.append(Struck(fault.name, at - began, took if back else None))
        print(f"{fault.name}: {took:.1f} s" if back else f"{fault.name}: lost", flush=True)
        if not back:
            break
        time.sleep(max(0.0, at + plan.period_s - time.monotonic()))
    return struck


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--period", type=float, default=20, help="seconds between faults, at least")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=("tiny", "default"), default="tiny")
    parser.add_argument("--ranks", type=int, default=2, help="of the target; 1: no rank is killed")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    faults = (*CHEAP, *DEAR, *((RANK,) if args.ranks > 1 else ()))
    plan = Plan(faults, args.seconds, None, args.period, args.clients, args.seed)
    with interruptible(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = args.target == "tiny"
        settings = tiny_settings(folder, args.ranks) if tiny else default_settings(args.ranks)
        with Service(settings, folder) as service:
            report = chaos(service, plan)
    return conclude(report, args.target, args.json)


if __name__ == "__main__":
    sys.exit(main())
