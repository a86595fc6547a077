"""`llmserve build`: plugin options as flags, mistakes, and the output of a finished build."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from llmserve.errors import LLMServeError, ModelSourceError, OptionError, UsageError
from llmserve_cli.build import read_flags
from llmserve_cli.group import cli


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
def test_an_argument_of_no_option_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="belongs to no option"):
        read_flags(words)


def test_the_same_flag_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="--engine is given twice"):
        read_flags(["--engine", "a", "--engine", "b"])


def invoke(tmp_path: Path, *words: str) -> Result:
    command = ["build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path), *words]
    return CliRunner().invoke(cli, command, standalone_mode=False)


def test_plugin_flags_may_be_mixed_with_those_of_build(tmp_path: Path) -> None:
    invoke(tmp_path, "--queue-delay-us", "70", "--name", "flagged", "--decoupled")
    text = (tmp_path / "flagged" / "config.pbtxt").read_text()
    assert "max_queue_delay_microseconds: 70" in text
    assert "decoupled: true" in text


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--queue-delay-ms", "70"], OptionError, "did you mean 'queue_delay_us'"),
        (["--queue-delay-us", "7", "--set", "queue_delay_us=7"], OptionError, "given twice"),
        (["--queue-delay-us"], OptionError, "takes a whole number, not 'true'"),
        (["--name", ""], UsageError, "--name is empty: give a name, or leave it out"),
        (["--model", "dmeo"], ModelSourceError, "did you mean 'demo'?"),
        (["--model", "acme/tinny"], ModelSourceError, "did you mean 'acme/tiny'?"),
        (["--model", "nothing-like-it"], ModelSourceError, "name a local folder"),
    ],
)
def test_a_mistake_is_reported_with_the_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    kind: type[LLMServeError],
    message: str,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "hub" / "models--acme--tiny").mkdir(parents=True)
    error = invoke(tmp_path / "r", *words).exception
    assert type(error) is kind
    assert message in str(error)
    assert not (tmp_path / "r").exists()


def test_the_output_names_the_next_command_and_more_with_verbose(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    result = invoke(folder)
    assert result.stdout == f"{folder}/demo\n"
    assert result.stderr == f"next: llmserve serve '{folder}'\n"
    verbose = invoke(folder, "--force", "--verbose").stderr
    assert "docker run" in verbose
    assert "llmserve query demo" in verbose
    # Every line is a valid shell command.
    commands = [shlex.split(line) for line in verbose.splitlines()]
    assert any(command[-3:] == ["llmserve", "serve", str(folder)] for command in commands)
    assert any(command[-2:] == ["llmserve-triton", str(folder)] for command in commands)
    assert any(str(folder / "demo" / "client.py") in command for command in commands)


def test_a_part_of_a_recipe_can_be_replaced(tmp_path: Path) -> None:
    """The recipe's defaults for options of the replaced part are dropped."""
    result = invoke(tmp_path, "--plugin", "iterative", "--generator", "transformers")
    assert "cannot be driven by batching 'iterative'" in str(result.exception)
    words = ["--generator", "transformers", "--batching", "dynamic", "--formatter", "text"]
    result = invoke(tmp_path, "--plugin", "iterative", *words)
    assert result.exception is None
    manifest = json.loads((tmp_path / "demo" / "llmserve.json").read_text())
    names = {role: part["name"] for role, part in manifest["components"].items()}
    expected = {"generator": "transformers", "batching": "dynamic", "formatter": "text"}
    assert expected.items() <= names.items()


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["build"], "--plugin=h", ["hf"]),
        (["build", "--model"], "de", ["demo", "de"]),
        (["build", "--model"], "acme/", ["acme/tiny", "acme/"]),
        (["build", "--plugin", "hf", "--set"], "deco", ["decoupled="]),
        (["build", "--set"], "max_tok", ["max_tokens="]),
        (["build", "--plugin", "none", "--set"], "max_tok", []),
        (["build", "--tokenizer"], "transf", ["transformers"]),
        (["build", "--formatter"], "te", ["text"]),
        (["query"], "bu", ["built"]),
        (["plugins"], "iterat", ["iterative"]),
        ([], "quer", ["query"]),
    ],
)
def test_the_shell_completes_names(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    incomplete: str,
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub" / "models--acme--tiny").mkdir(parents=True)
    (tmp_path / "model_repository" / "built").mkdir(parents=True)
    (tmp_path / "model_repository" / "built" / "config.pbtxt").touch()
    complete = ShellComplete(cli, {}, "llmserve", "_LLMSERVE_COMPLETE")
    assert [item.value for item in complete.get_completions(words, incomplete)] == expected


def test_without_a_plugin_build_prints_which_one_it_uses(tmp_path: Path) -> None:
    words = ["build", "--model", str(tmp_path), "--device", "cuda", "--output", str(tmp_path / "r")]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    # The folder is no model, which the build notices only after it has chosen a plugin.
    assert isinstance(result.exception, ModelSourceError)
    assert result.stderr.startswith("plugin: iterative, first choice for cuda")
