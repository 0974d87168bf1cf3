"""Fingerprints: what is read, what MiniLM cannot read, and the way over the wire."""

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decision import RouteRequest
from router.fingerprint import (
    CONTEXT_CHARACTERS,
    DIM,
    MEANING_DIM,
    QUERY_CHARACTERS,
    Fingerprint,
    MiniLMFingerprinter,
    blend,
    character_vector,
    key_of,
    text_of,
)

BAKE, SLEEP = "如何烤面包？", "怎样睡得更好？"  # "how to bake bread", "how to sleep better"


def test_the_query_and_the_first_characters_of_the_context_are_read() -> None:
    assert text_of(RouteRequest("q", "c" * 500)) == "q\n" + "c" * CONTEXT_CHARACTERS
    assert text_of(RouteRequest("q" * 5000, "")) == "q" * QUERY_CHARACTERS
    assert text_of(RouteRequest("", "c")) == "c"
    assert text_of(RouteRequest("half a pair: \ud800", "")) == "half a pair: ?"


def test_keys_name_texts() -> None:
    assert key_of("a") == key_of("a") != key_of("b")
    assert len(key_of("")) == 16


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_character_vectors_are_unit_vectors_or_nothing(text: str) -> None:
    norm = float(np.linalg.norm(character_vector(text)))
    assert norm == pytest.approx(1, abs=1e-5) or norm == 0
    assert norm > 0 or len("".join(text.split())) != 1


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_the_cosine_of_blends_is_the_weighted_mean_of_the_halves(
    one: float, other: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    a, b = (vector / np.linalg.norm(vector) for vector in random.normal(size=(2, MEANING_DIM)))
    c, d = character_vector("烤面包"), character_vector("烤蛋糕")
    first, second = blend(a, c, one), blend(b, d, other)
    assert float(np.linalg.norm(first)) == pytest.approx(1, abs=1e-5)
    expected = np.sqrt((1 - one) * (1 - other)) * (a @ b) + np.sqrt(one * other) * (c @ d)
    assert float(first @ second) == pytest.approx(float(expected), abs=1e-5)


@settings(deadline=None)
@given(st.integers(0, 999))
def test_the_wire_keeps_key_and_direction(seed: int) -> None:
    vector = np.random.default_rng(seed).normal(size=DIM).astype(np.float32)
    vector /= np.linalg.norm(vector)
    sent = Fingerprint("key", vector)
    received = Fingerprint.from_wire(sent.to_wire())
    assert received.key == "key"
    assert float(received.vector @ vector) > 1 - 2e-4
    assert len(sent.to_wire()) < 720


@pytest.mark.parametrize("wire", ["", "key", "key.", "key.!", "key.abc", "key.AAAA", "key.\u00e9"])
def test_a_wire_that_is_no_fingerprint_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        Fingerprint.from_wire(wire)


def test_similar_english_prompts_lie_close(minilm: MiniLMFingerprinter) -> None:
    texts = (
        "Write a Python function that reverses a string.",
        "Please write a Python function to reverse a string",
        "What is the capital of France?",
    )
    one, same, other = (minilm.embed(text).vector for text in texts)
    assert one @ same > 0.9
    assert one @ other < 0.5
    assert not one[MEANING_DIM:].any(), "MiniLM read all of it"


def test_chinese_prompts_that_minilm_cannot_tell_apart_lie_apart(
    minilm: MiniLMFingerprinter,
) -> None:
    bake, sleep = minilm.embed(BAKE).vector, minilm.embed(SLEEP).vector
    assert bake[MEANING_DIM:].any()
    assert bake @ sleep < 0.7
    assert bake @ minilm.embed("如何烤面包?").vector > 0.85


@pytest.mark.parametrize("text", ["", " \n", "🙂", "x" * 100_000, "\ud800"])
def test_any_text_has_a_finite_unit_vector(minilm: MiniLMFingerprinter, text: str) -> None:
    vector = minilm.embed(text_of(RouteRequest(text, text))).vector
    assert vector.shape == (DIM,) and vector.dtype == np.float32
    assert float(np.linalg.norm(vector)) == pytest.approx(1, abs=1e-4)


async def test_embedding_does_not_block_the_event_loop(minilm: MiniLMFingerprinter) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    started = time.monotonic()
    await asyncio.gather(*(minilm.fingerprint(RouteRequest("word " * 300, "")) for _ in range(8)))
    spent = time.monotonic() - started
    ticking.cancel()
    assert ticks > 4, f"in {spent:.2f} s"


async def test_texts_that_nobody_waits_for_any_more_are_not_embedded(
    minilm: MiniLMFingerprinter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time, and those whose clients gave up while they were in line not at all."""
    embedded: list[str] = []
    here, there = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def embed(text: str) -> Fingerprint:
        embedded.append(text)
        loop.call_soon_threadsafe(here.set)
        assert there.wait(10)
        return Fingerprint("key", np.zeros(1, np.float32))

    monkeypatch.setattr(minilm, "embed", embed)
    waiting = [
        asyncio.create_task(minilm.fingerprint(RouteRequest(query=f"{n}", context="")))
        for n in range(20)
    ]
    await here.wait()
    for task in waiting[:19]:  # the first is being embedded already
        task.cancel()
    await asyncio.gather(*waiting[:19], return_exceptions=True)
    there.set()
    await waiting[19]
    assert embedded == ["0", "19"]
