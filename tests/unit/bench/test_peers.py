"""Peers decode the same prompts, and their numbers are ratios to transformers' own."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import peers
from bench.peers import (
    ASSISTED,
    GENERATE,
    LOOKUP,
    Lap,
    layers_of,
    load_assistant,
    race,
    summarise,
    table,
    transformers_peers,
)
from tests.tiny import make_target
from workers.engine.vocabulary import Vocabulary
from workers.training.ngram_table import NgramTable

pytestmark = pytest.mark.usefixtures("single_thread")

LAPS = {
    GENERATE: Lap(4.0, [[1, 2], [3, 4]]),
    "ours": Lap(1.0, [[1, 2], [3, 5]]),
}


@pytest.mark.parametrize("made_of", ["layers", "draft"])
def test_all_of_transformers_ways_say_the_same(
    tiny_folder: Path, stranger_folder: Path, made_of: str
) -> None:
    if made_of == "layers":
        assistant = layers_of(tiny_folder, "float32", [0])
    else:
        assistant = load_assistant(stranger_folder, tiny_folder, "float32")
    decoders = transformers_peers(tiny_folder, "float32", assistant)
    assert list(decoders) == [GENERATE, LOOKUP, ASSISTED]
    prompt = [5, 9, 11, 9, 11, 9]
    texts = [list(decode(prompt, 16)) for decode in decoders.values()]
    assert texts[0] == texts[1] == texts[2]
    assert 0 < len(texts[0]) <= 16


def test_without_an_assistant_nothing_is_assisted(tiny_folder: Path) -> None:
    assert list(transformers_peers(tiny_folder, "float32", None)) == [GENERATE, LOOKUP]


def test_an_assistant_is_an_lm_draft_for_this_target(tiny_folder: Path, tmp_path: Path) -> None:
    NgramTable.build([[1, 2]], Vocabulary(5, "x"), {}).save(tmp_path / "table")
    for folder in (tmp_path / "table", tmp_path / "nothing"):
        with pytest.raises(ValueError, match=f"^assistant: {folder} holds no lm draft"):
            load_assistant(folder, tiny_folder, "float32")
    other = make_target(tmp_path / "other", extra=["word"])
    with pytest.raises(ValueError, match="^assistant: its vocabulary"):
        load_assistant(other, tiny_folder, "float32")


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
