"""Plain against speculative decoding with random weights of a 7B shape: what passes cost.

Random weights say nothing that a draft could learn. So the eagle draft's passes are run, at its
full shape and for every tree, and then its tokens are replaced: the next one is what plain decoding
has said, with a given probability, and a wrong one otherwise.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deployments.draft_maker import _eagle_config
from tests.tiny import DEVICE, tiny_tokenizer
from workers.calibration import UNCALIBRATED
from workers.completion import Run, run_requests
from workers.draft import Draft, DraftRequest, DraftSpec, DraftUpdate, InlineDraft
from workers.engine.eagle import new_eagle, save_eagle
from workers.engine.sampling import SamplingParams
from workers.engine.weights import identity_of
from workers.load_draft import feature_layers_of, load_draft
from workers.request import GenerationRequest
from workers.scheduler import Limits
from workers.speculation.tree import Proposal, TokenTree
from workers.target import TargetSpec, load_target
from workers.verifier import Verifier, build_verifier


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "7b": Shape(32, 4096, 11008, 32, 32, 32_000),
    "tiny": Shape(2, 64, 96, 4, 2, 512),
}
PROMPT = 128
BATCH = 8
CONTEXT = 2048
DRAFT = "eagle"
_LOGITS_SPREAD = 3.0


def make_models(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """Folders of a target with random weights and of an eagle draft for it, both in bfloat16."""
    target, draft = folder / "target", folder / "draft"
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        LlamaForCausalLM(config).bfloat16().save_pretrained(target)
    tokenizer = tiny_tokenizer()
    words = [f"<w{number}>" for number in range(shape.vocabulary - len(tokenizer))]
    tiny_tokenizer(words).save_pretrained(target)
    every = torch.arange(shape.vocabulary)
    of_draft = _eagle_config(config, shape.vocabulary)
    model = new_eagle(target, of_draft, every, torch.Generator().manual_seed(0))
    # Random logits are all alike, and nothing would be guessed: these are as unlike as real ones.
    model.norm.weight.data *= _LOGITS_SPREAD / (config.initializer_range * shape.hidden**0.5)
    save_eagle(model, draft, identity_of(target, "random"), shape.vocabulary)
    UNCALIBRATED.save(draft)
    return target, draft


class RightWith:
    """A draft that runs another one's passes, and is right about a token with a probability.

    known: what plain decoding says, prompts included.
    """

    def __init__(self, draft: Draft, probability: float, known: Sequence[Sequence[int]]) -> None:
        self.name = draft.name
        self._draft, self._probability = draft, probability
        self._known = {tuple(text[:PROMPT]): text for text in known}
        self._followed: dict[int, Sequence[int]] = {}
        self._random = random.Random(0)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal | None]:
        return [
            proposal and self._corrected(request, proposal)
            for request, proposal in zip(requests, self._draft.propose(requests), strict=True)
        ]

    def commit(self, updates: Sequence[DraftUpdate]) -> None:
        for update in updates:
            if update.start == 0:
                self._followed[update.sequence] = self._known[update.tokens[:PROMPT]]
        self._draft.commit(updates)

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._followed.pop(sequence, None)
        self._draft.forget(sequences)

    def _corrected(self, request: DraftRequest, proposal: Proposal) -> Proposal:
        """A chain as long as the tree has nodes, within the request's depth: what is right about
        the next token is most of what matters for time.
        """
        size = min(len(proposal.tree), request.depth)
        text = self._followed[request.sequence]
        tokens = [*text[request.length : request.length + size]]
        for place, token in enumerate(tokens):
            if self._random.random() >= self._probability:
                tokens[place] = (token + 1) % 256
        confidence = tuple(self._probability ** (1 + place) for place in range(len(tokens)))
        return Proposal(TokenTree.chain(tokens), confidence)


def run(shape: Shape, probability: float, budgets: Sequence[int], tokens: int) -> None:
    """Prints a table."""
    with tempfile.TemporaryDirectory() as folder:
        target_folder, draft_folder = make_models(shape, Path(folder))
        own = DraftSpec(DRAFT, DRAFT, path=str(draft_folder))
        target = load_target(
            TargetSpec(
                str(target_folder),
                device=DEVICE,
                kv_tokens=16_384,
                threads=2,
                feature_layers=feature_layers_of([own]),
            )
        )
        eagle = load_draft(own, target_folder, dtype="bfloat16", threads=2, device=DEVICE)
    limits = Limits(max_running=BATCH, prefill_tokens=PROMPT * BATCH)
    plain = build_verifier(target, {}, limits)
    decode(plain, tokens, None, 0, BATCH)  # kernels are chosen, memory is had
    known = [[*c.request.prompt, *c.tokens] for c in decode(plain, tokens, None, 0, 1).completions]
    draft = RightWith(eagle, probability, known)
    print("together  budget  tokens/s    tau  speed-up  same")
    for together in (1, BATCH):
        base = decode(plain, tokens, None, 0, together)
        _line(together, 0, base, base, known)
        for budget in budgets:
            verifier = build_verifier(target, {DRAFT: InlineDraft(draft)}, limits, [own])
            done = decode(verifier, tokens, DRAFT, budget, together)
            _line(together, budget, done, base, known)


def decode(verifier: Verifier, tokens: int, draft: str | None, budget: int, together: int) -> Run:
    """Greedy answers to random prompts, from an empty KV pool."""
    verifier.forget_prefixes()
    draws = random.Random(1)
    requests = [
        GenerationRequest(
            str(number),
            tuple(draws.randrange(3, 256) for _ in range(PROMPT)),
            tokens,
            SamplingParams(seed=number, temperature=0),
            draft=draft,
            budget=budget,
        )
        for number in range(BATCH)
    ]
    return run_requests(verifier, requests, together=together)


def _line(together: int, budget: int, done: Run, base: Run, known: Sequence[Sequence[int]]) -> None:
    tau = done.tokens / max(1, done.total("steps"))
    both = zip(done.completions, known, strict=True)
    same = sum([*one.request.prompt, *one.tokens] == own for one, own in both)
    print(
        f"{together:8d}  {budget:6d}  {done.tokens_per_second:8.1f}  {tau:5.2f}  "
        f"{done.tokens_per_second / base.tokens_per_second:8.2f}  {same / len(known):4.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--acceptance", type=float, default=0.8, metavar="P")
    parser.add_argument("--budgets", default="4,8,16", metavar="N,N")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="M")
    args: Any = parser.parse_args(arguments)
    budgets = [int(budget) for budget in args.budgets.split(",")]
    run(SHAPES[args.shape], args.acceptance, budgets, args.max_tokens)


if __name__ == "__main__":
    main()
