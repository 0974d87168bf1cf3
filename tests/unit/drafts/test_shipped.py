"""The drafts in the repository: made for the default target, small, and described."""

import json
from pathlib import Path

import pytest

from deployments.config import DOMAINS, SHIPPED_DRAFTS
from workers.draft import DraftSpec
from workers.engine.model_store import DEFAULT_TARGET, resolve
from workers.load_draft import load_draft
from workers.training.ngram_table import TOKENS

MB = 1_000_000


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_shipped_draft_loads_for_the_default_target(domain: str) -> None:
    spec = DraftSpec(domain, "hybrid", path=str(SHIPPED_DRAFTS / domain))
    assert load_draft(spec, resolve(DEFAULT_TARGET)).name == domain


def test_they_are_small() -> None:
    for domain in DOMAINS:
        assert (SHIPPED_DRAFTS / domain / "eagle" / "model.safetensors").stat().st_size <= 10 * MB
        assert (SHIPPED_DRAFTS / domain / "ngram" / TOKENS).stat().st_size <= 5 * MB
    assert size(SHIPPED_DRAFTS) <= 50 * MB


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_card_says_what_it_is_made_of_and_how_good_it_is(domain: str) -> None:
    folder = SHIPPED_DRAFTS / domain
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert (card["domain"], card["kind"]) == (domain, "hybrid")
    assert card["target"]["name"] == DEFAULT_TARGET
    assert "(" in card["prompts"], "sources with their licences"
    assert not (folder / "held_out.jsonl").exists(), "prompts are not ours to publish"
    for arms in card["measured"].values():
        members = [arms[name]["tau"] for name in ("ngram", "eagle")]
        assert arms["hybrid"]["tau"] > max(members)
        assert arms["hybrid"]["calibration_error"] < 0.05
    assert card["prompts"] in (folder / "README.md").read_text(encoding="utf-8")
