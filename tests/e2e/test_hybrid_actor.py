"""Drafts that read hidden states, in processes of their own: the states travel, the text stays."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from tests.eagles import easy_target, guessing_eagle, save_hybrid, some_tokens
from tests.serving import processes, text_of, wait_until
from workers.engine.vocabulary import vocabulary_of
from workers.training.ngram_table import NgramTable

ASK = {"prompt": "the thing and the other thing and the", "logit_bias": {"0": -100}}
WORKER = "ray::DraftWorker"


@pytest.fixture(scope="module")
def server(
    deploy: Callable[..., str],
    settings: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    root = tmp_path_factory.mktemp("hybrid")
    model, folder = easy_target(root / "target"), root / "draft"
    table = NgramTable.build([some_tokens(40)], vocabulary_of(model), {})
    save_hybrid(guessing_eagle(model), table, folder, model)
    before = len(processes(WORKER))
    drafts = [
        {"name": "hybrid", "kind": "hybrid", "path": str(folder), "placement": "actor"},
        {"name": "eagle", "kind": "eagle", "path": str(folder / "eagle"), "placement": "actor"},
    ]
    limits = {**settings["limits"], "prefill_tokens": 5}
    target = {**settings["target"], "model": str(model)}
    yield deploy({**settings, "target": target, "drafts": drafts, "limits": limits}, "hybrid")
    serve.delete("hybrid")
    assert wait_until(lambda: len(processes(WORKER)) == before)


def ask(url: str, draft: str, sampling: dict[str, Any]) -> dict[str, Any]:
    wish = {"draft": draft, "budget": 8}
    body = {**ASK, **sampling, "max_tokens": 60, "speculation": wish}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


@pytest.mark.parametrize("draft", ["hybrid", "eagle"])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
def test_a_draft_that_reads_hidden_states_may_live_elsewhere(
    server: str, draft: str, sampling: dict[str, Any]
) -> None:
    """An eagle without them would guess nothing, and with others' hardly anything right."""
    plain, said = (ask(server, name, sampling) for name in ("none", draft))
    assert text_of(said) == text_of(plain)
    told = said["speculation"]
    assert told["drafted"] > 20
    assert told["accepted"] > 5
    health = httpx.get(f"{server}/health", timeout=60).json()["verifier"]
    assert health["draft_faults"] == {}
    assert set(health["drafts"].values()) == {"ready"}
