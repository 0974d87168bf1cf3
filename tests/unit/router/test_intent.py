"""The committed intent model, on prompts written for this test, and its file."""

import json
from pathlib import Path

import numpy as np
import pytest

from router.fingerprint import MEANING_DIM, MiniLMFingerprinter
from router.intent import FEATURES, MODEL_PATH, IntentModel, features, script_features

PROMPTS = {
    "code": (
        "Write a Python function that returns the longest word in a list.",
        "Write a bash command that counts the lines of all .txt files below here.",
        "Fix this: for i in range(10) print(i)",
        "for (int i = 0; i < n; i++) { total += a[i]; }",
        "def median(values: list[float]) -> float:\n    '''The middle value.'''\n",
    ),
    "math": (
        "Ann has 12 apples and eats 3 a day. How many are left after 2 days?",
        "Solve $x^2 - 5x + 6 = 0$ for x.",
        "A train covers 180 km in 2.5 hours. What is its average speed in km per hour?",
    ),
    "zh": (
        "写一封感谢信给我的老师。",
        "你好",
        "中国最长的河是哪一条？",
        "请把下面的话翻译成中文：Good morning, how are you?",
    ),
    "en": (
        "Why do cats purr?",
        "Write a short letter thanking my teacher.",
        "Who wrote Hamlet, and when was it first performed?",
    ),
}


@pytest.fixture(scope="module")
def model() -> IntentModel:
    return IntentModel.load()


@pytest.mark.parametrize("label", PROMPTS)
def test_plain_cases_are_told_apart(
    label: str, model: IntentModel, minilm: MiniLMFingerprinter
) -> None:
    for text in PROMPTS[label]:
        intent = model.classify(text, minilm.embed(text).vector)
        assert intent.label == label, text
        assert intent.probability >= 0.6, text


def test_it_does_at_least_as_well_as_its_card_promises(
    model: IntentModel, minilm: MiniLMFingerprinter
) -> None:
    folder = Path(__file__).parents[4] / "shared" / "data" / "eval"
    if not folder.is_dir():
        pytest.skip("the evaluation prompts are not beside this checkout")
    for label, floor in (("code", 0.95), ("math", 0.95), ("en", 0.8), ("zh", 0.9)):
        lines = (folder / f"{label}.jsonl").read_text(encoding="utf-8").split("\n")[:-1:8]
        prompts = [json.loads(line)["prompt"][:2000] for line in lines]
        right = [model.classify(p, minilm.embed(p).vector).label == label for p in prompts]
        assert sum(right) / len(right) >= floor, label


@pytest.mark.parametrize("text", ["", " ", "🙂" * 50, "\x00", "{}" * 5000])
def test_any_text_gets_a_probability(text: str, model: IntentModel) -> None:
    nothing = np.zeros(MEANING_DIM, np.float32)
    intent = model.classify(text, nothing)
    assert intent.label in model.labels
    assert 0.25 <= intent.probability <= 1


def test_features_count_what_they_name() -> None:
    found = dict(zip(FEATURES, script_features("  a_b(1 + 2) 中文"), strict=True))
    assert found["han share of characters"] == pytest.approx(2 / 15)
    assert found["any han"] == 1
    assert found["numbers, log"] == pytest.approx(np.log(3))
    assert found["arithmetic, log"] == pytest.approx(np.log(2))
    assert found["indented lines, log"] == pytest.approx(np.log(2))
    assert found["latex, log"] == 0
    assert len(features("x", np.ones(512, np.float32))) == len(FEATURES) + MEANING_DIM


def test_saving_and_loading_changes_no_answer(
    model: IntentModel, minilm: MiniLMFingerprinter, tmp_path: Path
) -> None:
    model.save(tmp_path / "model.json")
    loaded = IntentModel.load(tmp_path / "model.json")
    for text in (text for texts in PROMPTS.values() for text in texts):
        vector = minilm.embed(text).vector
        assert loaded.classify(text, vector) == model.classify(text, vector)


def test_a_model_of_other_features_is_refused(tmp_path: Path) -> None:
    stored = json.loads(MODEL_PATH.read_text(encoding="utf-8"))
    stored["features"] = stored["features"][:-1]
    (tmp_path / "old.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match="fit_intent"):
        IntentModel.load(tmp_path / "old.json")
