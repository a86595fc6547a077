"""Tests of the command, with click's test runner."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmserve.plugin import ConfigError, UsageError
from llmserve.scaffold.command import llmserve_register_commands
from llmserve.scaffold.command.command import main


def test_it_is_added_to_llmserve() -> None:
    cli = click.Group()
    llmserve_register_commands(cli)
    assert list(cli.commands) == ["scaffold"]


def test_it_lists_models(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.output == "mine: not built by llmserve\n"


def test_a_missing_folder_is_reported_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a model repository"):
        CliRunner().invoke(main, [str(tmp_path / "nowhere")], catch_exceptions=False)


def test_a_damaged_model_is_not_taken_for_a_foreign_one(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "llmserve.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        CliRunner().invoke(main, [str(tmp_path)], catch_exceptions=False)
