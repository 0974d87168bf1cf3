"""One answer as it grows: where it ends, what of it is sent, and what is counted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workers.request import Delta, FinishReason, GenerationRequest, SpeculationStats
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal
from workers.text import Detokenizer, StopMatcher, Tokenizer


class Answer:
    """Takes verdicts, gives deltas.

    A verdict may reach past the answer's end. What lies behind an end-of-sequence token, a complete
    stop string or the length cap is dropped, and counted nowhere. An answer that was begun
    elsewhere is taken up where it was left: of its beginning nothing is given a second time, and
    what was held back of it is still held back.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, eos: frozenset[int]
    ) -> None:
        self._max_tokens = request.max_tokens
        self.ends = frozenset(request.stop_tokens) | (frozenset() if request.ignore_eos else eos)
        """Tokens that end it."""
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(request.stop)
        self.finish_reason: FinishReason | None = None
        self.stats = SpeculationStats(draft=request.draft if request.budget else None)
        if request.beginning:
            self._append(request.beginning.tokens)
            assert self.finish_reason is None, "what is over needs nobody to go on"
            before = request.beginning.stats
            assert before.emitted == len(request.said)
            self.stats = replace(before, resumed=before.resumed + 1)

    @property
    def room(self) -> int:
        """Tokens that may still be added."""
        return self._max_tokens - self.stats.emitted

    def add(self, proposal: Proposal, verdict: Verdict) -> Delta:
        """Append a verdict's tokens, up to the end of the answer."""
        tokens = (*(proposal.tree.tokens[node] for node in verdict.path), verdict.token)
        text, kept = self._append(tokens)
        self._count(proposal, verdict, len(kept))
        if self.finish_reason is None and self.room == 0:
            self.finish_reason = "length"
        if self.finish_reason is None:
            return Delta(text, kept, self.stats)
        return Delta(text + self._flush(), kept, self.stats, self.finish_reason)

    def _append(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text that can be sent, and the tokens that belong to the answer."""
        text = ""
        for count, token in enumerate(tokens[: self.room], start=1):
            if token not in self.ends:
                text += self._matcher.push(self._detokenizer.push(token))
            if token in self.ends or self._matcher.matched:
                self.finish_reason = "stop"
                return text, tuple(tokens[:count])
        return text, tuple(tokens[: self.room])

    def _flush(self) -> str:
        """Text held back. It may still complete a stop string, which changes the finish reason."""
        text = self._matcher.push(self._detokenizer.flush())
        if self._matcher.matched:
            self.finish_reason = "stop"
        return text + self._matcher.flush()

    def _count(self, proposal: Proposal, verdict: Verdict, kept: int) -> None:
        tree, accepted = proposal.tree, min(len(verdict.path), kept)
        whole = kept > len(verdict.path)
        drafted = len(tree) if whole else sum(depth <= kept for depth in tree.depths)
        self.stats = replace(
            self.stats,
            steps=self.stats.steps + 1,
            drafted=self.stats.drafted + drafted,
            tested=self.stats.tested + min(verdict.tested, kept),
            accepted=self.stats.accepted + accepted,
            recovered=self.stats.recovered + (whole and not verdict.bonus),
            bonus=self.stats.bonus + (whole and verdict.bonus),
            members=self._credit(proposal.members, verdict.path[:accepted]),
        )

    def _credit(self, members: Sequence[str], path: Sequence[int]) -> tuple[tuple[str, int], ...]:
        """Accepted tokens by the member that guessed them, those of this step included."""
        counts = Counter(dict(self.stats.members))
        counts.update(members[node] for node in path if members)
        return tuple(sorted(counts.items()))
