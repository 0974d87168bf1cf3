"""`outrider models fetch`: the folder on stdout, and nothing else there."""

import argparse
from pathlib import Path

import pytest

from deployments.commands import models
from workers.engine.model_store import DEFAULT_TARGET


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    models.add_arguments(parser)
    return parser.parse_args(words)


def test_fetch_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    args = parse("fetch", str(tmp_path))

    assert args.func(args) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_fetch_takes_the_default_target_unless_told() -> None:
    assert parse("fetch").name == DEFAULT_TARGET


def test_a_model_that_cannot_be_had_is_an_error_for_the_user() -> None:
    args = parse("fetch", "./no/such/folder")

    with pytest.raises(ValueError, match="check the path"):
        args.func(args)


def test_models_without_an_action_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse()
    assert "ACTION" in capsys.readouterr().err
