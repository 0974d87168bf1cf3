"""The arithmetic of calibration, and that a verifier's every verdict is heard."""

import pytest

from bench.reliability import BINS, Reliability, Witness
from tests.table_target import TableTarget
from workers.completion import run_requests
from workers.draft import InlineDraft
from workers.engine.sampling import SamplingParams
from workers.hybrid_draft import HybridDraft
from workers.ngram_member import NgramMember
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.speculation.acceptance import Verdict
from workers.speculation.tree import Proposal, TokenTree
from workers.verifier import build_verifier

# Two siblings, and two below the first of them.
TREE = TokenTree((4, 5, 6, 7), (-1, -1, 0, 0))


def verdict(*path: int) -> Verdict:
    return Verdict(path, token=9, bonus=False, tested=len(path) + 1)


def heard(*confidence: float, path: tuple[int, ...]) -> Reliability:
    made = Reliability()
    made.add(Proposal(TREE, confidence), verdict(*path))
    return made


def test_a_node_is_accepted_when_it_is_on_the_path() -> None:
    report = heard(0.72, 0.21, 0.55, 0.05, path=(0, 2)).report()
    assert [row["count"] for row in report] == [1, 0, 1, 0, 0, 1, 0, 1, 0, 0]
    assert [row["accepted"] for row in report if row["count"]] == [0, 0, 1, 1]
    assert [row["confidence"] for row in report if row["count"]] == [0.05, 0.21, 0.55, 0.72]
    assert (report[1]["confidence"], report[1]["accepted"]) == (None, None)
    assert [(row["from"], row["to"]) for row in report][:2] == [(0.0, 0.1), (0.1, 0.2)]


def test_certainty_is_in_the_last_bin_and_a_bins_lower_edge_belongs_to_it() -> None:
    report = heard(1.0, 0.0, 0.5, 0.5, path=()).report()
    assert [row["count"] for row in report] == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]


def test_the_error_is_the_mean_gap_weighted_by_nodes() -> None:
    # Bins 9 and 1: of two nodes at .9 one is right, of two at .1 none.
    found = heard(0.9, 0.1, 0.9, 0.1, path=(0,))
    assert found.error == pytest.approx((2 * abs(0.9 - 0.5) + 2 * 0.1) / 4)
    assert Reliability().error is None


def test_gaps_of_opposite_sign_do_not_cancel_between_bins() -> None:
    assert heard(0.95, 0.15, 0.15, 0.95, path=(1,)).error == pytest.approx((0.95 * 2 + 0.7) / 4)


def test_merging_is_counting_all_together() -> None:
    whole = heard(0.9, 0.1, 0.9, 0.1, path=(0,))
    other = heard(0.9, 0.5, 0.3, 0.1, path=(0, 2))
    whole.merge(other)
    assert sum(row["count"] for row in whole.report()) == 8
    assert whole.report()[9]["accepted"] == 2 / 3
    assert sum(row["count"] for row in other.report()) == 4, "the other is as it was"


def test_a_witness_is_collected_from_anew_each_time() -> None:
    witness = Witness()
    witness(Proposal(TREE, (0.5,) * 4), verdict(0))
    assert sum(own.count for own in witness.collect().bins) == 4
    assert sum(own.count for own in witness.collect().bins) == 0


def test_a_witness_hears_what_the_verifier_counts() -> None:
    """Nodes and accepted nodes of one answer, by the verifier's own statistics."""
    heard: list[tuple[Proposal, Verdict]] = []
    witness = Witness()

    def on_verdict(proposal: Proposal, verdict: Verdict) -> None:
        heard.append((proposal, verdict))
        witness(proposal, verdict)

    draft = HybridDraft("suffix", NgramMember(None), None)
    verifier = build_verifier(
        TableTarget(),  # type: ignore[arg-type]
        {"suffix": InlineDraft(draft)},
        Limits(max_running=1),
        on_verdict=on_verdict,
    )
    prompt = (1, 2, 1, 2, 1, 2, 3, 4, 1, 2)
    sampling = SamplingParams(seed=5, temperature=1.0)
    request = GenerationRequest("r", prompt, 40, sampling, draft="suffix", budget=6)
    stats = run_requests(verifier, [request]).completions[0].stats
    assert stats is not None
    assert len(heard) == stats.steps
    assert any(len(proposal.tree) == 0 for proposal, _ in heard), "plain steps are heard of too"
    # The last verdict may reach past the answer's end, where the statistics stop counting.
    last = len(heard[-1][0].tree), len(heard[-1][1].path)
    bins = witness.collect().bins
    assert len(bins) == BINS
    assert 0 <= sum(own.count for own in bins) - stats.drafted <= last[0]
    assert 0 <= sum(own.accepted for own in bins) - stats.accepted <= last[1]
    assert stats.accepted > 0
