"""Packed passes against transformers' own eager attention, one root-to-node path at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM

from cache.kv_pool import KVPool
from tests.tiny import make_target, tiny_config
from workers.engine import passes
from workers.engine.model import load_model
from workers.engine.pack import Pack, Segment, chain_parents
from workers.engine.runner import Runner

CPU = torch.device("cpu")
PAGE = 4
SLOTS = 400
VOCABULARY = 80
CLOSE = {"rtol": 0.0, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("single_thread")


@dataclass
class Engine:
    """A runner, its book of slots, and the same model as transformers would run it."""

    runner: Runner
    eager: Any
    pool: KVPool = field(default_factory=lambda: KVPool(SLOTS // PAGE, PAGE))
    unlike: Iterator[int] = field(default_factory=count)

    def dense(self, tokens: Sequence[int]) -> Tensor:
        """Logits after every token of a sequence on its own: [tokens, vocabulary]."""
        with torch.inference_mode():
            logits: Tensor = self.eager(torch.tensor([list(tokens)])).logits[0]
        return logits

    def segment(
        self, sequence: int, tokens: Sequence[int], parents: Sequence[int], rows: Sequence[int]
    ) -> Segment:
        self.pool.reserve(sequence, len(tokens))
        return Segment(
            tuple(tokens),
            self.pool.committed(sequence),
            tuple(parents),
            self.pool.extents(sequence),
            tuple(rows),
        )

    def commit(self, sequence: int, keep: Sequence[int]) -> bool:
        """Whether anything had to be moved. No two sequences are taken to say the same."""
        moves = self.pool.commit(sequence, keep, [next(self.unlike) for _ in keep])
        if moves.sources:
            self.runner.store.move(moves.sources, moves.targets)
        return bool(moves.sources)

    def prefill(self, sequence: int, tokens: Sequence[int]) -> Tensor:
        chunk = self.segment(sequence, tokens, chain_parents(len(tokens)), range(len(tokens)))
        logits = self.runner.forward(Pack((chunk,))).logits
        self.commit(sequence, range(len(tokens)))
        return logits

    def clear(self) -> None:
        for sequence in self.pool.sequences():
            self.pool.close(sequence)


@pytest.fixture(scope="module")
def engine_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    made: dict[int, Engine] = {}

    def make(kv_heads: int) -> Engine:
        if kv_heads not in made:
            folder = make_target(
                tmp_path_factory.mktemp("models") / str(kv_heads),
                vocab_size=VOCABULARY,
                num_key_value_heads=kv_heads,
                max_position_embeddings=SLOTS,
                initializer_range=0.2,  # logits of size 1: the tolerance is absolute
            )
            eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            runner = Runner(load_model(folder, dtype="float32", device=CPU), SLOTS)
            made[kv_heads] = Engine(runner, eager.eval())
        made[kv_heads].clear()
        return made[kv_heads]

    return make


TOKEN = st.integers(0, VOCABULARY - 1)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Tokens and parents of a root token with any tree below it."""
    size = draw(st.integers(1, 10))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    return draw(st.lists(TOKEN, min_size=size, max_size=size)), parents


def line(parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*line(parents, parents[node]), node]


