"""Texts follow the target's law also where the draft that reads hidden states is an actor."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from deployments.draft_actor import DraftWorker, RayDraft
from tests.eagles import LAYERS, save_hybrid, tiny_eagle
from tests.text_law import LENGTH, SIGNIFICANCE, VOCABULARY, p_value, six_tokens, text_law
from tests.tiny import one_thread
from workers.completion import run_requests
from workers.draft import DraftKind, DraftSpec
from workers.engine.sampling import SamplingParams
from workers.engine.vocabulary import vocabulary_of
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import TargetSpec, load_target
from workers.training.ngram_table import NgramTable
from workers.verifier import build_verifier

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
SEEDS, TOGETHER = 2000, 256
COMPILING_S = 300  # at most; who first loads a draft waits, a minute where others use the CPU too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_tokens(tmp_path_factory.mktemp("six") / "target", seed=0)


@pytest.mark.timeout(2 * COMPILING_S)
@pytest.mark.parametrize("kind", ["eagle", "hybrid"])
def test_texts_follow_the_target(
    cluster: int, folder: Path, tmp_path: Path, kind: DraftKind
) -> None:
    model = tiny_eagle(folder, vocabulary=torch.arange(1, VOCABULARY))
    table = NgramTable.build([[1, 2, 3, 4]], vocabulary_of(folder), {})
    save_hybrid(model, table, tmp_path, folder)
    path = tmp_path if kind == "hybrid" else tmp_path / "eagle"
    spec = DraftSpec("draft", kind, path=str(path))
    worker: Any = ray.remote(DraftWorker)
    actor = worker.remote(spec, folder, "float32", 1)
    draft = RayDraft("draft", actor)
    draft.loading.result(COMPILING_S)
    with one_thread():
        loaded = load_target(
            TargetSpec(
                str(folder),
                dtype="float32",
                kv_tokens=32 * TOGETHER,
                threads=1,
                feature_layers=LAYERS,
            )
        )
        limits = Limits(
            max_running=TOGETHER,
            max_queued=TOGETHER,
            prefill_tokens=TOGETHER * len(PROMPT),
            draft_timeout_s=60,
        )
        verifier = build_verifier(loaded, {"draft": draft}, limits, [spec])
        requests = (
            GenerationRequest(
                str(seed), PROMPT, LENGTH, SamplingParams(seed=seed), draft="draft", budget=6
            )
            for seed in range(SEEDS)
        )
        run = run_requests(verifier, requests, together=TOGETHER)
    ray.kill(actor)
    assert verifier.gauges().draft_faults == {}
    assert run.total("accepted") > SEEDS / 10
    assert run.total("recovered") > SEEDS / 10
    seen = Counter(tuple(completion.tokens) for completion in run.completions)
    assert p_value(seen, text_law(folder, PROMPT)) > SIGNIFICANCE
