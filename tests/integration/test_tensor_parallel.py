"""Two ranks of a tensor-parallel target say what one says."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.tiny import make_target
from workers.completion import run_requests
from workers.draft import DraftSpec, InlineDraft
from workers.engine.pack import Pack, Segment, chain_parents, tree_parents
from workers.engine.sampling import SamplingParams
from workers.load_draft import load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.target import Target, TargetSpec, load_target, run_target_rank
from workers.verifier import build_verifier

PROMPT = (5, 9, 11, 9, 11, 7)


@contextmanager
def target_of(folder: Path, ranks: int) -> Iterator[Target]:
    """A target whose other ranks are processes of this machine, and gone afterwards."""
    context = multiprocessing.get_context("spawn")
    others: list[multiprocessing.process.BaseProcess] = []

    def launch(spec: TargetSpec, address: str, port: int) -> None:
        for rank in range(1, ranks):
            process = context.Process(target=run_target_rank, args=(spec, rank, address, port))
            process.start()
            others.append(process)

    spec = TargetSpec(
        str(folder),
        dtype="float32",
        tensor_parallel=ranks,
        kv_tokens=512,
        host_kv_tokens=64,
        threads=1,
        feature_layers=(1, 2),
    )
    target = load_target(spec, launch)
    try:
        yield target
    finally:
        target.close()
        for process in others:
            process.join(timeout=30)
            assert process.exitcode == 0


def passes(target: Target) -> list[torch.Tensor]:
    """A prompt, a tree of which a branch is kept, and what follows it: logits and hidden states of
    each pass.
    """
    pool = target.pool
    pool.open(0)
    found = []
    for tokens, parents, keep in (
        (PROMPT, chain_parents(len(PROMPT)), range(len(PROMPT))),
        ((1, 2, 3, 4, 5), tree_parents((-1, -1, 1, 2)), (0, 2, 3)),
        ((9, 10), tree_parents((-1,)), ()),
    ):
        start = pool.committed(0)
        pool.reserve(0, len(tokens))
        rows = tuple(range(len(tokens)))
        segment = Segment(tokens, start, parents, pool.extents(0), rows)
        output = target.forward(Pack((segment,)))
        found += [output.logits, output.features]
        target.commit(0, keep, [tokens[index] for index in keep])
    pool.close(0)
    return found


def recalled(target: Target) -> torch.Tensor:
    """Logits after a page that made room for others on all ranks, and was brought back."""
    pool, tokens = target.pool, tuple(range(1, 18))
    pool.open(0)
    for some, rows in ((tokens[:16], ()), (tokens[16:], (0,))):
        start = pool.committed(0)
        pool.reserve(0, len(some))
        segment = Segment(some, start, chain_parents(len(some)), pool.extents(0), rows)
        output = target.forward(Pack((segment,)))
        target.commit(0, range(len(some)), some)
    pool.close(0)
    pool.open(1)
    pool.reserve(1, pool.pages * pool.page_size)
    assert pool.host_pages_in_use > 0
    pool.close(1)
    pool.open(2)
    assert pool.recall(2, tokens) == 16
    pool.reserve(2, 1)
    segment = Segment(tokens[16:], 16, (-1,), pool.extents(2), (0,))
    again = target.forward(Pack((segment,)))
    pool.close(2)
    torch.testing.assert_close(again.logits, output.logits, atol=0, rtol=0)
    return again.logits


def answer(target: Target, folder: Path, temperature: float) -> list[int]:
    draft = InlineDraft(load_draft(DraftSpec("own", "ngram"), folder))
    verifier = build_verifier(target, {"own": draft}, Limits())
    params = SamplingParams(seed=3, temperature=temperature)
    request = GenerationRequest("one", PROMPT, 40, params, draft="own", budget=6)
    (completion,) = run_requests(verifier, [request]).completions
    assert completion.stats is not None
    assert completion.stats.drafted > 0
    return completion.tokens


def test_two_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a torch that was built for CUDA answers, also on a machine without a GPU.
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda *_: torch.device("cuda"))
    folder = make_target(tmp_path / "target")
    with target_of(folder, 1) as target:
        alone = [*passes(target), recalled(target)]
        texts = [answer(target, folder, temperature) for temperature in (0.0, 0.8)]
    with target_of(folder, 2) as target:
        for one, two in zip(alone, [*passes(target), recalled(target)], strict=True):
            # Sums of some 32 terms are rounded by the size of these, in an order of the CPU's own.
            close = 32 * torch.finfo(torch.float32).eps * float(one.abs().max())
            torch.testing.assert_close(two, one, atol=close, rtol=0)
        assert [answer(target, folder, temperature) for temperature in (0.0, 0.8)] == texts
