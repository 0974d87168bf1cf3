"""What goes into the router and what comes out of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PLAIN = "none"
"""The name under which plain decoding is recorded; also what a request asks for it by."""

Reason = Literal["similar", "intent", "default"]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A prompt as the router sees it: the last thing asked, and what stood before it."""

    query: str
    context: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member of the pool: its name, the domain it was made for (None: any), its kind."""

    name: str
    domain: str | None
    kind: str


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The draft to use (None: decode plainly) and why.

    `detail` is one sentence with the numbers behind the choice. `fingerprint` is opaque: hand it
    back in the `Outcome`. It carries the embedding itself (some 700 characters), so any replica of
    the router can record the outcome of any other's decision, and none remembers open requests.
    """

    draft: str | None
    reason: Reason
    detail: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request went: measured speed, acceptance (None: nothing was tested), tokens per step.

    Raises:
        ValueError: for numbers that no request can have measured.
    """

    fingerprint: str
    draft: str | None
    tokens_per_second: float
    alpha: float | None
    tau: float
    tokens: int

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "tau", "tokens"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is a share, between 0 and 1, not {self.alpha}")


def check_pool(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The pool, if its names can be told apart.

    Raises:
        ValueError: for a name used twice, or one that means something else in a request.
    """
    seen: set[str] = set()
    for candidate in candidates:
        if candidate.name in {PLAIN, "auto", ""}:
            raise ValueError(f"a draft cannot be named {candidate.name!r}: requests use that word")
        if candidate.name in seen:
            raise ValueError(f"two drafts are named {candidate.name!r}: rename one of them")
        seen.add(candidate.name)
    return tuple(candidates)
