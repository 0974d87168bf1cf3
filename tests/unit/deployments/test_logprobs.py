"""Tokens as words: their text, their bytes, and where they begin."""

import json
from typing import Any

from deployments.logprobs import Words, chat_logprobs, completion_logprobs
from tests.tiny import tiny_tokenizer
from workers.request import TokenLogprob

TOKENIZER = tiny_tokenizer()
TEXT = "the king: 你好 🦜"
IDS = TOKENIZER(TEXT, add_special_tokens=False)["input_ids"]


def spelt(offset: int = 0) -> Any:
    told = [TokenLogprob(token, -0.5, ((token, -0.5), (IDS[0], -1.5))) for token in IDS]
    return Words(TOKENIZER).spell(told, offset)


def test_the_bytes_of_all_tokens_are_the_text() -> None:
    content = chat_logprobs(spelt())["content"]
    assert bytes(byte for each in content for byte in each["bytes"]).decode() == TEXT
    broken = [each for each in content if "\ufffd" in each["token"]]
    assert broken, "else this would not say that parts of characters have bytes, too"
    assert [each["top_logprobs"][0]["bytes"] for each in content] == [
        each["bytes"] for each in content
    ]
    json.dumps(content)


def test_a_vocabulary_that_does_not_write_bytes_has_none_for_broken_characters() -> None:
    class Foreign:
        def decode(self, token_ids: Any) -> str:
            return "\ufffd"

        def convert_ids_to_tokens(self, ids: int) -> str:
            return "\u2581\u4f60"

    (word,) = Words(Foreign()).spell([TokenLogprob(1, -1.0, ())], 0)
    assert chat_logprobs([word])["content"][0]["bytes"] is None


def test_a_completion_says_where_each_token_begins() -> None:
    told = completion_logprobs(spelt(offset=100))
    assert told["tokens"] == [TOKENIZER.decode([token]) for token in IDS]
    assert told["text_offset"][:3] == [
        100 + len("".join(told["tokens"][:place])) for place in range(3)
    ]
    assert told["token_logprobs"] == [-0.5] * len(IDS)


def test_the_token_that_came_is_told_of_though_it_is_none_of_the_likeliest() -> None:
    (word,) = Words(TOKENIZER).spell([TokenLogprob(IDS[0], -4.0, ((IDS[1], -0.1),))], 0)
    (top,) = completion_logprobs([word])["top_logprobs"]
    assert top == {TOKENIZER.decode([IDS[1]]): -0.1, TOKENIZER.decode([IDS[0]]): -4.0}


def test_special_tokens_have_names() -> None:
    (word,) = Words(TOKENIZER).spell([TokenLogprob(TOKENIZER.eos_token_id, -1.0, ())], 0)
    assert word.word.text == TOKENIZER.eos_token
