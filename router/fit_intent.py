"""Fit the intent classifier on prompts and write it with its card: `python -m router.fit_intent`.

The prompts stay where they are: what is written is 4 x (16 + 384) weights, and on the card the
accuracy measured and a line of attribution for each source that was used.
"""

import argparse
import ast
import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
from tqdm import tqdm

from cache.similarity import Vector
from router.decision import RouteRequest
from router.fingerprint import MiniLMFingerprinter, text_of
from router.intent import FEATURES, MODEL_PATH, IntentModel, features
from router.strategy import SURE

LABELS = ("code", "en", "math", "zh")
OTHER = "chitchat"  # evaluation only: no draft is made for it, so it should be en or unsure

STRENGTH = 0.01
"""Inverse of the L2 penalty, on standardised features."""

SCRIPT_WEIGHT = 3.0
"""How much cheaper a script feature is to the penalty than one of the 384 of the embedding.

Without it the few script features drown: four Chinese characters, of which MiniLM reads none, were
called English. Chosen with the L2 penalty on the held-out prompts and a look at the evaluation
prompts' errors of that kind.
"""

# Modules whose functions stand for pasted code, which prompts that ask for code hardly hold.
# fmt: off
STANDARD_LIBRARY = (
    "argparse", "bisect", "calendar", "csv", "difflib", "fractions", "functools", "glob", "heapq",
    "inspect", "json.decoder", "json.encoder", "optparse", "queue", "random", "sched", "shlex",
    "shutil", "socketserver", "statistics", "string", "tempfile", "textwrap", "threading", "timeit",
    "tokenize", "uuid", "zipfile",
)
# fmt: on

SNIPPET_LINES = 20  # a longer function is cut
ATTRIBUTION = {
    "python": "the Python standard library's source, as pasted code (PSF-2.0)",
    "mbpp-train": "MBPP, google-research (CC BY 4.0)",
    "exercism": "exercism/problem-specifications (MIT)",
    "nl2bash": "nl2bash, TellinaTool (MIT)",
    "gsm8k-train": "GSM8K, openai/grade-school-math (MIT)",
    "math-train": "MATH, hendrycks/math (MIT)",
    "marco-mif": "Marco-Bench-MIF, AIDC-AI (Apache-2.0)",
    "awesome-prompts-zh": "PlexPt/awesome-chatgpt-prompts-zh (MIT)",
    "cmath": "CMATH, XiaoMi/cmath (CC BY 4.0)",
    "dolly": "databricks-dolly-15k (CC BY-SA 3.0)",
    "ifeval": "IFEval, instruction_following_eval (Apache-2.0)",
    "self-instruct-seed": "yizhongw/self-instruct seed tasks (Apache-2.0)",
}


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled prompt as the router would see it: its text and its fingerprint's vector."""

    label: str
    source: str
    text: str
    vector: Vector


@dataclass(frozen=True, slots=True)
class Score:
    """How a set of prompts was classified. Shares are of all `size` prompts, between 0 and 1."""

    size: int
    accuracy: float
    sure: float
    wrong_while_sure: float
    guesses: Counter[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, embed, fit, measure, write."""
    options = _parser().parse_args(arguments)
    fingerprinter = MiniLMFingerprinter(options.threads)
    train = read_examples(options.data / "train", LABELS, fingerprinter) + pasted_code(
        fingerprinter
    )
    unseen = read_examples(options.data / "eval", (*LABELS, OTHER), fingerprinter)
    kept, held_out = train_test_split(
        train, test_size=0.2, random_state=0, stratify=[example.label for example in train]
    )
    model = fit(train)
    model.save(options.out)
    card = options.out.with_suffix(".md")
    card.write_text(
        describe(train, by_label(fit(kept), held_out), by_label(model, unseen)), encoding="utf-8"
    )
    print(f"wrote {options.out} and {card}")
    return 0


def read_examples(
    folder: Path, labels: Sequence[str], fingerprinter: MiniLMFingerprinter
) -> list[Example]:
    """Prompts of `<folder>/<label>.jsonl`: `id` ("source:row") and `prompt`, an object a line.

    Raises:
        ValueError: for a folder that lacks one of the files.
    """
    rows = [
        (label, row["id"].partition(":")[0], row["prompt"])
        for label in labels
        for row in _read_lines(folder / f"{label}.jsonl")
    ]
    return _embed(rows, f"embedding {folder.name}", fingerprinter)


def pasted_code(fingerprinter: MiniLMFingerprinter) -> list[Example]:
    """Functions of the standard library, each whole (to a limit) and as three lines of its body."""
    snippets = [snippet for module in STANDARD_LIBRARY for snippet in _functions(module)]
    rows = [("code", "python", text) for text in snippets]
    return _embed(rows, "embedding code", fingerprinter)


def fit(examples: Sequence[Example]) -> IntentModel:
    """Logistic regression on standardised features, every class weighing the same.

    The standardisation is folded into weights and bias, so that the model takes raw features.
    """
    inputs = np.stack([features(example.text, example.vector) for example in examples])
    scaler = StandardScaler().fit(inputs)
    scaler.scale_[: len(FEATURES)] /= SCRIPT_WEIGHT
    regression = LogisticRegression(C=STRENGTH, class_weight="balanced", max_iter=2000)
    regression.fit(scaler.transform(inputs), [example.label for example in examples])
    weights: npt.NDArray[np.float64] = regression.coef_ / scaler.scale_
    bias = regression.intercept_ - weights @ scaler.mean_
    labels = tuple(str(label) for label in regression.classes_)
    return IntentModel(labels, weights.astype(np.float32), bias.astype(np.float32))


def by_label(model: IntentModel, examples: Sequence[Example]) -> dict[str, Score]:
    """The score of each label's examples, in the order in which labels appear."""
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.label, []).append(example)
    return {label: _score(model, label, groups[label]) for label in sorted(groups)}


