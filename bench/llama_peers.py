"""llama.cpp beside ours, through llama-cpp-python, on the GGUF that our weights were expanded from.

An optional extra, `outrider[llama]`: it is built from source. It computes with the quantised
weights, so that its texts part from the others' sooner or later.
"""

from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.peers import LOOKUP_TOKENS, Decoder
from workers.engine.model_store import default_gguf, is_default

PACKAGE = "llama-cpp-python"
LLAMA = "llama.cpp"
LLAMA_LOOKUP = "llama.cpp lookup"


def installed() -> bool:
    return find_spec("llama_cpp") is not None


def gguf_of(target: str) -> Path | None:
    """The GGUF file that a target is made from; None when it is not made from one."""
    if is_default(target):
        return default_gguf()
    return Path(target) if target.endswith(".gguf") else None


def llama_peers(
    gguf: Path, tokens: int, *, threads: int, eos: Collection[int]
) -> dict[str, Decoder]:
    """Plain decoding and prompt lookup.

    tokens: the most that prompt and answer have together; eos: tokens that end an answer.
    """
    speculative = import_module("llama_cpp.llama_speculative")
    lookup = speculative.LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
    return {
        LLAMA: _decoder(_load(gguf, tokens, threads), eos),
        LLAMA_LOOKUP: _decoder(_load(gguf, tokens, threads, draft_model=lookup), eos),
    }


def _load(gguf: Path, tokens: int, threads: int, **how: Any) -> Any:
    """With room for the guesses beyond the last token; lookup keeps logits for all of it."""
    return import_module("llama_cpp").Llama(
        str(gguf),
        n_ctx=tokens + LOOKUP_TOKENS + 1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        **how,
    )


def _decoder(llama: Any, eos: Collection[int]) -> Decoder:
    def decode(prompt: Sequence[int], max_tokens: int) -> Sequence[int]:
        llama.reset()  # else it goes on from what an earlier prompt shares with this one
        new: list[int] = []
        for token in llama.generate(list(prompt), temp=0.0):
            new.append(token)
            if token in eos or len(new) == max_tokens:
                break
        return new

    return decode
