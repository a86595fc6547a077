"""The command line as a whole: unexpected failures, help, mistakes and closed streams."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmserve import packages
from llmserve.errors import MissingPluginError
from llmserve.plugins.registry import Registry
from llmserve.plugins.roles import Recipe
from llmserve.testing import command as command_line
from llmserve_cli import missing_packages
from llmserve_cli.commands import llmserve_register_commands
from llmserve_cli.group import Commands, cli
from llmserve_cli.main import main
from tests.support import ROOT, install, with_path

PLUGIN = """
import click
from llmserve import hookimpl
from llmserve.plugin import lazy_command

class Panic(BaseException):
    pass

@hookimpl
def llmserve_register_commands(cli):
    @cli.command("build")
    def another_build():
        '''Try to replace a built-in command.'''

    @cli.command("two-words")
    @click.option("--choice", type=click.Choice(["left", "right"]))
    def two_words(choice):
        '''Have a summary that is longer than one line of a narrow terminal and is printed whole.'''

    @cli.command()
    @click.argument("kind")
    def fails(kind):
        '''Fail.'''
        raise {"type": TypeError, "panic": Panic, "system": OSError}[kind]("first\\nsecond")

    cli.add_command(lazy_command("absent", "no_such_module:absent", "Fail to be imported."))
"""
TAKEN = "llmserve: command build of plugin acme already exists\n"
EXITS = """
from llmserve import hookimpl

