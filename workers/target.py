"""The target: the model whose words these are, its KV pool, and its ranks."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from joblib import cpu_count
from transformers import AutoTokenizer

from cache.kv_pool import KVPool, Swap
from workers.engine.model import eos_token_ids, load_model
from workers.engine.model_store import resolve
from workers.engine.pack import Pack
from workers.engine.runner import PassOutput, Runner
from workers.engine.tensor_parallel import RankGroup

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Which model, and how to run it.

    model: as `workers.engine.model_store.resolve` takes it; dtype: of weights and all else, or int8
    for weights of that and bfloat16 for all else; device: "cpu" or "cuda";
    kv_tokens: tokens the KV pool holds, of all requests together; host_kv_tokens: tokens that the
    host keeps beside it, of those that made room for others; threads: CPU threads of one rank,
    0 for all cores; context_length: shorter than the model's own, if wanted; feature_layers: the
    hidden states that drafts read, by how many layers they have passed.
    """

    model: str
    dtype: str = "bfloat16"
    device: str = "cpu"
    tensor_parallel: int = 1
    kv_tokens: int = 65536
    host_kv_tokens: int = 0
    threads: int = 0
    context_length: int | None = None
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"target.device: {self.device!r} is not cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("target.device: this machine has no usable GPU; use cpu")
        if self.host_kv_tokens < 0:
            raise ValueError(
                f"target.host_kv_tokens: {self.host_kv_tokens} is not 0 (none) or more"
            )
        if self.threads < 0:
            raise ValueError(f"target.threads: {self.threads} is not 0 (all cores) or more")
        for name in ("tensor_parallel", "kv_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"target.{name}: {getattr(self, name)} is not 1 or more")


# Starts ranks 1 and on, each to run `run_target_rank(spec, rank, address, port)`; returns at once.
RankLauncher = Callable[[TargetSpec, str, int], None]


class Target:
    """The model as the decode loop uses it.

    pool: who owns which KV slots; every rank's store obeys it.
    """

    def __init__(
        self,
        runner: Runner,
        pool: KVPool,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int,
        eos: frozenset[int],
        group: RankGroup | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        self.pool = pool
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.eos_token_ids = eos
        self.feature_layers = feature_layers
        self._runner = runner
        self._group = group

    @property
    def sharded(self) -> bool:
        """Whether there are other ranks."""
        return self._group is not None

    def forward(self, pack: Pack) -> PassOutput:
        """One pass, on all ranks."""
        for swap in self.pool.swaps():
            self._swap(swap)
        if self._group:
            self._group.send(("forward", pack))
        return self._runner.forward(pack)

    def commit(self, sequence: int, keep: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep the sequence's scratch slots `keep`, which hold `tokens`, in every rank's store."""
        moves = self.pool.commit(sequence, keep, tokens)
        if not moves.sources:
            return
        if self._group:
            self._group.send(("move", moves.sources, moves.targets))
        self._runner.store.move(moves.sources, moves.targets)

    def _swap(self, swap: Swap) -> None:
        """Pages to the host or back, in every rank's store."""
        if self._group:
            self._group.send(("swap", swap.pages, swap.places, self.pool.page_size, swap.back))
        self._runner.store.swap(swap.pages, swap.places, self.pool.page_size, back=swap.back)

    def close(self) -> None:
        """End the other ranks."""
        if self._group:
            self._group.send(None)
            self._group.leave()
            self._group = None


def load_target(spec: TargetSpec, launch_ranks: RankLauncher | None = None) -> Target:
    """Load the target, with its other ranks where there are any.

    Raises ValueError when the model cannot be served, saying why.
    """
    group = None
    if spec.tensor_parallel > 1:
        assert launch_ranks is not None, "a tensor-parallel target needs somebody to start ranks"
        address, port = _own_address(), _free_port()
        launch_ranks(spec, address, port)
        group = RankGroup.join(0, spec.tensor_parallel, address, port, _device(spec))
    path = resolve(spec.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    runner, config, eos = _load_runner(spec)
    text = config.get_text_config()
    return Target(
        runner,
        KVPool(_pages(spec.kv_tokens), PAGE_SIZE, _pages(spec.host_kv_tokens)),
        tokenizer,
        vocab_size=text.vocab_size,
        context_length=_context_length(spec, text.max_position_embeddings),
        eos=eos,
        group=group,
        feature_layers=spec.feature_layers,
    )


def run_target_rank(spec: TargetSpec, rank: int, address: str, port: int) -> None:
    """Be rank `rank` of the target until rank 0 ends it."""
    # One visible device per process: transformers picks the device by this number.
    os.environ["LOCAL_RANK"] = "0"
    group = RankGroup.join(rank, spec.tensor_parallel, address, port, _device(spec))
    runner, _, _ = _load_runner(spec)
    group.follow(runner)
    group.leave()


def _load_runner(spec: TargetSpec) -> tuple[Runner, Any, frozenset[int]]:
    torch.set_num_threads(spec.threads or cpu_count())
    model = load_model(
        resolve(spec.model),
        dtype=spec.dtype,
        device=_device(spec),
        tensor_parallel=spec.tensor_parallel,
    )
    runner = Runner(
        model,
        _pages(spec.kv_tokens) * PAGE_SIZE,
        shards=spec.tensor_parallel,
        host_slots=_pages(spec.host_kv_tokens) * PAGE_SIZE,
        feature_layers=spec.feature_layers,
        int8=spec.dtype == "int8",
    )
    return runner, model.config, eos_token_ids(model)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def _context_length(spec: TargetSpec, longest: int) -> int:
    wanted = longest if spec.context_length is None else spec.context_length
    if not 1 <= wanted <= longest:
        raise ValueError(f"target.context_length: {wanted} is not between 1 and {longest}")
    return wanted


def _device(spec: TargetSpec) -> torch.device:
    return torch.device("cuda", 0) if spec.device == "cuda" else torch.device("cpu")


def _own_address() -> str:
    return socket.gethostbyname(socket.gethostname())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
