"""The shipped drafts are as often right as they say, on prompts that they were not fitted on."""

from pathlib import Path

import pytest

from bench.decode import Arm, Settings, measure
from bench.reliability import Witness
from deployments.config import DOMAINS
from deployments.pool import find_draft, open_verifier
from deployments.prompt_file import chat_ids, read_prompts
from workers.engine.model_store import DEFAULT_TARGET
from workers.target import TargetSpec

EVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "eval"
PROMPTS, TOKENS = 2, 64
CLOSE = 0.05

pytestmark = [
    pytest.mark.skipif(not EVAL.is_dir(), reason="needs the evaluation prompts, ../shared/data"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hybrids_confidence_is_the_share_accepted(temperature: float) -> None:
    specs = [find_draft("hybrid", target=DEFAULT_TARGET, domain=domain) for domain in DOMAINS]
    witness = Witness()
    target, verifier = open_verifier(TargetSpec(DEFAULT_TARGET), specs, witness)
    prompts = {
        domain: [
            chat_ids(target.tokenizer, text)
            for text in read_prompts(EVAL / f"{domain}.jsonl", PROMPTS).prompts
        ]
        for domain in DOMAINS
    }
    arms = {spec.name: [Arm("hybrid", spec.name)] for spec in specs}
    settings = Settings(TOKENS, budget=32, temperature=temperature)
    results = measure(verifier, prompts, arms, settings, lambda: None, witness)
    together = results[DOMAINS[0]]["hybrid"]
    for domain in DOMAINS[1:]:
        together.merge(results[domain]["hybrid"])
    assert together.reliability.error is not None
    assert together.reliability.error <= CLOSE
