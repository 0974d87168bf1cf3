"""Tiny eagle drafts for tiny targets: untrained, and always the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import make_target
from workers.calibration import UNCALIBRATED
from workers.engine.eagle import EagleConfig, EagleModel, new_eagle, save_eagle
from workers.engine.weights import Weights, identity_of
from workers.training.batch import collate
from workers.training.eagle_student import unroll
from workers.training.ngram_table import NgramTable
from workers.training.teacher import TeacherText

LAYERS = (1, 2)
HIDDEN = 32  # of the tiny target


def eagle_vocabulary(target: Path) -> Tensor:
    """All of the target's tokens but every fifth, so that no id of the draft's is the target's."""
    ids = torch.arange(len(Weights(target).head()))
    return ids[ids % 5 > 0]


def eagle_config(vocabulary: int, **changes: Any) -> EagleConfig:
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
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


def save_hybrid(model: EagleModel, table: NgramTable, folder: Path, target: Path) -> Path:
    """As it is made: a folder for each member, and calibrations."""
    table.save(folder / "ngram")
    save_tiny_eagle(model, folder / "eagle", target)
    for own in (folder, folder / "eagle"):
        UNCALIBRATED.save(own)
    return folder


def attentive_eagle(target: Path) -> EagleModel:
    """One on whose every input its laws really depend: the embedding's half of the attention and
    the earlier layers' part of the fused state are as strong as the rest.
    """
    model = tiny_eagle(target)
    model.midlayer.qkv_proj.weight[:, :HIDDEN] *= 25
    model.fc.weight[:, :HIDDEN] *= 10
    return model


def some_features(length: int, seed: int = 0, layers: int = len(LAYERS)) -> Tensor:
    """As a bfloat16 target might have them: [length, layers, hidden] float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, layers, HIDDEN, generator=generator).bfloat16().float()


def some_tokens(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed + 1000)
    return tuple(torch.randint(3, 270, (length,), generator=generator).tolist())


def trained_law(
    model: EagleModel, tokens: Sequence[int], features: Tensor, path: Sequence[int]
) -> Tensor:
    """What training makes the model say after `tokens` and a path below them, from the features
    of all tokens but the last: [draft_vocab_size].
    """
    known, ahead = len(tokens), len(path)
    whole = torch.tensor([*tokens, *path, 0])
    garbage = torch.full((ahead + 2, *features.shape[1:]), 1e3)
    law = torch.zeros(ahead + 1, 1)
    text = TeacherText(
        whole, known, 0.0, torch.cat([features[: known - 1], garbage]).flatten(1), law, law
    )
    with torch.inference_mode():
        hidden = unroll(model, collate([text], torch.device("cpu")), ahead + 1)[ahead]
        return model.logits(hidden[0, ahead]).softmax(-1)


def easy_target(folder: Path, **changes: Any) -> Path:
    """A tiny target whose layers hardly matter: `guessing_eagle` is mostly right about it."""
    path = make_target(folder, **changes) / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.02
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def guessing_eagle(target: Path, vocabulary: Tensor | None = None) -> EagleModel:
    """One made by hand that knows what an `easy_target` says after the last token alone.

    Its attention sees its own place only, and puts the embedding where the hidden state was.
    """
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HIDDEN}
    model = tiny_eagle(target, vocabulary=vocabulary, **one_head)
    one, layer = torch.eye(HIDDEN), model.midlayer
    query, key, value = layer.qkv_proj.weight.split(layer.sizes)
    for part in (query, key):
        part.copy_(torch.cat([5 * one, 0 * one], 1))
    value.copy_(torch.cat([one, -one], 1))
    layer.o_proj.weight.copy_(one)
    layer.down_proj.weight.zero_()
    model.fc.weight.zero_()
    return model
