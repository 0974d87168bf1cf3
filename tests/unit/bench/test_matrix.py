"""Drafts against domains."""

from bench.decode import Tally
from bench.matrix import matrix_of, matrix_table

RESULTS = {
    "code": {
        "plain": Tally(seconds=4.0, tokens=40, steps=40, texts=["a"]),
        "hybrid": Tally(seconds=1.0, tokens=40, steps=10, texts=["a"]),
        "math": Tally(seconds=2.0, tokens=40, steps=16, texts=["a"]),
    },
    "math": {
        "code": Tally(seconds=5.0, tokens=60, steps=48, texts=["b"]),
        "hybrid": Tally(seconds=2.0, tokens=60, steps=20, texts=["b"]),
    },
}
COLUMNS = {
    "code": {"code": "hybrid", "math": "math"},
    "math": {"code": "code", "math": "hybrid"},
}


def test_an_entry_is_the_arm_that_decoded_with_the_draft() -> None:
    assert matrix_of(RESULTS, COLUMNS) == {
        "code": {"code": {"tau": 4.0, "speedup": 4.0}, "math": {"tau": 2.5, "speedup": 2.0}},
        "math": {"code": {"tau": 1.25, "speedup": None}, "math": {"tau": 3.0, "speedup": None}},
    }


def test_the_table_has_a_row_for_the_prompts_and_a_column_for_the_drafts() -> None:
    said = matrix_table(matrix_of(RESULTS, COLUMNS)).splitlines()
    assert said[0].split() == ["prompts", "code", "math"]
    assert said[1].split() == ["code", "4.00", "(4.00)", "2.50", "(2.00)"]
    assert said[2].split() == ["math", "1.25", "3.00"]
    assert len({len(line) for line in said}) == 1
