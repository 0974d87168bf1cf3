"""Trees of several sequences in one pass, beside dense attention over each path alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.eagles import some_tokens
from tests.tiny import DEVICE
from workers.engine.pack import Pack, Segment, chain_parents
from workers.speculation.tree import TokenTree
from workers.target import Target, TargetSpec, load_target

# Below the last committed token, which is the first of a pass.
TREE = TokenTree.from_nodes(some_tokens(12, 9), (-1, -1, -1, 0, 0, 1, 3, 3, 6, 6, 8, 5))
LENGTHS = (1, 17, 40)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return load_target(
        TargetSpec(str(tiny_folder), "float32", device=DEVICE, kv_tokens=1024, threads=1)
    )


def prompt_of(number: int) -> tuple[int, ...]:
    return some_tokens(LENGTHS[number], number)


def segment_of(target: Target, number: int) -> Segment:
    """All but the prompt's last token are committed; that one and the tree are new."""
    tokens = (prompt_of(number)[-1], *TREE.tokens)
    target.pool.reserve(number, len(tokens))
    return Segment(
        tokens,
        target.pool.committed(number),
        (-1, *(parent + 1 for parent in TREE.parents)),
        target.pool.extents(number),
        tuple(range(len(tokens))),
    )


def committed(target: Target, number: int) -> None:
    tokens = prompt_of(number)[:-1]
    target.pool.open(number)
    if tokens:
        target.pool.reserve(number, len(tokens))
        extents = target.pool.extents(number)
        chain = chain_parents(len(tokens))
        target.forward(Pack((Segment(tokens, 0, chain, extents, ()),)))
        target.commit(number, range(len(tokens)), tokens)


def dense(model: LlamaForCausalLM, number: int, node: int) -> Tensor:
    """After a node's whole path, on its own."""
    path = [TREE.tokens[own] for own in TREE.path(node)]
    tokens = torch.tensor([[*prompt_of(number), *path]], device=DEVICE)
    with torch.inference_mode():
        logits: Tensor = model(tokens).logits[0, -1]
    return logits


def test_every_node_sees_its_own_path_alone(target: Target, tiny_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").to(DEVICE)
    for number in range(len(LENGTHS)):
        committed(target, number)
    segments = [segment_of(target, number) for number in range(len(LENGTHS))]
    found = target.forward(Pack(tuple(segments))).logits.view(len(LENGTHS), 1 + len(TREE), -1)
    for number, rows in enumerate(found):
        for node, row in enumerate(rows, start=-1):
            torch.testing.assert_close(row, dense(model, number, node), rtol=0, atol=1e-4)
