"""The law of a tiny target's first tokens at temperature 1, by transformers, and Pearson's test."""

from collections import Counter
from itertools import product
from pathlib import Path

import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from tests.tiny import make_target

VOCABULARY = 6
LENGTH = 3
# The seeds are fixed, so a test either holds or does not: no run is unlucky.
SIGNIFICANCE = 1e-3

TextLaw = dict[tuple[int, ...], float]


def six_tokens(folder: Path, seed: int) -> Path:
    """A target whose texts are few enough to count."""
    shape = {"vocab_size": VOCABULARY, "eos_token_id": None, "initializer_range": 0.25}
    return make_target(folder, seed=seed, **shape)


def text_law(folder: Path, prompt: tuple[int, ...]) -> TextLaw:
    """Probability of every text of `LENGTH` tokens."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = list(product(range(VOCABULARY), repeat=LENGTH))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + text for text in texts])).logits.double()
    steps = logits[:, len(prompt) - 1 : -1].softmax(-1)  # [texts, LENGTH, vocabulary]
    chosen = steps.gather(-1, torch.tensor(texts)[..., None])[..., 0].prod(-1)
    return dict(zip(texts, chosen.tolist(), strict=True))


def p_value(seen: Counter[tuple[int, ...]], law: TextLaw) -> float:
    """Pearson's test; texts expected fewer than five times are one cell."""
    seeds = seen.total()
    cells = [(seen[text], seeds * prob) for text, prob in law.items() if seeds * prob >= 5]
    rest = seeds - sum(count for count, _ in cells), seeds - sum(want for _, want in cells)
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((count - want) ** 2 / want for count, want in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
