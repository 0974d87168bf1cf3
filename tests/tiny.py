"""A tiny random target, made anew and always the same: a folder such as people download.

Its vocabulary is all bytes and a few merges, so that one character may take several tokens and one
token may hold several characters. Its weights are drawn wide, so that p is neither flat nor
certain, and its layers add little to the embeddings, so that greedy text falls into loops.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("Ġ", "the"), ("e", "r"), ("a", "n")]
MERGES += [("in", "g"), ("an", "d"), ("ä", "½"), ("o", "n"), ("Ġ", "s"), ("r", "e"), ("l", "l")]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 160

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")
"""Where targets and drafts run in tests that any device must pass; see tests/gpu/run.sh."""


def tiny_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE; `extra` tokens make it another vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [EOS, USER, ASSISTANT, *alphabet, *(a + b for a, b in MERGES), *extra]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(w, special=True) for w in (EOS, USER, ASSISTANT)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(vocabulary: int, **changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.5,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**settings | changes)


def make_target(folder: Path, seed: int = 0, *, extra: Sequence[str] = (), **changes: Any) -> Path:
    """Save a Llama with random float32 weights, and its tokenizer; `changes` are to its config."""
    tokenizer = tiny_tokenizer(extra)
    vocabulary = changes.pop("vocab_size", len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(tiny_config(vocabulary, **changes))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread; what was set before is set again."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
