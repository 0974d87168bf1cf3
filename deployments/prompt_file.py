"""Prompt files, as benchmarks and draft making read them: JSON lines, each with a `prompt`."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Half a character: JSON can hold one, a text cannot.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PromptFile:
    """The prompts of one file; the domain is the file's stem."""

    domain: str
    prompts: tuple[str, ...]


def read_prompts(path: Path, limit: int | None = None) -> PromptFile:
    """The first `limit` prompts of a file.

    Raises ValueError naming the line that is none.
    """
    if not path.is_file():
        raise ValueError(f"prompts: there is no file {path}")
    # Not splitlines: a JSON string may hold separators that Unicode counts as line ends.
    lines = path.read_text(encoding="utf-8").split("\n")
    prompts = [
        _prompt(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts: {path} holds none")
    return PromptFile(path.stem, tuple(prompts[:limit]))


def _prompt(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f'prompts: line {number} of {path} is no JSON object with a "prompt"'
        ) from error
    if not isinstance(prompt, str) or not prompt.strip() or _SURROGATE.search(prompt):
        raise ValueError(f"prompts: the prompt in line {number} of {path} is no text")
    return prompt


def write_prompts(path: Path, prompts: Iterable[str]) -> None:
    """A file that `read_prompts` reads."""
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    path.write_text("".join(lines), encoding="utf-8")


def chat_ids(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """A prompt as the first turn of a chat, or as it is where the target has no chat template."""
    if not tokenizer.chat_template:
        return tuple(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
