"""Fitting, on a handful of prompts written here."""

import json
from pathlib import Path

import pytest

from router.fingerprint import MiniLMFingerprinter
from router.fit_intent import (
    LABELS,
    OTHER,
    SNIPPET_LINES,
    by_label,
    describe,
    fit,
    main,
    pasted_code,
    read_examples,
)
from router.intent import IntentModel

TEXTS = {
    "code": "Write a function that returns item {} of a list.",
    "en": "Tell me about the life of king number {}.",
    "math": "I have {} apples and buy 7 more. How many apples is that in total?",
    "zh": "请介绍第{}个城市的历史。",
    OTHER: "remind me at {} to call home",
}
SOURCES = {"code": "nl2bash", "en": "dolly", "math": "gsm8k-train", "zh": "cmath", OTHER: "x"}


@pytest.fixture(autouse=True)
def one_module_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.fit_intent.STANDARD_LIBRARY", ("bisect",))


def write(folder: Path, label: str, count: int, source: str) -> None:
    folder.mkdir(exist_ok=True)
    rows = [{"id": f"{source}:{i}", "prompt": TEXTS[label].format(i)} for i in range(count)]
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / f"{label}.jsonl").write_text(lines + "\n", encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in LABELS:
        write(tmp_path / "train", label, 5, SOURCES[label])
    for label in (*LABELS, OTHER):
        write(tmp_path / "eval", label, 2, SOURCES[label])
    return tmp_path


def test_the_command_writes_a_model_and_its_card(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = data / "model.json"
    assert main(["--data", str(data), "--out", str(out)]) == 0
    assert "model.md" in capsys.readouterr().out
    assert set(IntentModel.load(out).labels) == set(LABELS)
    card = (data / "model.md").read_text(encoding="utf-8")
    assert "- databricks-dolly-15k (CC BY-SA 3.0): 5 prompts" in card
    assert "| zh | 2 | 1.000 |" in card
    assert "standard library's source, as pasted code (PSF-2.0): " in card
    assert "apples" not in card + out.read_text(encoding="utf-8"), "no prompt leaves its folder"


def test_a_fit_tells_its_own_examples_apart(data: Path, minilm: MiniLMFingerprinter) -> None:
    examples = read_examples(data / "train", LABELS, minilm)
    assert [e.source for e in examples[:2]] == ["nl2bash", "nl2bash"]
    scores = by_label(fit(examples), examples)
    assert list(scores) == sorted(LABELS)
    assert all(score.accuracy == 1 and score.size == 5 for score in scores.values())


def test_functions_stand_for_pasted_code(minilm: MiniLMFingerprinter) -> None:
    examples = pasted_code(minilm)
    assert examples[0].text.startswith("def insort_right(a, x, lo=0, hi=None, *, key=None):")
    assert all(e.label == "code" and e.text.count("\n") <= SNIPPET_LINES for e in examples)
    assert examples[1].text.count("\n") == 2


def test_a_source_without_attribution_is_refused(data: Path, minilm: MiniLMFingerprinter) -> None:
    write(data / "train", "en", 2, "elsewhere")
    examples = read_examples(data / "train", LABELS, minilm)
    scores = by_label(fit(examples), examples)
    with pytest.raises(ValueError, match="elsewhere"):
        describe(examples, scores, scores | {OTHER: scores["en"]})


def test_a_missing_file_is_named(data: Path, minilm: MiniLMFingerprinter) -> None:
    (data / "eval" / "zh.jsonl").unlink()
    with pytest.raises(ValueError, match=r"zh\.jsonl is missing"):
        read_examples(data / "eval", LABELS, minilm)


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "--data" in capsys.readouterr().out
