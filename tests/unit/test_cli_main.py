"""What the command line does when something ends it that no command foresees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = """
import click
from llmserve import hookimpl

class Panic(BaseException):
    pass

@hookimpl
def llmserve_register_commands(cli):
    @cli.command()
    @click.argument("kind")
    def fails(kind):
        raise {"type": TypeError, "panic": Panic, "system": OSError}[kind]("first\\nsecond")
"""
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
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[llmserve]\n{name} = {name}\n")
    return tmp_path


def run(
    site: Path, *words: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "llmserve_cli", *words],
        env={**os.environ, "PYTHONPATH": path, **env},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("type", "this is a bug: TypeError: first second"),
        ("panic", "this is a bug: Panic: first second"),
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


def test_a_full_disk_is_one_line(site: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(site, "plugins", stdout=full.fileno())
    assert done.returncode == 1
    assert "the system refused: OSError: [Errno 28]" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_standard_input_that_is_not_text_is_told(site: Path) -> None:
    command = [sys.executable, "-m", "llmserve_cli", "query", "demo", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr
