"""`llmserve build`: plugin options as flags, mistakes, and the output of a finished build."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from llmserve.builder.store import Store
from llmserve.demo import demo_model_path
from llmserve.errors import LLMServeError, ModelSourceError, OptionError, UsageError
from llmserve.repository.check import check_repository
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
    assert isinstance(error, kind)
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
        (["build", "--model"], "de", ["demo", "demo-vision", "de"]),
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


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in the current folder that is not built yet."""
    monkeypatch.chdir(tmp_path)
    # The default of the other plugins takes seconds to build.
    monkeypatch.setenv("LLMSERVE_PLUGINS", "iterative,hf")
    shutil.copytree(demo_model_path(), "my model")
    return "my model"


@pytest.mark.parametrize(
    "words",
    [["build", "CHECKPOINT", "--plugin", "hf"], ["check", "CHECKPOINT"]],
)
def test_the_command_that_is_printed_for_a_checkpoint_serves_it(
    checkpoint: str, words: list[str]
) -> None:
    words = [checkpoint if word == "CHECKPOINT" else word for word in words]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    text = f"{result.exception or ''}{result.stdout}"
    printed = text[text.index("llmserve build") :].strip()
    for command in printed.split(" && "):
        program, *arguments = shlex.split(command)
        assert program == "llmserve"
        if arguments == ["serve"]:
            # All that it checks before it starts Triton.
            arguments = ["check"]
        assert CliRunner().invoke(cli, arguments, standalone_mode=False).exception is None
    assert not any(problem.fatal for problem in check_repository(Path("model_repository")))


SAME_PORTS = ["--http-port", "9", "--grpc-port", "9"]


def serve(*words: str) -> Result:
    """All that `serve` does before it starts Triton, which these ports prevent."""
    return CliRunner().invoke(cli, ["serve", *words, *SAME_PORTS], standalone_mode=False)


def test_serve_builds_a_model_once_and_would_serve_it(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    first, again = serve(checkpoint, "--plugin", "hf"), serve(checkpoint, "--plugin", "hf")
    by_name, other = serve("my-model"), serve(checkpoint, "--name", "other", "--set", "stream=true")
    for result in (first, again, by_name, other):
        assert str(result.exception).startswith("two of the ports are the same")
    assert first.stderr.splitlines()[-1] == "llmserve: my-model is built"
    assert again.stderr == by_name.stderr == ""
    assert "plugin: iterative, first choice for cpu" in other.stderr
    assert [stored.name for stored in Store().models()] == ["my-model", "other"]
    assert not Path("model_repository").exists()


def test_serve_of_a_name_that_is_nothing_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    error = serve("acme/none", "--plugin", "hf").exception
    assert isinstance(error, ModelSourceError)
    assert str(error).startswith("there is no folder acme/none, and acme/none is not in the cache")
    assert "cannot be a path: File name too long" in str(serve("x" * 400).exception)
    for words in ([], ["./acme/none"], ["acme/none/more"]):
        assert str(serve(*words).exception).startswith("no repository at")
    assert str(serve("none.gguf").exception).startswith("no file at none.gguf: name a local folder")


@pytest.mark.parametrize("words", [["--plugin", "hf"], ["--name", "x"], ["--set", "stream=true"]])
def test_serve_takes_options_of_a_build_only_for_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = serve(*words).exception
    assert isinstance(error, UsageError)
    assert "for a model that is built: model_repository is a repository" in str(error)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["build", "--model"], r"m\S*\.gguf cannot be read: it ends within its header: "),
        (["serve"], r"m\S*\.gguf cannot be read: it ends within its header: "),
        (["build"], "build takes a model as --model: llmserve build --model NAME"),
        (["check"], r"NAME:? (it )?is a model .* llmserve build --model NAME && llmserve serve"),
    ],
)
@pytest.mark.parametrize("name", ["m.gguf", "folder"])
def test_a_gguf_file_is_a_model_for_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for path in ("m.gguf", "folder/m.Q4_K_M.gguf"):
        Path(path).write_bytes(b"GGUF")
    result = CliRunner().invoke(cli, [*words, name], standalone_mode=False)
    printed = str(result.exception or result.stdout.strip())
    assert "\n" not in printed
    assert re.search(line.replace("NAME", name), printed), printed


def test_serve_names_the_command_for_a_model_that_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke(tmp_path / "model_repository")
    monkeypatch.chdir(tmp_path)
    for word, command in (
        ("model_repository/demo", "llmserve serve model_repository --model demo"),
        ("demo", "llmserve serve --model demo"),
    ):
        error = CliRunner().invoke(cli, ["serve", word], standalone_mode=False).exception
        assert isinstance(error, LLMServeError)
        assert error.exit_code == 3
        assert str(error).endswith(command)


def test_a_file_of_a_model_names_its_folder(checkpoint: str) -> None:
    words = ["build", "--plugin", "hf", "--model", f"{checkpoint}/model.safetensors"]
    error = CliRunner().invoke(cli, words, standalone_mode=False).exception
    assert str(error) == "my model/model.safetensors is a file: name its folder: 'my model'"
