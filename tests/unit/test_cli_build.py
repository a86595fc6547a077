"""`llmserve build`: options of plugins as flags, slips, and what it says when it is done."""

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
def test_what_belongs_to_no_option_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="belongs to no option"):
        read_flags(words)


def test_the_same_flag_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="--engine is given twice"):
        read_flags(["--engine", "a", "--engine", "b"])


def invoke(tmp_path: Path, *words: str) -> Result:
    given = ["build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path), *words]
    return CliRunner().invoke(cli, given, standalone_mode=False)


def test_build_takes_them_among_its_own(tmp_path: Path) -> None:
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
def test_what_is_wrong_is_told_with_what_would_do(
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


def test_it_ends_with_the_one_next_command_and_more_for_who_asks(tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    done = invoke(folder)
    assert done.stdout == f"{folder}/demo\n"
    assert done.stderr == f"next: llmserve serve '{folder}'\n"
    more = invoke(folder, "--force", "--verbose").stderr
    assert "docker run" in more
    assert "llmserve query demo" in more
    # All of it can be typed into a shell.
    typed = [shlex.split(line) for line in more.splitlines()]
    assert any(words[-3:] == ["llmserve", "serve", str(folder)] for words in typed)
    assert any(words[-2:] == ["llmserve-triton", str(folder)] for words in typed)
    assert any(str(folder / "demo" / "client.py") in words for words in typed)


def test_a_part_of_a_recipe_can_be_replaced(tmp_path: Path) -> None:
    """What the recipe says of the one that it replaces is left out."""
    done = invoke(tmp_path, "--plugin", "iterative", "--generator", "transformers")
    assert "cannot be driven by batching 'iterative'" in str(done.exception)
    words = ["--generator", "transformers", "--batching", "dynamic", "--formatter", "text"]
    done = invoke(tmp_path, "--plugin", "iterative", *words)
    assert done.exception is None
    manifest = json.loads((tmp_path / "demo" / "llmserve.json").read_text())
    names = {role: one["name"] for role, one in manifest["components"].items()}
    expected = {"generator": "transformers", "batching": "dynamic", "formatter": "text"}
    assert expected.items() <= names.items()


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        (["build"], "--plugin=h", ["hf"]),
        (["build", "--model"], "de", ["demo", "de"]),
        (["build", "--model"], "acme/", ["acme/tiny", "acme/"]),
        (["build", "--plugin", "hf", "--set"], "deco", ["decoupled="]),
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


def test_without_a_plugin_it_says_which_one_it_takes(tmp_path: Path) -> None:
    asked = ["build", "--model", str(tmp_path), "--device", "cuda", "--output", str(tmp_path / "r")]
    result = CliRunner().invoke(cli, asked, standalone_mode=False)
    # The folder is no model: what matters here comes before that is found out.
    assert isinstance(result.exception, ModelSourceError)
    assert result.stderr.startswith("plugin: iterative, first of what is installed for cuda")
