"""What the verifier is asked and what it answers, step by step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workers.engine.sampling import SamplingParams
from workers.grammar import GrammarSpec

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What speculation did for one answer. emitted == accepted + recovered + bonus.

    steps: target steps that emitted tokens; drafted: nodes verified in them; tested: positions
    where a guess was made and all before it were right; members: accepted tokens by the draft's
    member that guessed them, where it has several, in the order of their names; resumed: how often
    another verifier went on with it.
    """

    draft: str | None
    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    members: tuple[tuple[str, int], ...] = ()
    resumed: int = 0

    @property
    def emitted(self) -> int:
        return self.accepted + self.recovered + self.bonus

    @property
    def tau(self) -> float:
        """Tokens per target step; 0 before the first."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def alpha(self) -> float | None:
        """Share of tested positions where the guess was right; None when nothing was tested."""
        return self.accepted / self.tested if self.tested else None


def altogether(several: Sequence[SpeculationStats]) -> SpeculationStats:
    """The counts of several answers with the same draft, added up."""
    members: Counter[str] = Counter()
    for stats in several:
        members.update(dict(stats.members))
    counts = ("steps", "drafted", "tested", "accepted", "recovered", "bonus", "resumed")
    sums = {name: sum(getattr(stats, name) for stats in several) for name in counts}
    return SpeculationStats(several[0].draft, members=tuple(sorted(members.items())), **sums)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What there is already of an answer that another verifier began: its tokens, as delivered,
    and what was counted for them.
    """

    tokens: tuple[int, ...]
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to generate.

    prompt: token ids; max_tokens: most tokens of the answer; stop: strings that end it and are not
    part of it; draft: the pool member that guesses, None for plain decoding; budget: most nodes
    per proposal, 0 for plain decoding; adaptive: whether only those are verified that pay;
    stop_tokens: ids that end it beside the target's own ends, and are no text of it; ignore_eos:
    whether the target's own do not end it; min_tokens: how many come before any of these;
    logprobs: how many of the likeliest tokens are told of each, None for nothing at all;
    grammar: what it keeps to, None for nothing;
    group: the same for answers that were asked for together, empty for one by itself;
    trace: the span that it belongs to, as W3C's traceparent; empty where nobody traces it;
    beginning: where to go on from. Only what follows it is delivered; text, counts and draws are
    those of an answer that was never interrupted.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    draft: str | None = None
    budget: int = 0
    adaptive: bool = False
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: GrammarSpec | None = None
    group: str = ""
    trace: str = ""
    beginning: Beginning | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt: is empty; give at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: {self.max_tokens} is not 1 or more")
        if self.budget < 0:
            raise ValueError(f"budget: {self.budget} is not 0 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is not from 0 to {self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every answer at once")

    @property
    def said(self) -> tuple[int, ...]:
        """Tokens of the answer that there are already."""
        return self.beginning.tokens if self.beginning else ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target held a token to be, and which were the likeliest at its place.

    Natural logarithms of the target's own probabilities: before temperature, penalties, bias and
    cuts. top: (token, logprob), likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: for proposals, and from the pass over them until a delta was made."""

    draft_s: float
    verify_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What one target step added to an answer, and what is counted for it so far.

    text may be empty while a possible stop string or a broken character is held back. The last
    delta has the finish reason. logprobs: one for each token, where they were asked for; took: how
    long the step took, where the request is traced.
    """

    text: str
    tokens: tuple[int, ...]
    stats: SpeculationStats
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    took: StepTime | None = None
