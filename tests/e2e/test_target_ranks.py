"""A target over two ranks, as Ray actors: the same text, and one dead rank is a new set."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from tests.serving import processes, text_of, wait_until

ASK = {"prompt": "the thing and", "temperature": 0, "max_tokens": 60, "logit_bias": {"0": -100}}


@pytest.fixture(scope="module")
def split(deploy: Callable[..., str], settings: dict[str, Any]) -> Iterator[str]:
    target = {**settings["target"], "tensor_parallel": 2}
    drafts = [{"name": "self", "kind": "ngram"}]
    yield deploy({**settings, "target": target, "drafts": drafts}, "split")
    serve.delete("split")


def ask(url: str, draft: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/completions", json={**ASK, "speculation": {"draft": draft}}, timeout=60
    )


def test_two_ranks_say_what_one_says_and_restart_as_one(url: str, split: str) -> None:
    alone = text_of(ask(url, "none").json())
    assert text_of(ask(split, "none").json()) == alone
    assert text_of(ask(split, "self").json()) == alone

    (rank,) = processes("ray::TargetRank")
    os.kill(rank, signal.SIGKILL)
    # Whoever asks now gets an orderly error, ...
    assert wait_until(lambda: ask(split, "none").status_code in (500, 503))
    # ... until Serve has replaced the replica and its ranks.
    assert wait_until(lambda: ask(split, "self").status_code == 200, 90)
    assert text_of(ask(split, "self").json()) == alone
    assert processes("ray::TargetRank") != [rank]