@hookimpl
def llmserve_register_commands(cli):
    raise SystemExit(9)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a plugin whose command fails, and one that exits when its hook is called."""
    for name, source in {"acme": PLUGIN, "exits": EXITS}.items():
        install(tmp_path, name, f"[llmserve]\n{name} = {name}\n", "1.0", **{name: source})
    return tmp_path


def run(
    site: Path, *words: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    return command_line.run(*words, cwd=site, stdout=stdout, env={**with_path(site), **env})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", "this is a bug of plugin 'acme': TypeError: first second"),
        ("panic", "this is a bug of plugin 'acme': Panic: first second"),
        ("system", "a system call failed: OSError: first second"),
    ],
)
def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(
    site: Path, kind: str, message: str
) -> None:
    short = run(site, "fails", kind)
    assert short.returncode == 1
    line = short.stderr.splitlines()[-1]
    assert line.startswith(f"llmserve: {message}: ")
    assert "LLMSERVE_TRACEBACK=1" in line
    assert "Traceback" not in short.stderr
    long = run(site, "fails", kind, LLMSERVE_TRACEBACK="1")
    assert long.returncode == 1
    assert "Traceback" in long.stderr
    assert "acme.py" in long.stderr


def test_a_command_that_cannot_be_imported_names_its_plugin(site: Path) -> None:
    line = "llmserve: this is a bug of plugin 'acme': ModuleNotFoundError: No module named 'no_such"
    assert line in run(site, "absent", "--help").stderr


def test_help_lists_commands_in_sections_and_marks_those_of_plugins(site: Path) -> None:
    result = run(site, "--help", LLMSERVE_PLUGINS="acme", COLUMNS="80")
    assert result.stderr == TAKEN
    sections = result.stdout.split("\n\n")
    names = [[line.split()[0] for line in text.splitlines()] for text in sections]
    serving = (
        "run", "adopt", "build", "serve", "chat", "query", "batch", "status", "reload", "unload",
        "list", "adapter", "warm", "remove", "export", "check", "demo",
    )  # fmt: skip
    assert ["Serve:", *serving] in names
    assert ["Extend:", "plugins", "plugin", "completion"] in names
    assert sections[-2].splitlines()[0] == "Plugins:"
    assert "Fail (acme)" in sections[-2]
    folded = " ".join(run(site, "--help", LLMSERVE_PLUGINS="acme", COLUMNS="50").stdout.split())
    assert "than one line of a narrow terminal and is printed whole (acme)" in folded


@pytest.mark.parametrize("words", [["list"], ["build", "--model", "demo"], ["plugins"]])
def test_a_name_in_the_environment_that_is_no_plugin_is_said_once(
    site: Path, words: list[str]
) -> None:
    note = "LLMSERVE_BLOCK_PLUGINS names 'nope', but no installed plugin has that name"
    others = ["--output", "elsewhere", "--plugin", "nope"] if words[0] == "build" else []
    result = run(site, *words, *others, LLMSERVE_BLOCK_PLUGINS="nope,exits")
    assert f"note: {note}\n" in result.stderr
    assert (result.stdout + result.stderr).count(note) == 1


def test_every_built_in_command_has_an_example_and_a_summary_that_is_not_cut() -> None:
    listed = click.Group()
    llmserve_register_commands(listed)
    for name, command in listed.commands.items():
        summary = command.get_short_help_str(limit=1000)
        assert len(summary) <= 45, name
        real = cli.get_command(click.Context(cli), name)
        assert real is not None
        # The list shows it without importing its module.
        assert real.get_short_help_str(limit=1000) == summary
        details = CliRunner().invoke(cli, [name, "--help"]).stdout.split("Usage", 1)[1]
        assert re.search(rf"\n +(eval )?.*llmserve {name}", details), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion(shell: str) -> None:
    assert "_LLMSERVE_COMPLETE" in CliRunner().invoke(cli, ["completion", shell]).stdout


def test_a_shell_that_completes_gets_names(tmp_path: Path) -> None:
    result = command_line.run(
        cwd=tmp_path, _LLMSERVE_COMPLETE="bash_complete",
        COMP_WORDS="llmserve build --plugin h", COMP_CWORD="3",
    )  # fmt: skip
    assert "hf" in result.stdout


def test_a_command_made_with_a_decorator_is_added_once(site: Path) -> None:
    result = run(site, "two-words", LLMSERVE_PLUGINS="acme")
    assert (result.returncode, result.stderr) == (0, TAKEN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["biuld"], "no command is called 'biuld': did you mean 'build'?"),
        (["help"], "no command is called 'help': see llmserve --help"),
        (["plugin", "nwe"], "no command is called 'nwe': did you mean 'new'?"),
        (["serve", "--runtime", "x"], "--runtime cannot be 'x': choose one of auto, embedded, "),
        (
            ["serve", "--runtme", "x"],
            "serve has no option --runtme: did you mean '--runtime'?",
        ),
        (["query"], "query needs MODEL: see llmserve query --help"),
        (["run"], "run needs MODEL: see llmserve run --help"),
        (["run", "demo", "Hi", "--max-tokens", "0"], "--max-tokens: 0 is not in the range x>=1"),
        (["run", "demo", "Hi", "--max-tokens", "all"], "--max-tokens: 'all' is not a whole number"),
        (["query", "demo", "Hi", "--temperature", "hot"], "--temperature: 'hot' is not a number"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["run", "demo", "Hi", "--top-p", "0"], "--top-p: 0.0 is not in the range 0<x<=1"),
        (["query", "demo", "a", "b"], "got unexpected extra argument (b): see llmserve query -"),
        (["batch", "none", "out"], "INPUT: Path 'none' does not exist"),
        (["completion"], "completion needs SHELL: choose one of bash, zsh, fish"),
        (["build"], "build needs --model: a local folder or GGUF file, a model's id "),
        (
            ["build", "m", "--dtype", "bfloat16"],
            "build takes a model as --model: llmserve build --model m --dtype bfloat16",
        ),
        (["build", "--plugin"], "--plugin needs a value"),
        (["build", "--plugin", "hf", "--modle", "demo"], "build has no option --modle: did you "),
        (["generate"], "no command is called 'generate': see llmserve --help"),
        (
            ["logs"],
            "no command is called 'logs': llmserve status says where the log of each server",
        ),
        (["version"], "no command is called 'version': llmserve --version prints it"),
        (["push", "m"], "no command is called 'push': a model is a folder, which can be copied"),
        (["pull", "m"], "no command is called 'pull': llmserve run MODEL fetches and builds"),
        (
            ["query", "m", "Hi", "--max-model-len", "9"],
            "query has no option --max-model-len: a model has its context since it was built",
        ),
        (
            ["serve", "m", "--api-key", "x"],
            "serve has no option --api-key: keys are in a file: llmserve key new NAME, then --keys",
        ),
        (
            ["serve", "--certify-share", "0.1"],
            "--certify-share is a part of --certify: add --certi",
        ),
        (
            ["serve", "--certify", "--certify-share", "5"],
            "--certify-share is a share of answers: give one such as 0.01",
        ),
        (["two-words", "--choice", "up"], "--choice cannot be 'up': choose one of left, right"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    site: Path, words: list[str], message: str
) -> None:
    result = run(site, *words, LLMSERVE_BLOCK_PLUGINS="exits")
    lines = [line for line in result.stderr.splitlines() if "already exists" not in line]
    assert (result.returncode, len(lines)) == (2, 1)
    assert lines[0].startswith(f"llmserve: {message}")


def test_words_of_other_tools_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the word of ours that does the same, and the help says so in a line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def asked(*words: str) -> str:
        result = CliRunner().invoke(cli, words, standalone_mode=False)
        return f"{result.exception or result.stdout}"

    assert asked("rm", "m") == ("no model 'm' is built: none is, and llmserve run MODEL builds one")
    assert asked("show", "m") == "no model 'm' is built: llmserve run MODEL builds one"
    assert asked("ps") == "no `llmserve serve` runs here: start one"
    assert asked("stop", "m") == "no `llmserve serve` runs here: start one"
    built = asked("build", "--plugin", "hf", "--model", "demo", "--served-model-name", "mine")
    assert built == "model_repository/mine\n"
    assert "mine" in asked("show", "mine")
    assert asked("ls") == asked("list")
    asked("rm", "mine", "--yes")
    assert not Path("model_repository/mine").exists()
    # A word of the vLLM plugin goes to the plugin.
    refused = asked("serve", "demo", "--plugin", "hf", "--max-model-len", "9")
    assert refused == ("no option 'max_model_len' here: vllm has it; see llmserve plugins hf")
    assert "Also: ps (status)" in asked("--help")
    assert "Also: --served-model-name (--name)" in " ".join(asked("serve", "--help").split())


def test_a_plugin_that_exits_stops_no_command(site: Path) -> None:
    result = run(site, "--help")
    assert result.returncode == 0
    assert "fails" in result.stdout
    assert "plugin 'exits' (exits 1.0) adds no commands: SystemExit: 9" in result.stderr


PANICS = """
class Panic(BaseException):
    def __str__(self):
        return "\\x1b[31mred\\x1b]0;title\\x07"