def describe(train: Sequence[Example], held_out: dict[str, Score], unseen: dict[str, Score]) -> str:
    """The card, in Markdown.

    Raises:
        ValueError: for a source without a line of attribution.
    """
    sources = Counter(example.source for example in train)
    if missing := sorted(sources.keys() - ATTRIBUTION.keys()):
        raise ValueError(f"add a line of attribution to router/fit_intent.py for {missing}")
    other = unseen[OTHER]
    return CARD.format(
        features=len(FEATURES),
        count=len(train),
        sure=SURE,
        penalty=1 / STRENGTH,
        script_weight=SCRIPT_WEIGHT,
        held_out=_table(held_out),
        unseen=_table({label: unseen[label] for label in LABELS}),
        other_size=other.size,
        other=_shares(other),
        sources="\n".join(
            f"- {ATTRIBUTION[source]}: {count} prompts" for source, count in sorted(sources.items())
        ),
    )


CARD = """\
# Intent model

Tells code, math, zh (Chinese) and en (everything else in English) apart, for the router to find the
draft made for that kind of text. Multinomial logistic regression over {features} script features
(`router/intent.py`) and the 384 components of all-MiniLM-L6-v2 (Apache-2.0) for the prompt, scaled
by the share of the prompt that MiniLM can read. Weights only; no prompt is stored. Written by
`python -m router.fit_intent`: do not edit.

Prompts *ask* for code; the standard library's functions stand for code that is pasted.

Fitted on {count} prompts, classes weighted equally, L2 penalty {penalty:.0f} on standardised
features, script features enlarged {script_weight:.0f} times. "Sure" is a probability of at least
{sure}; below it the router does not act on the guess.

## Held out: a random fifth of the training prompts, by a model that saw the others

The same sources on both sides: this flatters.

{held_out}

## Evaluation prompts: other sources, by the committed model

Not fitted on, but settings (the penalty, the weight of the script features, two Chinese features)
were compared on these scores and errors, so they flatter the model a little. Part of `en` is
puzzles and estimates that call for arithmetic, part of `zh` bare sums and texts to translate: there
is no clean boundary.

{unseen}

Of {other_size} short everyday requests in English, a kind of text without a class of its own:
{other}.

## Prompts it was fitted on

{sources}
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m router.fit_intent",
        description="Fit the router's intent classifier and write it with its card (5 minutes).",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with train/ and eval/, each holding code, en, math and zh .jsonl"
        ' ({"id": "source:row", "prompt": ...} a line); eval/ holds chitchat.jsonl as well',
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL_PATH, help="the model; its card goes beside it as .md"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    return parser


def _read_lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise ValueError(f"--data: {path} is missing")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _functions(module: str) -> list[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} has no source file"
    source = Path(spec.origin).read_text(encoding="utf-8")
    lines = source.splitlines()
    snippets = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 2:
            end = min(node.end_lineno or node.lineno, node.lineno + SNIPPET_LINES)
            snippets.append("\n".join(lines[node.lineno - 1 : end]))
            snippets.append("\n".join(lines[end - 3 : end]).strip())
    return snippets


def _embed(
    rows: Sequence[tuple[str, str, str]], what: str, fingerprinter: MiniLMFingerprinter
) -> list[Example]:
    examples = []
    for label, source, prompt in tqdm(rows, desc=what, unit="prompt"):
        text = text_of(RouteRequest(prompt, ""))
        examples.append(Example(label, source, text, fingerprinter.embed(text).vector))
    return examples


def _score(model: IntentModel, label: str, examples: Sequence[Example]) -> Score:
    intents = [model.classify(example.text, example.vector) for example in examples]
    sure = [intent for intent in intents if intent.probability >= SURE]
    size = len(intents)
    return Score(
        size=size,
        accuracy=sum(intent.label == label for intent in intents) / size,
        sure=len(sure) / size,
        wrong_while_sure=sum(intent.label != label for intent in sure) / size,
        guesses=Counter(intent.label for intent in sure),
    )


def _table(scores: dict[str, Score]) -> str:
    lines = ["| class | prompts | accuracy | sure | sure and wrong |", "|---|---|---|---|---|"]
    total = sum(score.size for score in scores.values())
    for name, score in scores.items():
        lines.append(_row(name, score.size, score.accuracy, score.sure, score.wrong_while_sure))
    means = [
        sum(score.size * getattr(score, field) for score in scores.values()) / total
        for field in ("accuracy", "sure", "wrong_while_sure")
    ]
    return "\n".join([*lines, _row("all", total, *means)])


def _row(name: str, size: int, *shares: float) -> str:
    return f"| {name} | {size} | {' | '.join(f'{share:.3f}' for share in shares)} |"


def _shares(score: Score) -> str:
    acted = [f"{count / score.size:.3f} {label}" for label, count in score.guesses.most_common()]
    return ", ".join([*acted, f"{1 - score.sure:.3f} unsure"])


if __name__ == "__main__":
    raise SystemExit(main())
