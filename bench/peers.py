"""Other people's decoding beside ours: the same prompts, target and machine, in one run.

The peers here are transformers' own: `generate`, its prompt lookup (Saxena 2023), and its assisted
generation with a draft of ours; `bench.llama_peers` has llama.cpp's. All decode greedily, so that
the texts can be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.decode import Arm, Settings, request_of, run_cold
from workers.budget import Budget
from workers.engine.model import keep_layers, parse_dtype
from workers.engine.vocabulary import vocabulary_of
from workers.hybrid_draft import kind_of
from workers.verifier import Verifier

Decoder = Callable[[Sequence[int], int], Sequence[int]]
"""Prompt ids and the most new tokens in, the new tokens out, an end-of-sequence token included."""

GENERATE = "transformers"
LOOKUP = "transformers lookup"
ASSISTED = "transformers assisted"
LOOKUP_TOKENS = 8  # guesses per step: about as many as our controller verifies
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Lap:
    """One decoder over all prompts."""

    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Prefill included."""
        return sum(map(len, self.answers)) / self.seconds


def ours(verifier: Verifier, arms: Sequence[Arm], budget: Budget) -> dict[str, Decoder]:
    """Our arms as decoders, by name."""
    numbers = count()

    def decoder(arm: Arm) -> Decoder:
        def decode(prompt: Sequence[int], max_tokens: int) -> Sequence[int]:
            settings = Settings(max_tokens, budget, temperature=0.0)
            request = request_of(str(next(numbers)), tuple(prompt), arm, settings, seed=0)
            return run_cold(verifier, request).completions[0].tokens

        return decode

    return {arm.name: decoder(arm) for arm in arms}


def transformers_peers(
    target: Path, dtype: str, assistant: PreTrainedModel | None
) -> dict[str, Decoder]:
    """transformers' ways over the same weights; assisted generation where there is an assistant."""
    model = _load(target, dtype)
    peers = {
        GENERATE: _decoder(model),
        LOOKUP: _decoder(model, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    if assistant is not None:
        peers[ASSISTED] = _decoder(model, assistant_model=assistant)
    return peers


def layers_of(target: Path, dtype: str, layers: Sequence[int]) -> PreTrainedModel:
    """An assistant made of some of the target's own layers, untrained.

    Raises ValueError for layers that the target does not have.
    """
    model = _load(target, dtype)
    keep_layers(model, layers)
    return model


def load_assistant(folder: Path, target: Path, dtype: str) -> PreTrainedModel:
    """An `lm` draft as an assistant.

    Raises ValueError when the folder holds none, or one with another vocabulary than the target's.
    """
    if kind_of(folder) != "lm":
        raise ValueError(
            f"assistant: {folder} holds no lm draft; make one with `outrider prepare-draft "
            "--kind lm`"
        )
    vocabulary_of(target).check_same(vocabulary_of(folder), "assistant")
    return _load(folder, dtype)


def _load(folder: Path, dtype: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=parse_dtype(dtype))
    model.requires_grad_(False)
    model.eval()
    return model


def _decoder(model: PreTrainedModel, **how: Any) -> Decoder:
    generate: Any = model.generate

    def decode(prompt: Sequence[int], max_tokens: int) -> Sequence[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **how,
            )
        new: list[int] = whole[0, len(prompt) :].tolist()
        return new

    return decode


def race(
    decoders: Mapping[str, Decoder],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_prompt: Callable[[], object],
) -> dict[str, Lap]:
    """Every decoder on every prompt, in turn, so that a machine that slows down slows them all."""
    laps = {name: Lap() for name in decoders}
    for decode in decoders.values():
        decode(prompts[0], min(WARM_UP_TOKENS, max_tokens))
    for prompt in prompts:
        for name, decode in decoders.items():
            started = perf_counter()
            answer = list(decode(prompt, max_tokens))
            laps[name].seconds += perf_counter() - started
            laps[name].answers.append(answer)
        on_prompt()
    return laps


def summarise(laps: Mapping[str, Lap]) -> dict[str, dict[str, float]]:
    """By decoder `tokens_per_second`, and against transformers' plain `generate` `speedup` and
    `exact_match`, the share of equal answers.
    """
    plain = laps[GENERATE]
    return {
        name: {
            "tokens_per_second": lap.tokens_per_second,
            "speedup": lap.tokens_per_second / plain.tokens_per_second,
            "exact_match": sum(map(list.__eq__, lap.answers, plain.answers)) / len(plain.answers),
        }
        for name, lap in laps.items()
    }


def table(summary: Mapping[str, Mapping[str, float]]) -> str:
    """The summary for people, in Markdown."""
    lines = ["| decoder | tokens/s | speed-up | same text |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} "
        f"| {row['exact_match']:.0%} |"
        for name, row in summary.items()
    ]
    return "\n".join(lines)
