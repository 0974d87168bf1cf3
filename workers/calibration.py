"""From what the members say to how likely a guess is right: logistic opinion pools.

Each member's probability of a token goes in as its log-odds, and once more that of the member that
is surer of it: one that knows a token well is right more often than the mean of both says. The
pool's weights depend on the length of the n-gram match and on the temperature of the request, were
fitted on what the target said to held-out prompts, and are kept with the draft (Satopaa et al.,
2014, "Combining multiple probability predictions using a simple logit model"). So a long match
outweighs the neural member and a short one does not, as far as that was so on real text.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from workers.training.ngram_table import ORDER

CALIBRATION = "calibration.json"
# What a member is taken to say of a token that is not among its likeliest.
FLOOR = 1e-3
# Of a weight: far beyond what any fit gives, and far from where their sum would overflow.
MOST = 20.0
# Levels below what the target said, from which on the neural member grows no less sure.
FARTHEST = 4


@dataclass(frozen=True, slots=True)
class Pool:
    """log-odds of a guess = bias + ngram * log-odds by the n-grams + neural * log-odds by the
    neural member + surer * the higher of the two + farther * levels between the guess and what the
    target said.
    """

    bias: float = 0.0
    ngram: float = 0.0
    neural: float = 0.0
    surer: float = 0.0
    farther: float = 0.0

    def confidence(self, ngram: float, neural: float, level: int) -> float:
        """Probability that a guess is right, given what the members say; level: 0 for a guess at
        the next token.
        """
        odds = self.bias + self.farther * min(level, FARTHEST)
        if self.ngram:
            odds += self.ngram * log_odds(ngram)
        if self.neural:
            odds += self.neural * log_odds(neural)
        if self.surer:
            odds += self.surer * log_odds(max(ngram, neural))
        return 1.0 / (1.0 + exp(-odds))


@dataclass(frozen=True, slots=True)
class Regime:
    """Pools at one temperature. ngram, both: by the length of the n-gram match, 0 to ORDER; ngram
    where the neural member was not asked; neural: where there are no n-grams at all.
    """

    ngram: tuple[Pool, ...]
    both: tuple[Pool, ...]
    neural: Pool


@dataclass(frozen=True, slots=True)
class Calibration:
    """Regimes by the temperature they were fitted at."""

    regimes: Mapping[float, Regime]

    def at(self, temperature: float) -> Regime:
        """The regime nearest to a temperature."""
        return self.regimes[self.nearest(temperature)]

    def nearest(self, temperature: float) -> float:
        """Of the temperatures that there are regimes for."""
        return min(self.regimes, key=lambda fitted: abs(fitted - temperature))

    def save(self, folder: Path) -> None:
        saved = {str(temperature): asdict(regime) for temperature, regime in self.regimes.items()}
        text = json.dumps(saved, indent=1)
        (folder / CALIBRATION).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Calibration":
        """Raises ValueError when the folder holds none."""
        path = folder / CALIBRATION
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if not saved:
                raise ValueError("it has no regime")
            return cls({_number(float(t)): _regime(fields) for t, fields in saved.items()})
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: is no calibration ({type(error).__name__}: {error}); make the draft anew "
                "with `outrider prepare-draft`"
            ) from error


def _regime(saved: Mapping[str, Any]) -> Regime:
    if not len(saved["ngram"]) == len(saved["both"]) == ORDER + 1:
        raise ValueError(f"its n-grams are not of 0 to {ORDER} tokens")
    return Regime(
        ngram=tuple(map(_pool, saved["ngram"])),
        both=tuple(map(_pool, saved["both"])),
        neural=_pool(saved["neural"]),
    )


def _pool(saved: Mapping[str, Any]) -> Pool:
    return Pool(**{name: _number(weight) for name, weight in saved.items()})


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{value!r} is no number from -{MOST} to {MOST}")
    return float(value)


# Every member is taken at its word; without a calibration there is one member only.
UNCALIBRATED = Calibration(
    {
        0.0: Regime(
            ngram=(Pool(ngram=1.0),) * (ORDER + 1),
            both=(Pool(ngram=0.5, neural=0.5),) * (ORDER + 1),
            neural=Pool(neural=1.0),
        )
    }
)


def log_odds(probability: float) -> float:
    """Of a probability, kept away from 0 and 1."""
    p = min(max(probability, FLOOR), 1 - FLOOR)
    return log(p / (1 - p))
