"""A result in Markdown says all that the JSON says, and what is needed to repeat it."""

from bench.report import decode_report, peers_report
from tests.unit.bench.summary import summary

RUN = summary()["run"]


def test_it_says_where_the_numbers_come_from() -> None:
    said = decode_report(summary())
    assert said.startswith("# tiny, Abacus, 2 cores, 2026-01-02\n")
    assert "\n    outrider bench decode --matrix\n" in said
    whole = " ".join(said.split())
    assert "Revision 0123456789ab; torch 2.13.0, Python 3.11.7. float32 on cpu, budget 8" in whole
    assert "prompts: 3 of code, 2 of zh." in whole
    assert max(map(len, said.splitlines()[:6])) <= 120


def test_every_temperature_has_arms_matrix_members_and_bins() -> None:
    first, second = decode_report(summary()).split("## Temperature ")[1:]
    assert first.startswith("0.0\n") and second.startswith("0.8\n")
    assert "| code | plain | 10.0 | 1.00 | - | 1.00 | 100% | - |" in first
    assert "| all | hybrid | 40.0 | 2.50 | 0.80 | 4.00 | 100% | 0.250 |" in first
    assert "| all | hybrid | 20.0 | 1.25 | 0.80 | 4.00 | 100% | 0.250 |" in second
    assert "| prompts | code | zh |\n|---|---|---|\n| code | 1.60 (2.00) | 2.50 (4.00) |" in first
    assert "| arm | suffix | table |\n|---|---|---|\n| hybrid | 18 | 3,000 |" in first
    assert "| confidence | hybrid |\n|---|---|\n| 0.0 to 0.1 | - |\n" in first
    assert "| 0.6 to 0.7 | - |\n| 0.7 to 0.8 | 1.00 of 2 |" in first


def test_what_was_not_measured_is_left_out() -> None:
    made = summary()
    for found in made["temperatures"].values():
        del found["matrix"]
        del found["arms"]["hybrid"]
    said = decode_report(made)
    assert "| all | plain |" in said
    for word in ("every prompts", "Accepted tokens", "confidence"):
        assert word not in said


def test_peers_have_a_table_for_each_domain() -> None:
    said = peers_report({"run": RUN}, {"code": "| a |", "zh": "| b |"})
    assert said.startswith("# tiny, Abacus")
    assert said.endswith("## code\n\n| a |\n\n## zh\n\n| b |\n")
