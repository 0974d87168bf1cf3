"""The command line's manners: what a mistake looks like."""

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from deployments import cli
from deployments.commands import generate


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name}" in said for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["models", "--help"]])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from deployments import cli\n"
        f"try: cli.main({arguments})\n"
        "finally: assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_of_its_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: outrider {command}" in said
    assert len(said.splitlines()) > 5


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["generate"], ["bench"], ["bench", "decode"], ["prepare-draft"]]
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: outrider" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--prompt", "  "]) == 2
    captured = capsys.readouterr()
    assert captured.err == "outrider: prompt: is empty; give some text\n"
    assert captured.out == ""


def test_our_own_mistakes_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> int:
        raise KeyError("ours")

    monkeypatch.setattr(generate, "run", broken)
    with pytest.raises(KeyError):
        cli.main(["generate", "--prompt", "x"])


def test_the_status_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "run", lambda args: 7)
    assert cli.main(["generate", "--prompt", "x"]) == 7


def test_ctrl_c_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", pressed)
    assert cli.main(["generate", "--prompt", "x"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "outrider: interrupted\n"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"outrider {version('outrider')}\n"
