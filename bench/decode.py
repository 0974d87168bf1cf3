"""Decoding side by side: the same prompts through several arms, each in turn, in one run.

The arms take turns prompt by prompt, so that a machine that slows down slows them all.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from bench.reliability import Reliability, Witness
from workers.budget import Budget, spending
from workers.completion import Run, run_requests
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest
from workers.verifier import Verifier

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Arm:
    """How to decode: `draft` names a pool member, None for plain decoding."""

    name: str
    draft: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """What all arms share. The seed of prompt number i is `seed` + i."""

    max_tokens: int
    budget: Budget
    temperature: float
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """One arm over some prompts."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    tested: int = 0
    accepted: int = 0
    members: Counter[str] = field(default_factory=Counter)
    reliability: Reliability = field(default_factory=Reliability)
    texts: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        self.seconds += run.seconds
        self.tokens += run.tokens
        self.steps += run.total("steps")
        self.tested += run.total("tested")
        self.accepted += run.total("accepted")
        for completion in run.completions:
            assert completion.stats is not None, "a run is over when its answers are"
            self.members.update(dict(completion.stats.members))
        self.texts.extend(completion.text for completion in run.completions)

    def merge(self, other: "Tally") -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.steps += other.steps
        self.tested += other.tested
        self.accepted += other.accepted
        self.members.update(other.members)
        self.reliability.merge(other.reliability)
        self.texts.extend(other.texts)

    def report(self, plain: "Tally | None") -> dict[str, Any]:
        """tokens_per_second counts prefill; speedup and exact_match are against `plain`; members
        are accepted tokens by the draft's member that guessed them; reliability has its bins.
        """
        speed = self.tokens / self.seconds
        same = None
        if plain is not None:
            pairs = zip(self.texts, plain.texts, strict=True)
            same = sum(ours == theirs for ours, theirs in pairs) / len(self.texts)
        return {
            "tokens_per_second": speed,
            "tau": self.tokens / self.steps,
            "alpha": self.accepted / self.tested if self.tested else None,
            "speedup": None if plain is None else speed / (plain.tokens / plain.seconds),
            "exact_match": same,
            "calibration_error": self.reliability.error,
            "members": dict(sorted(self.members.items())),
            "reliability": self.reliability.report(),
        }


Results = dict[str, dict[str, Tally]]


def measure(
    verifier: Verifier,
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
    arms: Mapping[str, Sequence[Arm]],
    settings: Settings,
    on_prompt: Callable[[], object],
    witness: Witness | None = None,
) -> Results:
    """Tallies by domain and arm.

    prompts: token ids by domain; arms: by domain; witness: the verifier's `on_verdict`, without
    which nothing is known of calibration.
    """
    numbers = count()
    witness = witness or Witness()
    results: Results = {}
    for domain, encoded in prompts.items():
        tallies = results[domain] = {arm.name: Tally() for arm in arms[domain]}
        _warm_up(verifier, encoded[0], arms[domain], settings)
        witness.collect()
        for seed, ids in enumerate(encoded, start=settings.seed):
            for arm in arms[domain]:
                request = request_of(f"{next(numbers)}", ids, arm, settings, seed)
                tallies[arm.name].add(run_cold(verifier, request))
                tallies[arm.name].reliability.merge(witness.collect())
            on_prompt()
    return results


def _warm_up(
    verifier: Verifier, ids: tuple[int, ...], arms: Sequence[Arm], settings: Settings
) -> None:
    """The first passes pay for caches and threads; nobody's number should."""
    short = replace(settings, max_tokens=min(8, settings.max_tokens))
    for arm in arms:
        run_cold(verifier, request_of(f"warm-up {arm.name}", ids, arm, short, 0))


def run_cold(verifier: Verifier, request: GenerationRequest) -> Run:
    """Run one request alone, which reads all of its prompt, whoever read it before."""
    verifier.forget_prefixes()
    return run_requests(verifier, [request])


def request_of(
    name: str, ids: tuple[int, ...], arm: Arm, settings: Settings, seed: int
) -> GenerationRequest:
    """One prompt for one arm."""
    budget, adaptive = spending(settings.budget if arm.draft else 0)
    return GenerationRequest(
        id=name,
        prompt=ids,
        max_tokens=settings.max_tokens,
        sampling=SamplingParams(seed=seed, temperature=settings.temperature),
        draft=arm.draft,
        budget=budget,
        adaptive=adaptive,
    )


def summarise(results: Results) -> dict[str, Any]:
    """`arms.<arm>.{tokens_per_second, tau, alpha, speedup, exact_match, calibration_error, members,
    reliability}`, and the same under `domains.<domain>.<arm>`."""
    whole: dict[str, Tally] = {}
    for tallies in results.values():
        for name, tally in tallies.items():
            whole.setdefault(name, Tally()).merge(tally)
    return {
        "arms": _reports(whole),
        "domains": {domain: _reports(tallies) for domain, tallies in results.items()},
    }


def _reports(tallies: Mapping[str, Tally]) -> dict[str, dict[str, Any]]:
    plain = tallies.get(PLAIN)
    return {name: tally.report(plain) for name, tally in tallies.items()}


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people. ece is the calibration error."""
    rows = [
        (domain, name, row)
        for domain, reports in [*summary["domains"].items(), ("all", summary["arms"])]
        for name, row in reports.items()
    ]
    wide = max(10, *(len(domain) + 2 for domain, _, _ in rows))
    wider = max(12, *(len(name) + 2 for _, name, _ in rows))
    head = f"{'tokens/s':>10}{'tau':>7}{'alpha':>7}{'speed-up':>10}{'same':>7}{'ece':>7}"
    lines = [f"{'domain':<{wide}}{'arm':<{wider}}{head}"]
    lines += [f"{domain:<{wide}}{name:<{wider}}{_numbers(row)}" for domain, name, row in rows]
    return "\n".join(lines)


def _numbers(row: Mapping[str, Any]) -> str:
    return (
        f"{row['tokens_per_second']:>10.1f}{row['tau']:>7.2f}{cell(row['alpha']):>7}"
        f"{cell(row['speedup']):>10}{cell(row['exact_match']):>7}"
        f"{cell(row['calibration_error'], 3):>7}"
    )


def cell(value: float | None, digits: int = 2) -> str:
    """A number that may be missing, in a table."""
    return "-" if value is None else f"{value:.{digits}f}"
