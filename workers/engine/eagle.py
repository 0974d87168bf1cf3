"""The `eagle` draft's model: one decoder layer that reads the target's hidden states.

Li et al., EAGLE-3 (2025): hidden states of a few of the target's layers at a position, fused into
one, and the embedding of the token that came next, go through one layer, whose output stands in for
the target's last hidden state. Its own output takes the place of the fused states where the target
has not been yet. So it can be asked for a whole tree, level by level.

The folder is the field's: config.json and model.safetensors with `fc`, `midlayer`, `norm`, `d2t`
(draft token i is target token i + d2t[i]) and `t2d` (whether a target token is one of the draft's).
Embedding and head are the target's own, so they are read from the target and not stored.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from workers.engine.angles import AngleTable
from workers.engine.attention import rotate
from workers.engine.weights import TargetIdentity, Weights, identity_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """feature_layers: the hidden states that are read, by how many of the target's layers they have
    passed; draft_vocab_size: tokens that can be guessed; the rest as in a Llama's config.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    draft_vocab_size: PositiveInt
    feature_layers: tuple[int, ...]


_CONFIGS = TypeAdapter(EagleConfig)


class EagleModel(nn.Module):
    """Every function takes and gives any leading dimensions: [..., hidden].

    embedding: the target's [vocabulary, hidden]; head: the rows of the target's LM head that belong
    to the draft's tokens; vocabulary [draft_vocab_size]: these tokens' ids in the target. None of
    the three is trained.
    """

    embedding: Tensor
    vocabulary: Tensor

    def __init__(
        self, config: EagleConfig, embedding: Tensor, head: Tensor, vocabulary: Tensor
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of its states: float32 as trained."""
        return self.norm.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of its tokens: [..., hidden]."""
        return self.embedding[tokens].to(self.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states of the target [..., layers * hidden] into one."""
        fused: Tensor = self.fc(features.to(self.dtype))
        return fused

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft_vocab_size]"""
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores


class Norm(nn.Module):
    """RMS norm in float32, whatever comes in, given back as its weight is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        return rms_norm(x.float(), weight.shape, weight, self._eps).to(self.weight.dtype)


class MidLayer(nn.Module):
    """A Llama layer whose attention reads embedding and hidden state side by side.

    Projections of the same input are one matrix here and several in the saved folder.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.sizes = tuple(
            heads * config.head_dim
            for heads in (
                config.num_attention_heads,
                config.num_key_value_heads,
                config.num_key_value_heads,
            )
        )
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.hidden_norm = Norm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(2 * hidden, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], hidden, bias=False)
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self._head_dim = config.head_dim

    def project(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., heads, head_dim], keys and values [..., kv_heads, head_dim]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        query, key, value = (
            part.unflatten(-1, (-1, self._head_dim))
            for part in self.qkv_proj(both).split(self.sizes, -1)
        )
        return rotate(query, angles), rotate(key, angles), value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input and what attention [..., heads * head_dim] gave."""
        hidden = hidden + self.o_proj(attended)
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, -1)
        out: Tensor = hidden + self.down_proj(silu(gate) * up)
        return out


def rotary(config: EagleConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., 1, head_dim] of the rotary embedding (Su et al., 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=positions.device).float() / config.head_dim
    angles = positions[..., None].float() / config.rope_theta**half
    angles = torch.cat([angles, angles], -1)[..., None, :]
    return angles.cos(), angles.sin()


def angle_table(model: EagleModel) -> AngleTable:
    """Of its dtype, where it is. The model itself is not kept by it."""
    config, dtype = model.config, model.dtype

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = rotary(config, positions)
        return cosine[:, 0].to(dtype), sine[:, 0].to(dtype)

    return AngleTable(angles, model.embedding.device)


def new_eagle(
    target: Path, config: EagleConfig, vocabulary: Tensor, generator: torch.Generator
) -> EagleModel:
    """An untrained draft for the target in folder `target`: its layer starts as the target's last.

    The fused state starts as the last of the target's features; the embedding's half of the
    attention starts small and random.
    """
    weights = Weights(target)
    head = weights.head().float()[vocabulary]
    model = EagleModel(config, weights.embedding().float(), head, vocabulary)
    state = {
        name: torch.empty_like(tensor).normal_(0.0, 0.02, generator=generator)
        if tensor.dim() > 1
        else torch.ones_like(tensor)
        for name, tensor in _saved_form(model).items()
    }
    state["fc.weight"][:, -config.hidden_size :] += torch.eye(config.hidden_size)
    for name, start in _last_layer(weights, config).items():
        # Where the draft's own is wider, this is for the hidden half of its input.
        own = state[name][..., -start.shape[-1] :]
        if start.shape == own.shape:
            own.copy_(start)
    _load_saved_form(model, state)
    return model


def check_continues(folder: Path, config: EagleConfig, target: TargetIdentity, what: str) -> None:
    """Raises ValueError when a draft of this config cannot start from the one in `folder`: that is
    none, made for another target, or of another shape; `what` names it.
    """
    own, made_for = read_eagle_config(folder)
    target.check_same(made_for, what)
    if replace(own, draft_vocab_size=config.draft_vocab_size) != config:
        raise ValueError(f"{what}: {folder} is {own}, and what is made would be {config}")


def continue_eagle(model: EagleModel, folder: Path, target: Path, what: str) -> None:
    """Give `model` the trained weights of the draft in `folder`, which may guess other tokens.

    `check_continues` has let it pass. Raises ValueError when the weights cannot be read.
    """
    _load_saved_form(model, _saved_form(load_eagle(folder, target, what)))


# Where a Llama-like target keeps what the draft's layer starts from.
_STARTS = {
    "midlayer.self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight": "self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight": "self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight": "mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight": "mlp.down_proj.weight",
    "midlayer.hidden_norm.weight": "input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight": "post_attention_layernorm.weight",
}


def _last_layer(weights: Weights, config: EagleConfig) -> dict[str, Tensor]:
    """The target's last layer under the draft's names, and its final norm, as far as it has them.

    Of its MLP the neurons that write most are kept, as many as the draft has.
    """
    layers = [int(match[1]) for name in weights.names() if (match := _LAYER.search(name))]
    prefix = f".layers.{max(layers, default=0)}."
    own = {name.split(prefix)[1]: name for name in weights.names() if prefix in name}
    found = {
        draft: weights.read(own[target]).float()
        for draft, target in _STARTS.items()
        if target in own
    }
    down = found.get("midlayer.mlp.down_proj.weight")
    if down is not None and down.shape[1] >= config.intermediate_size:
        kept = down.norm(dim=0).topk(config.intermediate_size).indices.sort().values
        found["midlayer.mlp.down_proj.weight"] = down[:, kept]
        for name in ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"):
            found[name] = found[name][kept]
    for name in weights.names():
        if name.endswith("norm.weight") and not _LAYER.search(name):
            found["norm.weight"] = weights.read(name).float()
    return found


def _saved_form(model: EagleModel) -> dict[str, Tensor]:
    """What is trained, under the names of the saved folder."""
    layer = model.midlayer
    query, key, value = layer.qkv_proj.weight.data.split(layer.sizes)
    gate, up = layer.gate_up_proj.weight.data.chunk(2)
    return {
        "fc.weight": model.fc.weight.data,
        "midlayer.input_layernorm.weight": layer.input_layernorm.weight.data,
        "midlayer.hidden_norm.weight": layer.hidden_norm.weight.data,
        "midlayer.self_attn.q_proj.weight": query,
        "midlayer.self_attn.k_proj.weight": key,
        "midlayer.self_attn.v_proj.weight": value,
        "midlayer.self_attn.o_proj.weight": layer.o_proj.weight.data,
        "midlayer.post_attention_layernorm.weight": layer.post_attention_layernorm.weight.data,
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": layer.down_proj.weight.data,
        "norm.weight": model.norm.weight.data,
    }


def _load_saved_form(model: EagleModel, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a tensor that is missing or of another shape."""
    for name, own in _saved_form(model).items():
        if name not in tensors or tensors[name].shape != own.shape:
            shape = list(tensors[name].shape) if name in tensors else "missing"
            raise ValueError(f"{name} is {shape}, not {list(own.shape)}")
        own.copy_(tensors[name])


def save_eagle(
    model: EagleModel, folder: Path, target: TargetIdentity, vocabulary_size: int
) -> None:
    """Write the folder; `target` is whom it was made for, with `vocabulary_size` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        **asdict(model.config),
        "target": asdict(target),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in _saved_form(model).items()
    }
    ids = model.vocabulary.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocabulary_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # made for its owner alone, but a draft is there to be shared


def read_eagle_config(folder: Path) -> tuple[EagleConfig, TargetIdentity]:
    """The config, and whom it was made for. Raises ValueError when the folder is no such draft."""
    try:
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        identity = TargetIdentity(**saved["target"])
        names = [field.name for field in fields(EagleConfig)]
        config = _CONFIGS.validate_python({name: saved[name] for name in names})
        _check_shape(config, identity)
        return config, identity
    except ValidationError as error:
        why = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
    except (OSError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ValueError(
        f"{folder}: is no eagle draft with its target's identity inside ({why}); make one with "
        "`outrider prepare-draft`"
    )


def _check_shape(config: EagleConfig, target: TargetIdentity) -> None:
    """Against whom it was made for: what its weights' shapes do not show."""
    if config.hidden_size != target.hidden_size:
        raise ValueError(f"hidden_size {config.hidden_size} is not the target's")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError("num_attention_heads is no multiple of num_key_value_heads")
    layers = config.feature_layers
    if (
        not layers
        or len({*layers}) < len(layers)
        or not {*layers} <= {*range(1, target.layers + 1)}
    ):
        raise ValueError(f"feature_layers {layers} are not some of 1 to {target.layers}, each once")


def load_eagle(folder: Path, target: Path, what: str) -> EagleModel:
    """The draft in `folder` for the target in folder `target`; float32, as trained.

    Raises ValueError when it is none, or made for another target; `what` names it.
    """
    config, made_for = read_eagle_config(folder)
    identity_of(target, target.name).check_same(made_for, what)
    try:
        tensors = load_file(folder / WEIGHTS)
        head = Weights(target).head()
        ids = _own_tokens(tensors["d2t"], config.draft_vocab_size, len(head))
        model = EagleModel(config, _shared_embedding(target), head[ids].float(), ids)
        _load_saved_form(model, tensors)
    except (OSError, LookupError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{what}: {folder / WEIGHTS} does not fit its config: {error}") from error
    return model.requires_grad_(False).eval()


def _own_tokens(d2t: Tensor, size: int, target_size: int) -> Tensor:
    """The target's ids of the draft's tokens: [size], ascending."""
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        raise ValueError(f"d2t is {d2t.dtype} {list(d2t.shape)}, not torch.int64 [{size}]")
    ids = d2t + torch.arange(size)
    if ids[0] < 0 or ids[-1] >= target_size or not (ids.diff() > 0).all():
        raise ValueError(f"d2t does not lead, ascending, to {size} of the target's {target_size}")
    return ids


@lru_cache(maxsize=1)
def _shared_embedding(target: Path) -> Tensor:
    """One for all drafts of a process; it is the largest thing about them."""
    return Weights(target).embedding().to(torch.bfloat16)
