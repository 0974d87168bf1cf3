"""llama.cpp as a decoder. What needs the extra runs where it is installed."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from bench.llama_peers import LLAMA, LLAMA_LOOKUP, _decoder, gguf_of, installed, llama_peers
from workers.engine.model_store import DEFAULT_TARGET

PROMPT = [5, 900, 31, 77, 900, 31, 77, 900, 31]


def test_it_reads_the_file_that_the_target_is_made_from() -> None:
    default = gguf_of(DEFAULT_TARGET)
    assert default is not None
    assert default.read_bytes()[:4] == b"GGUF"
    assert gguf_of("/models/other.gguf") == Path("/models/other.gguf")
    assert gguf_of("/models/other") is None


class Model:
    """What `llama_cpp.Llama` looks like from here."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], dict[str, float]]] = []

    def reset(self) -> None:
        self.calls.append(("reset", [], {}))

    def generate(self, tokens: list[int], **how: float) -> Iterator[int]:
        self.calls.append(("generate", tokens, how))
        return count(100)


def test_every_answer_begins_with_its_whole_prompt() -> None:
    """Otherwise prefill would be left out of all but the first run of a prompt."""
    model = Model()
    _decoder(model, eos={2})((5, 6), 3)
    assert model.calls == [("reset", [], {}), ("generate", [5, 6], {"temp": 0.0})]


def test_an_answer_ends_at_its_cap_or_with_the_end_of_the_sequence() -> None:
    assert _decoder(Model(), eos={2})((5, 6), 3) == [100, 101, 102]
    assert _decoder(Model(), eos={7, 101})((5, 6), 3) == [100, 101]


@pytest.mark.skipif(not installed(), reason="needs outrider[llama]")
def test_it_decodes_greedily_up_to_the_end() -> None:
    gguf = gguf_of(DEFAULT_TARGET)
    assert gguf is not None

    def decoders(*eos: int) -> list[list[int]]:
        made = llama_peers(gguf, len(PROMPT) + 12, threads=1, eos=frozenset(eos))
        assert list(made) == [LLAMA, LLAMA_LOOKUP]
        return [list(decode(PROMPT, 12)) for decode in made.values() for _ in range(2)]

    plain, again, lookup, lookup_again = decoders()
    assert len(plain) == 12
    assert plain == again == lookup == lookup_again
    stop = plain[5]
    assert decoders(stop)[0] == plain[: plain.index(stop) + 1]
