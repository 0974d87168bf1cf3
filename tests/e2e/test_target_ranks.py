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


@pytest.mark.timeout(4 * RESTART_S)
def test_two_ranks_say_what_one_says_and_restart_as_one(url: str, split: str) -> None:
    alone, long = ask(url, "none"), ask(url, "none", max_tokens=900)
    assert ask(split, "none") == alone
    assert ask(split, "self") == alone
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        (rank,) = processes("ray::TargetRank")
        assert streamed_through(split, lambda rank=rank, fault=fault: os.kill(rank, fault)) == long
        assert ask(split, "self") == alone
        assert rank not in processes("ray::TargetRank")


def streamed_through(url: str, fault: Callable[[], None]) -> str:
    """A streamed text in the midst of which something happens."""
    body = {**ASK, "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=RESTART_S) as response:
        stream = chunks(response)
        text = text_of(next(stream))
        fault()
        return text + "".join(text_of(chunk) for chunk in stream)