raise Panic
"""


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["list"], ["build", "--help"]])
def test_a_plugin_that_panics_stops_no_command_and_cannot_write_to_the_terminal(
    tmp_path: Path, words: list[str]
) -> None:
    install(tmp_path, "panics", "[llmserve]\npanics = panics\n", "1.0", panics=PANICS)
    result = run(tmp_path, *words)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    listed = run(tmp_path, "plugins").stdout
    problem = r"plugin 'panics' (panics 1.0) cannot be used: Panic: \x1b[31mred\x1b]0;title\x07"
    assert problem in " ".join(listed.split())


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["build", "--help"]])
def test_a_closed_pipe_ends_a_command_as_sigpipe_would(site: Path, words: list[str]) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    try:
        result = run(site, *words, stdout=writable)
    finally:
        os.close(writable)
    assert result.returncode == 141
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_a_stream_that_is_closed_from_the_start_stops_no_command(site: Path) -> None:
    """Python sets a standard stream that the parent process closed to None."""
    # No server of this user is found there, as one that is loading its models.
    environment = {**with_path(site), "XDG_RUNTIME_DIR": str(site)}
    for words, code in {"plugins >&-": 0, "query demo <&-": 2}.items():
        script = f"exec {shlex.quote(sys.executable)} -m llmserve_cli {words}"
        result = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, env=environment, check=False
        )
        assert result.returncode == code, result.stderr


def test_a_full_disk_is_one_line(site: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        result = run(site, "plugins", stdout=full.fileno())
    assert result.returncode == 1
    assert "a system call failed: OSError: [Errno 28]" in result.stderr
    assert "Exception ignored" not in result.stderr


@pytest.mark.parametrize("name", missing_packages.COMMANDS)
def test_a_command_of_a_package_that_is_not_installed_names_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMSERVE_PLUGINS", "hf")
    group = Commands()
    with pytest.raises(click.UsageError) as caught:
        group.resolve_command(click.Context(group), [name, "demo"])
    package = missing_packages.COMMANDS[name]
    command = packages.install_command(package)
    assert caught.value.message == f"{name} comes with {package}: {command}"


def test_packages_of_commands_and_plugins_are_those_that_have_them() -> None:
    cli.list_commands(click.Context(cli))
    entries = Registry.load().entries
    ours = {f"llmserve-{path.parent.name}" for path in ROOT.glob("plugins/*/pyproject.toml")}
    commands = {name: f"llmserve-{plugin}" for name, plugin in cli._plugin_of.items()}
    assert {n: p for n, p in commands.items() if p in ours} == missing_packages.COMMANDS
    recipes = {
        e.component.name: e.plugin.origin for e in entries if isinstance(e.component, Recipe)
    }
    named = {
        name: package or f"llmserve-{name}" for name, package in missing_packages.PLUGINS.items()
    }
    assert {n: p for n, p in recipes.items() if p in ours} == named


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2-onnx", "plugin gpt2-onnx is not installed, it comes with llmserve-gpt2: "),
        ("vllm", "plugin vllm is not installed, it comes with llmserve-vllm: "),
        (
            "acme",
            "no plugin is called 'acme': choose one of hf, or install the package that has it",
        ),
        ("hff", "no plugin is called 'hff': did you mean 'hf'?"),
    ],
)
def test_a_plugin_that_is_not_installed_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    found = Registry.load()
    only = [entry for entry in found.entries if entry.plugin.name == "hf"]
    monkeypatch.setattr(found, "entries", only)
    with pytest.raises(MissingPluginError) as caught:
        found.recipe(name)
    assert missing_packages.explained(caught.value).startswith(expected)
    assert caught.value.exit_code == 3


def test_an_empty_home_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "HOME" not in os.environ
