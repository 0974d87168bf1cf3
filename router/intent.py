"""What kind of text is asked for: code, math, zh or en. A linear model, fitted once, committed.

It looks at the script of the prompt (MiniLM knows little Chinese, and a formula or an identifier
says more than its meaning) and at the meaning half of the fingerprint. `router/fit_intent.py`
fits it; `intent_model.md` says on what, and how well it does.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cache.similarity import Vector
from router.fingerprint import MEANING_DIM

MODEL_PATH = Path(__file__).with_name("intent_model.json")

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_CODE_SYMBOL = re.compile(r"[{}()\[\];=<>_`#|&]")
_IDENTIFIER = re.compile(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\b[a-z]+[A-Z][A-Za-z]*\b|\b\w+\(")
_CODE_WORD = re.compile(
    r"\b(?:def|class|return|import|function|functions|method|python|java|javascript|c\+\+|rust|sql"
    r"|bash|shell|command|script|code|program|algorithm|array|string|tuple|regex|api|compile)\b",
    re.IGNORECASE,
)
_MATH_WORD = re.compile(
    r"\b(?:how many|how much|total|altogether|each|twice|half|percent|average|probability|equation"
    r"|solve|compute|calculate|evaluate|simplify|integer|integers|triangle|polynomial|sum|value"
    r"|remainder|area|degrees|fraction)\b",
    re.IGNORECASE,
)
_LATEX = re.compile(r"\\[a-zA-Z]+|\$[^$\n]{1,200}\$")
_ARITHMETIC = re.compile(r"\d\s*[-+*/^=%]\s*\d")
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z]+|[\u3400-\u4dbf\u4e00-\u9fff]")

FEATURES = (
    "han share of characters",
    "han characters, log",
    "any han",
    "code symbols per character",
    "code symbols, log",
    "digits per character",
    "numbers, log",
    "identifiers, log",
    "code words per word",
    "code words, log",
    "math words per word",
    "math words, log",
    "latex, log",
    "arithmetic, log",
    "indented lines, log",
    "length, log",
)


def script_features(text: str) -> npt.NDArray[np.float32]:
    """What the characters alone tell: `[len(FEATURES)]`, in that order.

    Shares say what a text is made of; logarithms of counts keep a long prompt from shouting.
    """
    size, han = max(1, len(text)), _count(_HAN, text)
    words = max(1, len(_WORD.findall(text)))
    symbols, code, math_words = (_count(p, text) for p in (_CODE_SYMBOL, _CODE_WORD, _MATH_WORD))
    values = (
        han / size,
        math.log1p(han),
        float(han > 0),
        symbols / size,
        math.log1p(symbols),
        sum(character.isdigit() for character in text) / size,
        math.log1p(_count(_NUMBER, text)),
        math.log1p(_count(_IDENTIFIER, text)),
        code / words,
        math.log1p(code),
        math_words / words,
        math.log1p(math_words),
        math.log1p(_count(_LATEX, text)),
        math.log1p(_count(_ARITHMETIC, text)),
        math.log1p(sum(line.startswith(("  ", "\t")) for line in text.splitlines())),
        math.log1p(size),
    )
    return np.array(values, np.float32)


def features(text: str, vector: Vector) -> npt.NDArray[np.float32]:
    """Everything the model looks at, `[len(FEATURES) + MEANING_DIM]`.

    The meaning half of the fingerprint shrinks with the share of the text that MiniLM could not
    read: where it understood nothing, the script decides alone.
    """
    return np.concatenate([script_features(text), vector[:MEANING_DIM]])


@dataclass(frozen=True, slots=True)
class Intent:
    """The likeliest label and its probability by the model."""

    label: str
    probability: float


class IntentModel:
    """Multinomial logistic regression: `softmax(weights @ features + bias)`.

    Args:
        weights: `[labels, len(FEATURES) + MEANING_DIM]`, on raw features.
        bias: `[labels]`.
    """

    def __init__(
        self,
        labels: tuple[str, ...],
        weights: npt.NDArray[np.float32],
        bias: npt.NDArray[np.float32],
    ) -> None:
        assert weights.shape == (len(labels), len(FEATURES) + MEANING_DIM), weights.shape
        assert bias.shape == (len(labels),), bias.shape
        self.labels, self._weights, self._bias = labels, weights, bias

    @classmethod
    def load(cls, path: Path = MODEL_PATH) -> "IntentModel":
        """Read a fitted model.

        Raises:
            ValueError: for one fitted on other features than this code computes.
        """
        stored = json.loads(path.read_text(encoding="utf-8"))
        if tuple(stored["features"]) != FEATURES:
            raise ValueError(
                f"{path} was fitted on other features: run `python -m router.fit_intent` again"
            )
        weights = np.array(stored["weights"], np.float32)
        return cls(tuple(stored["labels"]), weights, np.array(stored["bias"], np.float32))

    def save(self, path: Path) -> None:
        """Write what `load` reads: five digits, which change no probability by 1e-3."""
        stored = {
            "labels": self.labels,
            "features": FEATURES,
            "bias": _rounded(self._bias),
            "weights": [_rounded(row) for row in self._weights],
        }
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(stored[key])}" for key in stored)
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    def classify(self, text: str, vector: Vector) -> Intent:
        """The likeliest label for a text and its fingerprint's vector."""
        scores = self._weights @ features(text, vector) + self._bias
        powers = np.exp(scores - scores.max())
        best = int(powers.argmax())
        return Intent(self.labels[best], float(powers[best] / powers.sum()))


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def _rounded(values: npt.NDArray[np.float32]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
