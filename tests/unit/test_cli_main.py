"""What the command line does when something ends it that no command foresees."""

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

from llmserve_cli.commands import llmserve_register_commands
from llmserve_cli.group import Commands, cli
from llmserve_cli.main import main
from tests import support
from tests.support import install, with_path

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
        '''Take the place of a command of ours.'''

    @cli.command("two-words")
    @click.option("--choice", type=click.Choice(["left", "right"]))
    def two_words(choice):
        '''Do what takes more than one line of a narrow terminal to say, and say all of it.'''

    @cli.command()
    @click.argument("kind")
    def fails(kind):
        '''Fail.'''
        raise {"type": TypeError, "panic": Panic, "system": OSError}[kind]("first\\nsecond")

    cli.add_command(lazy_command("absent", "no_such_module:absent", "Fail to be imported."))
"""
TAKEN = "llmserve: build of plugin acme is taken already\n"
LEAVES = """
from llmserve import hookimpl

@hookimpl
def llmserve_register_commands(cli):
    raise SystemExit(9)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install a plugin whose command fails, and one that ends the process when it is asked."""
    for name, source in {"acme": PLUGIN, "leaves": LEAVES}.items():
        install(tmp_path, name, f"[llmserve]\n{name} = {name}\n", "1.0", **{name: source})
    return tmp_path


def run(
    site: Path, *words: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    return support.run(*words, cwd=site, stdout=stdout, env={**with_path(site), **env})


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("type", "this is a bug of plugin 'acme': TypeError: first second"),
        ("panic", "this is a bug of plugin 'acme': Panic: first second"),
        ("system", "the system refused: OSError: first second"),
    ],
)
def test_what_nobody_foresaw_is_one_line_and_a_traceback_on_request(
    site: Path, kind: str, told: str
) -> None:
    short = run(site, "fails", kind)
    assert short.returncode == 1
    line = short.stderr.splitlines()[-1]
    assert line.startswith(f"llmserve: {told}: ")
    assert "LLMSERVE_TRACEBACK=1" in line
    assert "Traceback" not in short.stderr
    long = run(site, "fails", kind, LLMSERVE_TRACEBACK="1")
    assert long.returncode == 1
    assert "Traceback" in long.stderr
    assert "acme.py" in long.stderr


def test_a_command_that_cannot_be_imported_names_its_plugin(site: Path) -> None:
    told = "llmserve: this is a bug of plugin 'acme': ModuleNotFoundError: No module named 'no_such"
    assert told in run(site, "absent", "--help").stderr


def test_help_lists_commands_in_sections_and_marks_those_of_plugins(site: Path) -> None:
    done = run(site, "--help", LLMSERVE_PLUGINS="acme", COLUMNS="80")
    assert done.stderr == TAKEN
    sections = done.stdout.split("\n\n")
    names = [[line.split()[0] for line in text.splitlines()] for text in sections]
    assert ["Serve:", "build", "serve", "query", "status", "reload", "check", "demo"] in names
    assert ["Extend:", "plugins", "plugin", "completion"] in names
    assert sections[-1].splitlines()[0] == "Plugins:"
    assert "Fail (acme)" in sections[-1]
    folded = " ".join(run(site, "--help", LLMSERVE_PLUGINS="acme", COLUMNS="50").stdout.split())
    assert "than one line of a narrow terminal to say, and say all of it (acme)" in folded


def test_every_command_of_ours_has_an_example_and_a_summary_that_is_not_cut() -> None:
    listed = click.Group()
    llmserve_register_commands(listed)
    for name, command in listed.commands.items():
        summary = command.get_short_help_str(limit=1000)
        assert len(summary) <= 45, name
        real = cli.get_command(click.Context(cli), name)
        assert real is not None
        # It is listed without its module being imported.
        assert real.get_short_help_str(limit=1000) == summary
        shown = CliRunner().invoke(cli, [name, "--help"]).stdout.split("Usage", 1)[1]
        assert re.search(rf"\n +(eval )?.*llmserve {name}", shown), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion(shell: str) -> None:
    assert "_LLMSERVE_COMPLETE" in CliRunner().invoke(cli, ["completion", shell]).stdout


def test_a_shell_that_completes_gets_names(tmp_path: Path) -> None:
    done = support.run(
        cwd=tmp_path, _LLMSERVE_COMPLETE="bash_complete",
        COMP_WORDS="llmserve build --plugin h", COMP_CWORD="3",
    )  # fmt: skip
    assert "hf" in done.stdout


def test_a_command_made_with_a_decorator_is_added_once(site: Path) -> None:
    done = run(site, "two-words", LLMSERVE_PLUGINS="acme")
    assert (done.returncode, done.stderr) == (0, TAKEN)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["biuld"], "no command is called 'biuld': did you mean 'build'?"),
        (["plugin", "nwe"], "no command is called 'nwe': did you mean 'new'?"),
        (["serve", "--runtime", "x"], "--runtime cannot be 'x': choose one of auto, embedded, "),
        (
            ["serve", "--runtme", "x"],
            "serve has no option --runtme: did you mean '--runtime' or '--frontend'?",
        ),
        (["query"], "query needs MODEL: see llmserve query --help"),
        (["query", "demo", "a", "b"], "got unexpected extra argument (b): see llmserve query -"),
        (["completion"], "completion needs SHELL: choose one of bash, zsh, fish"),
        (["build"], "build needs --model: choose one of demo"),
        (["build", "--plugin"], "--plugin needs a value"),
        (["build", "--plugin", "hf", "--modle", "demo"], "build has no option --modle: did you "),
        (["two-words", "--choice", "up"], "--choice cannot be 'up': choose one of left, right"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_would_do(
    site: Path, words: list[str], told: str
) -> None:
    done = run(site, *words, LLMSERVE_BLOCK_PLUGINS="leaves")
    lines = [line for line in done.stderr.splitlines() if "taken already" not in line]
    assert (done.returncode, len(lines)) == (2, 1)
    assert lines[0].startswith(f"llmserve: {told}")


def test_a_plugin_that_ends_the_process_stops_no_command(site: Path) -> None:
    done = run(site, "--help")
    assert done.returncode == 0
    assert "fails" in done.stdout
    assert "plugin 'leaves' (leaves 1.0) adds no commands: SystemExit: 9" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["build", "--help"]])
def test_a_closed_pipe_ends_it_as_a_shell_would_tell(site: Path, words: list[str]) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    try:
        done = run(site, *words, stdout=writable)
    finally:
        os.close(writable)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_a_stream_that_was_closed_before_stops_no_command(site: Path) -> None:
    """Python has None for each, as for a job whose starter closed them."""
    for words, code in {"plugins >&-": 0, "query demo <&-": 2}.items():
        script = f"exec {shlex.quote(sys.executable)} -m llmserve_cli {words}"
        done = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, env=with_path(site), check=False
        )
        assert done.returncode == code, done.stderr


def test_a_full_disk_is_one_line(site: Path) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run(site, "plugins", stdout=full.fileno())
    assert done.returncode == 1
    assert "the system refused: OSError: [Errno 28]" in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("name", ["bench", "compare", "sweep", "report"])
def test_a_command_of_a_package_that_is_not_installed_names_it(name: str) -> None:
    group = Commands()
    group.commands.pop(name, None)
    group._has_plugins = True
    with pytest.raises(click.UsageError) as caught:
        group.resolve_command(click.Context(group), [name, "demo"])
    assert caught.value.message == f"{name} comes with llmserve-bench: pip install llmserve-bench"


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert "HOME" not in os.environ
