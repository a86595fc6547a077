"""A plugin's own options as flags of `llmserve build`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from llmserve.errors import OptionError, UsageError
from llmserve_cli.build import build
from llmserve_cli.flags import read_flags


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--engine", "./engine"], {"engine": "./engine"}),
        (["--engine=a=b"], {"engine": "a=b"}),
        (["--build-engine"], {"build_engine": "true"}),
        (["--decoupled", "--layout", "llmapi"], {"decoupled": "true", "layout": "llmapi"}),
        (["--decoupled", "false"], {"decoupled": "false"}),
    ],
)
def test_flags_are_options_with_a_value_or_alone(words: list[str], options: dict[str, str]) -> None:
    assert read_flags(words) == options


@pytest.mark.parametrize("words", [["engine"], ["-x"], ["--"]])
def test_what_belongs_to_no_option_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="belongs to no option"):
        read_flags(words)


def test_the_same_flag_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="--engine is given twice"):
        read_flags(["--engine", "a", "--engine", "b"])


def run(tmp_path: Path, *words: str) -> object:
    asked = ["--plugin", "hf", "--model", "demo", "--output", str(tmp_path), *words]
    return CliRunner().invoke(build, asked, catch_exceptions=True).exception


def test_build_takes_them_among_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "--queue-delay-us", "70", "--name", "flagged", "--decoupled") is None
    text = (tmp_path / "flagged" / "config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 70" in text
    assert "decoupled: true" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--queue-delay-ms", "70"], "did you mean 'queue_delay_us'"),
        (["--queue-delay-us", "70", "--set", "queue_delay_us=70"], "given twice"),
        (["--queue-delay-us"], "takes a whole number, not 'true'"),
    ],
)
def test_a_flag_that_is_wrong_is_told_as_an_option_is(
    tmp_path: Path, words: list[str], message: str
) -> None:
    error = run(tmp_path, *words)
    assert isinstance(error, OptionError)
    assert message in str(error)
