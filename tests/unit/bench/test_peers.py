"""Peers decode the same prompts, and their numbers are ratios to transformers' own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import peers
from bench.peers import ASSISTED, GENERATE, LOOKUP, Lap, race, summarise, table, transformers_peers

pytestmark = pytest.mark.usefixtures("single_thread")

LAPS = {
    GENERATE: Lap(4.0, [[1, 2], [3, 4]]),
    "ours": Lap(1.0, [[1, 2], [3, 5]]),
}


def test_all_of_transformers_ways_say_the_same(tiny_folder: Path) -> None:
    decoders = transformers_peers(tiny_folder, "float32", assistant_layers=[0])
    assert list(decoders) == [GENERATE, LOOKUP, ASSISTED]
    prompt = [5, 9, 11, 9, 11, 9]
    texts = [list(decode(prompt, 16)) for decode in decoders.values()]
    assert texts[0] == texts[1] == texts[2]
    assert 0 < len(texts[0]) <= 16


def test_without_layers_there_is_no_assistant(tiny_folder: Path) -> None:
    assert list(transformers_peers(tiny_folder, "float32", ())) == [GENERATE, LOOKUP]


def test_every_decoder_runs_on_every_prompt_in_turn() -> None:
    heard: list[tuple[str, int, int]] = []

    def decoder(name: str) -> peers.Decoder:
        def decode(prompt: Sequence[int], max_tokens: int) -> Sequence[int]:
            heard.append((name, prompt[0], max_tokens))
            return [prompt[0]] * max_tokens

        return decode

    done: list[None] = []
    laps = race({"a": decoder("a"), "b": decoder("b")}, [[1], [2]], 9, lambda: done.append(None))
    warm_up, timed = heard[:2], heard[2:]
    assert warm_up == [("a", 1, 8), ("b", 1, 8)]
    assert timed == [("a", 1, 9), ("b", 1, 9), ("a", 2, 9), ("b", 2, 9)]
    assert laps["a"].answers == [[1] * 9, [2] * 9]
    assert laps["a"].seconds > 0
    assert len(done) == 2


def test_the_numbers_are_against_transformers() -> None:
    summary = summarise(LAPS)
    assert summary[GENERATE] == {"tokens_per_second": 1.0, "speedup": 1.0, "exact_match": 1.0}
    assert summary["ours"] == {"tokens_per_second": 4.0, "speedup": 4.0, "exact_match": 0.5}
    assert table(summary).splitlines()[-1] == "| ours | 4.0 | 4.00 | 50% |"
