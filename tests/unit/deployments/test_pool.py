"""What users may call a draft."""

from pathlib import Path

import pytest

from deployments.config import default_pool
from deployments.pool import find_draft
from workers.draft import DraftSpec
from workers.engine.model_store import DEFAULT_TARGET
from workers.engine.vocabulary import Vocabulary
from workers.training.ngram_table import NgramTable


def test_a_member_is_found_by_its_name() -> None:
    for member in default_pool():
        assert find_draft(member.name, target=DEFAULT_TARGET) == member.spec()


def test_a_kind_is_the_draft_for_the_domain_or_the_first_one() -> None:
    assert find_draft("hybrid", target=DEFAULT_TARGET, domain="zh").name == "zh"
    assert find_draft("hybrid", target=DEFAULT_TARGET, domain="law").name == "code"
    assert find_draft("lm", target=DEFAULT_TARGET, domain="zh").name == "lm"


def test_a_part_of_a_shipped_draft_is_a_draft_by_itself() -> None:
    chain, table, eagle = (
        find_draft(kind, target=DEFAULT_TARGET, domain="math")
        for kind in ("chain", "ngram", "eagle")
    )
    assert (chain.name, chain.kind, chain.children) == ("math.chain", "hybrid", 1)
    assert (table.name, table.kind) == ("math.ngram", "ngram")
    assert (eagle.name, eagle.kind) == ("math.eagle", "eagle")
    assert Path(str(table.path)).parent == Path(str(eagle.path)).parent == Path(str(chain.path))


def test_for_another_target_ngram_has_no_table_of_foreign_words() -> None:
    assert find_draft("ngram", target="/models/other", domain="zh") == DraftSpec("ngram", "ngram")


def test_a_folder_is_the_kind_of_draft_that_lies_in_it(tmp_path: Path) -> None:
    NgramTable.build([[1, 2]], Vocabulary(5, "x"), {}).save(tmp_path / "law")
    for name, config in (("small", "{}"), ("bird", '{"target": {}}'), ("both/eagle", "{}")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config)

    def found(name: str) -> DraftSpec:
        return find_draft(str(tmp_path / name), target=DEFAULT_TARGET)

    law, small = found("law"), found("small")
    assert found("bird") == DraftSpec("bird", "eagle", path=str(tmp_path / "bird"))
    assert found("both") == DraftSpec("both", "hybrid", path=str(tmp_path / "both"))
    assert law == DraftSpec("law", "ngram", path=str(tmp_path / "law"))
    assert small == DraftSpec("small", "lm", path=str(tmp_path / "small"))


def test_anything_else_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^draft: 'x' is no member of the pool \(code, "):
        find_draft("x", target=DEFAULT_TARGET)
    with pytest.raises(ValueError, match="use 'plain' for plain decoding"):
        find_draft(str(tmp_path), target=DEFAULT_TARGET, plain="plain")
