"""Prompt files: what is read, and what is refused with the line's number."""

import json
from pathlib import Path

import pytest

from deployments.prompt_file import read_prompts, write_prompts


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_and_domain(tmp_path: Path) -> None:
    path = written(tmp_path / "code.jsonl", '{"prompt": "a", "id": "1"}', "", '{"prompt": "b"}')
    assert read_prompts(path).domain == "code"
    assert read_prompts(path).prompts == ("a", "b")
    assert read_prompts(path, limit=1).prompts == ("a",)


def test_unicode_line_separators_are_part_of_a_prompt(tmp_path: Path) -> None:
    prompt = "one\u2028two\x85three"
    path = written(tmp_path / "en.jsonl", json.dumps({"prompt": prompt}, ensure_ascii=False))
    assert read_prompts(path).prompts == (prompt,)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    prompts = ("one\u2028two", "🦜", '"quoted"')
    write_prompts(tmp_path / "en.jsonl", prompts)
    assert read_prompts(tmp_path / "en.jsonl").prompts == prompts


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", '{"text": "a"}', '{"prompt": " "}', "3", '{"prompt": "half \\ud83e"}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "math.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds none"):
        read_prompts(written(tmp_path / "empty.jsonl", ""))
