"""How well a draft knows itself: the confidence it gave to nodes beside how often they were right.

A node's confidence is the estimated probability that the whole path down to it is accepted. Among
all nodes of confidence .7, seven of ten should be on the accepted path (Guo et al., "On calibration
of modern neural networks", 2017).
"""

from dataclasses import dataclass, field
from typing import Any

from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal

BINS = 10
"""Of equal width, from 0 to 1."""


@dataclass(slots=True)
class Bin:
    """Verified nodes of about one confidence: how many, the sum of it, and how many accepted."""

    count: int = 0
    confidence: float = 0.0
    accepted: int = 0

    @property
    def mean_confidence(self) -> float | None:
        return self.confidence / self.count if self.count else None

    @property
    def share_accepted(self) -> float | None:
        return self.accepted / self.count if self.count else None


@dataclass(slots=True)
class Reliability:
    """Verified nodes, binned by confidence."""

    bins: list[Bin] = field(default_factory=lambda: [Bin() for _ in range(BINS)])

    def add(self, proposal: Proposal, verdict: Verdict) -> None:
        """Count every node of a proposal: it is accepted when it is on the verdict's path."""
        path = frozenset(verdict.path)
        for node, confidence in enumerate(proposal.confidence):
            own = self.bins[min(int(confidence * BINS), BINS - 1)]
            own.count += 1
            own.confidence += confidence
            own.accepted += node in path

    def merge(self, other: "Reliability") -> None:
        for own, more in zip(self.bins, other.bins, strict=True):
            own.count += more.count
            own.confidence += more.confidence
            own.accepted += more.accepted

    @property
    def error(self) -> float | None:
        """Expected calibration error: the mean over all nodes of how far their bin's mean
        confidence is from the share accepted in it. None without nodes.
        """
        nodes = sum(own.count for own in self.bins)
        gaps = sum(abs(own.confidence - own.accepted) for own in self.bins)
        return gaps / nodes if nodes else None

    def report(self) -> list[dict[str, Any]]:
        """The bins, lowest first; `confidence` and `accepted` are null where there is no node."""
        return [
            {
                "from": number / BINS,
                "to": (number + 1) / BINS,
                "count": own.count,
                "confidence": own.mean_confidence,
                "accepted": own.share_accepted,
            }
            for number, own in enumerate(self.bins)
        ]


class Witness:
    """Hears a verifier's verdicts, as its `on_verdict`, until somebody collects them."""

    def __init__(self) -> None:
        self._heard = Reliability()

    def __call__(self, proposal: Proposal, verdict: Verdict) -> None:
        self._heard.add(proposal, verdict)

    def collect(self) -> Reliability:
        """What was heard since the last call."""
        heard, self._heard = self._heard, Reliability()
        return heard
