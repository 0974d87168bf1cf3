"""Who decodes what: arms by name, and the shipped drafts that the matrix adds."""

from pathlib import Path

import pytest

from bench.arms import LineUp, all_drafts
from bench.decode import Arm
from deployments.config import DOMAINS
from deployments.pool import find_draft
from workers.engine.model_store import DEFAULT_TARGET
from workers.engine.vocabulary import Vocabulary
from workers.training.ngram_table import NgramTable


def line_up(*names: str, domain: str = "math", matrix: bool = False) -> LineUp:
    return LineUp.of(names, domain, DEFAULT_TARGET, matrix=matrix)


def test_arms_stand_for_drafts_of_the_domain() -> None:
    found = line_up("plain", "hybrid", "ngram", "code")
    assert found.arms == [
        Arm("plain", None),
        Arm("hybrid", "math"),
        Arm("ngram", "math.ngram"),
        Arm("code", "code"),
    ]
    assert found.columns == {}


def test_the_matrix_adds_what_no_arm_decodes_with_yet() -> None:
    found = line_up("plain", "chain", "hybrid", matrix=True)
    assert found.columns == {"code": "code", "math": "hybrid", "en": "en", "zh": "zh"}
    assert tuple(found.columns) == DOMAINS
    assert [arm.name for arm in found.arms] == ["plain", "chain", "hybrid", "code", "en", "zh"]
    assert found.drafts["en"] == find_draft("en", target=DEFAULT_TARGET)
    assert found.asked == ("plain", "chain", "hybrid"), "added drafts are no arms"


def test_a_draft_that_was_asked_for_by_its_own_name_is_its_own_column() -> None:
    found = line_up("plain", "math", "zh", domain="songs", matrix=True)
    assert found.columns == {domain: domain for domain in DOMAINS}
    assert [arm.name for arm in found.arms] == ["plain", "math", "zh", "code", "en"]


def test_every_draft_is_loaded_once() -> None:
    line_ups = [line_up("plain", "hybrid", domain=d, matrix=True) for d in ("code", "math", "law")]
    assert [spec.name for spec in all_drafts(line_ups)] == sorted(DOMAINS)


def test_two_drafts_of_one_name_are_refused(tmp_path: Path) -> None:
    NgramTable.build([[1, 2]], Vocabulary(5, "x"), {}).save(tmp_path / "zh")
    with pytest.raises(ValueError, match="^arms: two different drafts are called 'zh'"):
        all_drafts([line_up(str(tmp_path / "zh"), matrix=True)])
