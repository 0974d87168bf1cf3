"""The measurement of speed.py itself, small: what it says is checked, not how fast it was."""

import pytest

from tests.gpu import speed

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_guesses_are_right_as_often_as_they_are_told_to_be(
    capsys: pytest.CaptureFixture[str], acceptance: float
) -> None:
    speed.main(["--shape", "tiny", "--acceptance", str(acceptance), "--budgets", "3"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["together", "budget", "tokens/s", "tau", "speed-up", "same"]
    rows = [list(map(float, line.split())) for line in lines]
    assert [(row[0], row[1]) for row in rows] == [(1, 0), (1, 3), (8, 0), (8, 3)]
    expected = sum(acceptance**place for place in range(4))
    for _, budget, tokens_per_second, tau, _, same in rows:
        assert tokens_per_second > 0
        assert tau == pytest.approx(expected if budget else 1, rel=0.15)
        if speed.DEVICE == "cpu":
            assert same == 1
