"""Equal size is not equal vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.tiny import tiny_tokenizer
from workers.engine.vocabulary import Vocabulary, vocabulary_of


def saved(folder: Path, vocab: Any, added: list[dict[str, Any]] | None = None) -> Vocabulary:
    folder.mkdir(exist_ok=True)
    content: dict[str, Any] = {"model": {"vocab": vocab}}
    if added is not None:
        content["added_tokens"] = added
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return vocabulary_of(folder)


def test_it_counts_added_tokens_and_names_every_token(tmp_path: Path) -> None:
    plain = saved(tmp_path, {"a": 0, "b": 1})
    assert plain.size == 2
    more = saved(tmp_path, {"a": 0, "b": 1}, [{"content": "<x>", "id": 5}])
    assert more.size == 6
    assert more.fingerprint != plain.fingerprint


def test_order_in_the_file_does_not_matter_but_ids_do(tmp_path: Path) -> None:
    one = saved(tmp_path, {"a": 0, "b": 1})
    assert saved(tmp_path, {"b": 1, "a": 0}) == one
    swapped = saved(tmp_path, {"a": 1, "b": 0})
    assert swapped.size == one.size
    with pytest.raises(ValueError, match=r"^drafts\.d: its vocabulary \(2 tokens.* not the target"):
        one.check_same(swapped, "drafts.d")
    one.check_same(one, "drafts.d")


def test_a_unigram_model_lists_its_tokens_by_id(tmp_path: Path) -> None:
    assert saved(tmp_path, [["a", -1.0], ["b", -2.0]]) == saved(tmp_path, {"a": 0, "b": 1})


def test_an_added_token_may_be_listed_in_the_model_too(tmp_path: Path) -> None:
    assert saved(tmp_path, {"a": 0, "<x>": 1}, [{"content": "<x>", "id": 1}]) == saved(
        tmp_path, {"a": 0, "<x>": 1}
    )


def test_real_tokenizers_are_read(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "one")
    tiny_tokenizer().save_pretrained(tmp_path / "same")
    tiny_tokenizer(extra=["zz"]).save_pretrained(tmp_path / "other")
    one = vocabulary_of(tmp_path / "one")
    assert one.size == len(tiny_tokenizer())
    assert vocabulary_of(tmp_path / "same") == one != vocabulary_of(tmp_path / "other")
    words = Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    words.save(str(tmp_path / "tokenizer.json"))
    assert vocabulary_of(tmp_path).size == 2


def test_without_a_tokenizer_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*save the fast tokenizer"):
        vocabulary_of(tmp_path)
