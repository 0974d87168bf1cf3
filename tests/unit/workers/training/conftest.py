"""Texts to learn from, as the teacher leaves them, made once a session."""

from pathlib import Path

import pytest

from tests.eagles import LAYERS, easy_target, some_tokens
from tests.tiny import one_thread
from workers.completion import run_requests
from workers.engine.sampling import SamplingParams
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import TargetSpec, load_target
from workers.training.corpus import TargetAnswer
from workers.training.teacher import TeacherText, taught, teach
from workers.verifier import build_verifier

TOGETHER = 36


@pytest.fixture(scope="session")
def easy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target about which something can be learned in a second. Read only."""
    return easy_target(tmp_path_factory.mktemp("models") / "easy")


@pytest.fixture(scope="session")
def texts(easy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TeacherText]:
    """What it said to some prompts of 5 to 10 tokens, in 4 to 15 tokens each."""
    with one_thread():
        target = load_target(
            TargetSpec(
                str(easy_folder), "float32", kv_tokens=4096, threads=1, feature_layers=LAYERS
            )
        )
        asked = [
            GenerationRequest(
                id=str(number),
                prompt=some_tokens(5 + number % 6, number),
                max_tokens=4 + number % 12,
                sampling=SamplingParams(seed=number, temperature=number % 2 * 0.8),
            )
            for number in range(TOGETHER)
        ]
        verifier = build_verifier(target, {}, Limits(max_running=TOGETHER, prefill_tokens=1000))
        run = run_requests(verifier, asked, together=TOGETHER)
        answers = [
            TargetAnswer(
                number,
                False,
                done.request.sampling.temperature,
                done.request.prompt,
                (*done.tokens,),
            )
            for number, done in enumerate(run.completions)
        ]
        folder = tmp_path_factory.mktemp("taught")
        teach(target, answers, folder)
    return taught(folder)
