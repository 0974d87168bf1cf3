"""A target over two ranks, as Ray actors: the same text, and one dead rank is a new set."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from tests.serving import RESTART_S, chunks, processes, text_of

ASK = {"prompt": "the thing and", "temperature": 0, "max_tokens": 60, "logit_bias": {"0": -100}}


@pytest.fixture(scope="module")
def split(deploy: Callable[..., str], settings: dict[str, Any]) -> Iterator[str]:
    target = {**settings["target"], "tensor_parallel": 2}
    drafts = [{"name": "self", "kind": "ngram"}]
    yield deploy({**settings, "target": target, "drafts": drafts}, "split")
    serve.delete("split")


def ask(url: str, draft: str, **fields: Any) -> str:
    body = {**ASK, **fields, "speculation": {"draft": draft}}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=RESTART_S)
    assert response.status_code == 200, response.text
    return text_of(response.json())


@pytest.mark.timeout(2 * RESTART_S)
def test_two_ranks_say_what_one_says_and_restart_as_one(url: str, split: str) -> None:
    alone = ask(url, "none")
    assert ask(split, "none") == alone
    assert ask(split, "self") == alone

    body = {**ASK, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{split}/v1/completions", json=body, timeout=RESTART_S) as response:
        stream = chunks(response)
        text = text_of(next(stream))
        (rank,) = processes("ray::TargetRank")
        os.kill(rank, signal.SIGKILL)
        text += "".join(text_of(chunk) for chunk in stream)
    assert text == ask(url, "none", max_tokens=900)
    assert ask(split, "self") == alone
    assert processes("ray::TargetRank") != [rank]
