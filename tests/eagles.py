"""Tiny eagle drafts for tiny targets: untrained, and always the same."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.engine.eagle import EagleConfig, EagleModel, new_eagle, save_eagle
from workers.engine.weights import Weights, identity_of

LAYERS = (1, 2)
HIDDEN = 32  # of the tiny target


def eagle_vocabulary(target: Path) -> Tensor:
    """All of the target's tokens but every fifth, so that no id of the draft's is the target's."""
    ids = torch.arange(len(Weights(target).head()))
    return ids[ids % 5 > 0]


def eagle_config(vocabulary: int, **changes: Any) -> EagleConfig:
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "draft_vocab_size": vocabulary,
        "feature_layers": LAYERS,
    }
    return EagleConfig(**settings | changes)


def tiny_eagle(
    target: Path, seed: int = 0, vocabulary: Tensor | None = None, **changes: Any
) -> EagleModel:
    """Reads nothing from the disk but the target; `changes` are to its config."""
    ids = eagle_vocabulary(target) if vocabulary is None else vocabulary
    generator = torch.Generator().manual_seed(seed)
    model = new_eagle(target, eagle_config(len(ids), **changes), ids, generator)
    return model.requires_grad_(False).eval()


def save_tiny_eagle(model: EagleModel, folder: Path, target: Path) -> Path:
    save_eagle(model, folder, identity_of(target, "tiny"), len(Weights(target).head()))
    return folder
