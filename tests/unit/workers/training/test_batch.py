"""Texts side by side, and the order in which they are learned from."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.training.batch import BATCH_TEXTS, LEAST_PROMPT, collate, shuffled_batches
from workers.training.teacher import TeacherText

CPU = torch.device("cpu")


def text(prompt: int, answer: int, seed: int = 0) -> TeacherText:
    generator = torch.Generator().manual_seed(seed)
    size = prompt + answer
    return TeacherText(
        torch.randint(1, 90, (size,), generator=generator),
        prompt,
        0.0,
        torch.randn(size, 6, generator=generator).bfloat16(),
        torch.randint(0, 90, (answer, 4), generator=generator),
        -torch.rand(answer, 4, generator=generator).half(),
    )


SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=5)


@given(SIZES)
def test_texts_are_aligned_where_their_answers_begin(sizes: list[tuple[int, int]]) -> None:
    texts = [text(*size, seed) for seed, size in enumerate(sizes)]
    batch = collate(texts, CPU)
    columns = max(LEAST_PROMPT, *(prompt for prompt, _ in sizes))
    assert batch.prompt == columns
    assert batch.tokens.shape == (len(sizes), columns + max(answer for _, answer in sizes))
    for row, (one, (prompt, answer)) in enumerate(zip(texts, sizes, strict=True)):
        place = slice(columns - prompt, columns + answer)
        assert int(batch.first[row]) == place.start
        assert torch.equal(batch.tokens[row, place], one.tokens)
        assert torch.equal(batch.features[row, place], one.features)
        assert torch.equal(batch.top_ids[row, :answer], one.top_ids)
        assert torch.equal(batch.top_probs[row, :answer], one.top_logprobs.float().exp())
        assert batch.answered[row].tolist() == [
            column < answer for column in range(batch.answered.shape[1])
        ]
        outside = torch.ones(batch.tokens.shape[1], dtype=torch.bool)
        outside[place] = False
        assert not batch.tokens[row, outside].any()
        assert not batch.features[row, outside].any()
        assert not batch.top_probs[row, answer:].any()


@given(st.integers(1, 60), st.integers(0, 3), st.integers(0, 3))
def test_every_epoch_has_every_text_once_in_an_order_of_its_own(
    count: int, seed: int, epoch: int
) -> None:
    texts = [text(3, 1 + number % 7) for number in range(count)]
    batches = list(shuffled_batches(texts, seed, epoch))
    assert sorted(number for batch in batches for number in batch) == list(range(count))
    assert sorted(map(len, batches), reverse=True)[:-1] == [BATCH_TEXTS] * (len(batches) - 1)
    assert batches == list(shuffled_batches(texts, seed, epoch))
    if count > 20:
        for other in ((seed + 1, epoch), (seed, epoch + 1)):
            assert batches != list(shuffled_batches(texts, *other))


def test_texts_of_about_the_same_length_share_a_batch() -> None:
    """Else most of a batch would be padding."""
    texts = [text(3, 1 + number % 300) for number in range(600)]
    for batch in shuffled_batches(texts, 0, 0):
        lengths = [len(texts[number].tokens) for number in batch]
        assert max(lengths) - min(lengths) <= 45