SEQUENCES = st.lists(st.tuples(st.lists(TOKEN, max_size=20), trees()), min_size=1, max_size=3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@given(sequences=SEQUENCES, pieces=st.integers(3, 9), data=st.data())
@settings(max_examples=15)
def test_every_path_of_every_tree_is_as_if_it_ran_alone(
    engine_with: Callable[..., Engine],
    kv_heads: int,
    sequences: list[tuple[list[int], tuple[list[int], list[int]]]],
    pieces: int,
    data: st.DataObject,
) -> None:
    engine = engine_with(kv_heads)
    for number in range(len(sequences)):
        engine.pool.open(number)
    # Prompts grow in turns, so that the sequences' pages lie scattered among each other.
    logits: dict[int, list[Tensor]] = {number: [] for number in range(len(sequences))}
    for start in range(0, 20, pieces):
        for number, (prompt, _) in enumerate(sequences):
            if chunk := prompt[start : start + pieces]:
                logits[number].append(engine.prefill(number, chunk))
    for number, (prompt, _) in enumerate(sequences):
        if prompt:
            torch.testing.assert_close(torch.cat(logits[number]), engine.dense(prompt), **CLOSE)
    pack = Pack(
        tuple(
            engine.segment(number, tokens, parents, range(len(tokens)))
            for number, (_, (tokens, parents)) in enumerate(sequences)
        )
    )
    parts = pack.split_rows(engine.runner.forward(pack).logits)
    for (prompt, (tokens, parents)), part in zip(sequences, parts, strict=True):
        for leaf in set(range(len(tokens))) - set(parents):
            path = line(parents, leaf)
            expected = engine.dense([*prompt, *(tokens[node] for node in path)])
            torch.testing.assert_close(part[path], expected[len(prompt) :], **CLOSE)

    # One path stays; what follows it must see that path and nothing else.
    for number, (prompt, (tokens, parents)) in enumerate(sequences):
        kept = line(parents, data.draw(st.integers(0, len(tokens) - 1)))
        engine.commit(number, kept)
        after = engine.prefill(number, [7])
        whole = [*prompt, *(tokens[step] for step in kept), 7]
        torch.testing.assert_close(after[0], engine.dense(whole)[-1], **CLOSE)
    engine.pool.check_integrity()


def test_the_paths_above_are_scattered_and_moved(engine_with: Callable[..., Engine]) -> None:
    """The same in one known example, where it is certain that both happen."""
    engine = engine_with(2)
    engine.pool = KVPool(SLOTS // PAGE, PAGE)
    others = range(2, 2 + engine.pool.pages)
    for other in others:
        engine.pool.open(other)
        engine.pool.reserve(other, PAGE)
    for other in others[::2]:  # no two free pages are neighbours
        engine.pool.close(other)
    engine.pool.open(0)
    engine.pool.open(1)
    prompts = [list(range(9)), list(range(20, 33))]
    for start in range(0, 13, 3):
        for number, prompt in enumerate(prompts):
            if chunk := prompt[start : start + 3]:
                engine.prefill(number, chunk)
    tokens, parents = [40, 41, 42, 43, 44], [-1, 0, 0, 2, 1]
    segments = [engine.segment(n, tokens, parents, [3, 4]) for n in range(2)]
    assert all(len(segment.extents) > 1 for segment in segments)
    logits = engine.runner.forward(Pack(tuple(segments))).logits
    for number, prompt in enumerate(prompts):
        for row, path in enumerate(([40, 42, 43], [40, 41, 44])):
            expected = engine.dense([*prompt, *path])[-1]
            torch.testing.assert_close(logits[2 * number + row], expected, **CLOSE)
        assert engine.commit(number, [0, 2, 3])
        after = engine.prefill(number, [50])
        expected = engine.dense([*prompt, 40, 42, 43, 50])[-1]
        torch.testing.assert_close(after[0], expected, **CLOSE)


def test_rows_that_nobody_wants_are_not_computed(engine_with: Callable[..., Engine]) -> None:
    engine = engine_with(2)
    engine.pool.open(0)
    chunk = engine.segment(0, [1, 2, 3], chain_parents(3), [])
    assert engine.runner.forward(Pack((chunk,))).logits.shape == (0, VOCABULARY)


# -- hidden states ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, so that one can be left out."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    changes = {"num_hidden_layers": 3, "vocab_size": VOCABULARY, "initializer_range": 0.2}
    return make_target(folder, **changes)


def tapped(folder: Path, *layers: int) -> Engine:
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model = load_model(folder, dtype="float32", device=CPU)
    engine = Engine(Runner(model, SLOTS, feature_layers=layers), eager)
    engine.pool.open(0)
    engine.pool.open(1)
    return engine


def states(engine: Engine, tokens: Sequence[int]) -> Tensor:
    """After each layer, of a sequence on its own: [tokens, layers, hidden]; the last one's before
    the final norm.
    """
    found: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: found.append(output[0]))
        for layer in engine.eager.model.layers
    ]
    engine.dense(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


@pytest.mark.parametrize("layers", [(1, 3), (2,), (1, 2, 3)])
def test_hidden_states_of_all_tokens_are_those_of_each_path_alone(
    deep: Path, layers: tuple[int, ...]
) -> None:
    """Also where no logits are wanted, and of a tree's nodes."""
    engine = tapped(deep, *layers)
    engine.prefill(0, [5, 6, 7])
    pack = Pack(
        (
            engine.segment(0, [8, 9, 10, 11], [-1, 0, 0, 2], [3]),
            engine.segment(1, [20, 21], chain_parents(2), []),
        )
    )
    first, second = pack.split_tokens(engine.runner.forward(pack).features)
    columns = [layer - 1 for layer in layers]
    for path in ([0, 1], [0, 2, 3]):
        whole = states(engine, [5, 6, 7, *(8 + node for node in path)])
        torch.testing.assert_close(first[path], whole[3:, columns], **CLOSE)
    torch.testing.assert_close(second, states(engine, [20, 21])[:, columns], **CLOSE)


def test_without_feature_layers_there_are_none(deep: Path) -> None:
    engine = tapped(deep)
    pack = Pack((engine.segment(0, [5, 6, 7], chain_parents(3), [2]),))
    features = engine.runner.forward(pack).features
    assert features.shape == (3, 0, 32)
    assert [len(part) for part in pack.split_tokens(features)] == [3]


def test_a_failed_pass_leaves_no_hidden_states_to_the_next(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "can_compile", lambda model: False)  # that one keeps nothing at all
    engine = tapped(deep, 1, 2)
    pack = Pack((engine.segment(0, [5, 6, 7], chain_parents(3), [2]),))
    expected = engine.runner.forward(pack).features
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner._model.lm_head, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.runner.forward(pack)
    assert torch.equal(engine.runner.forward(pack).features, expected)


@pytest.mark.parametrize("layers", [(0,), (1, 4), (-1,)])
def test_layers_that_the_target_has_not_are_refused(deep: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^feature_layers: the target has 1 to 3, not \["):
        tapped(deep, *layers)


def test_hidden_states_come_in_the_order_of_the_layers_asked_for(deep: Path) -> None:
    """A draft finds its own by their names."""
    engine, other = tapped(deep, 3, 1), tapped(deep, 1, 3)
    pack = Pack((engine.segment(0, [5, 6], chain_parents(2), []),))
    forwards, backwards = (e.runner.forward(pack).features for e in (engine, other))
    assert torch.equal(forwards, backwards.flip(1))


def test_kv_heads_must_divide_among_the_ranks(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "model", num_key_value_heads=2)
    model = load_model(folder, dtype="float32", device=CPU)
    with pytest.raises(ValueError, match="^tensor_parallel: 4 ranks cannot share the target's 2"):
        Runner(model, 16, shards=4)


def test_what_does_not_run_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    """Bloom's attention adds a bias that ours knows nothing of."""
    config = BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2, initializer_range=0.3)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    model = load_model(tmp_path / "bloom", dtype="float32", device=CPU)
    with pytest.raises(ValueError, match="^target: BloomForCausalLM does not run on this engine"):
        Runner(model, 16)


def test_the_tiny_model_has_room_for_mistakes(engine_with: Callable[..., Engine]) -> None:
    """Its logits depend on every token of the context by far more than the tolerance."""
    engine = engine_with(2)
    assert tiny_config(VOCABULARY).num_attention_heads == 4
    one, other = engine.dense([5, 6, 7, 8])[-1], engine.dense([4, 6, 7, 8])[-1]
    assert float((one - other).abs().max()) > 1e-2
