"""Single tensors of a saved model, read without loading the model, and which model it is."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SAMPLE = 64  # values of each tensor that tell models apart


class Weights:
    """The tensors of a folder of safetensors, by name.

    Raises ValueError when the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _files(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return sorted(self._files)

    def read(self, name: str) -> Tensor:
        """One tensor. Raises ValueError when the model has none of that name."""
        if name not in self._files:
            raise ValueError(f"{self.folder}: its weights hold no {name}")
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def embedding(self) -> Tensor:
        """Input embeddings: [vocabulary, hidden]."""
        return self.read(self._only("embed_tokens.weight"))

    def head(self) -> Tensor:
        """Output embeddings: [vocabulary, hidden]; the input's where they are tied."""
        return self.read("lm_head.weight") if "lm_head.weight" in self else self.embedding()

    def sample(self, name: str) -> bytes:
        """A few values, rounded to bfloat16: the same whether saved in that or in float32."""
        with safe_open(self._files[name], framework="pt") as file:
            part = file.get_slice(name)
            head = part[:1] if len(part.get_shape()) > 1 else part[:]
        return bytes(head.flatten()[:_SAMPLE].to(torch.bfloat16).view(torch.uint8).tolist())

    def _only(self, suffix: str) -> str:
        found = [name for name in self._files if name.endswith(suffix)]
        if len(found) != 1:
            raise ValueError(f"{self.folder}: {len(found)} of its tensors are called *{suffix}")
        return found[0]


def _files(folder: Path) -> dict[str, Path]:
    """The file of every tensor."""
    index = folder / _INDEX
    if index.is_file():
        saved: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in saved.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: holds no *.safetensors")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: file for name in opened.keys()}  # noqa: SIM118 it is no mapping
    return found


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """Which target a draft was made for: a neural draft reads one target's hidden states.

    name: for people; hidden_size, layers: its shape; weights: hash of a few values of each tensor.
    """

    name: str
    hidden_size: int
    layers: int
    weights: str

    def check_same(self, other: "TargetIdentity", what: str) -> None:
        """Raises ValueError when `other`, for which `what` was made, is another target."""
        if (self.hidden_size, self.layers, self.weights) == (
            other.hidden_size,
            other.layers,
            other.weights,
        ):
            return
        raise ValueError(
            f"{what}: was made for the target {other.name!r} ({other.layers} layers of "
            f"{other.hidden_size}, weights {other.weights}), not for this one ({self.layers} "
            f"layers of {self.hidden_size}, weights {self.weights}); make one for it with "
            "`outrider prepare-draft`"
        )


def identity_of(folder: Path, name: str) -> TargetIdentity:
    """The identity of the target in `folder`, called `name`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    return TargetIdentity(name, text["hidden_size"], text["num_hidden_layers"], _digest(folder))


def _digest(folder: Path) -> str:
    weights = Weights(folder)
    digest = hashlib.sha256()
    for tensor in weights.names():
        digest.update(tensor.encode() + weights.sample(tensor))
    return digest.hexdigest()[:16]
