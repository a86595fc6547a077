"""Ctrl-C at any moment of a command: one line and the exit code 130."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Writes a byte when the program itself starts: when it imports its first module.
PROGRAM = """
import os, sys

def report(event, arguments):
    global reported
    if event == "import" and arguments[0] == "click" and not reported:
        reported = True
        os.write(1, b"x")

reported = False
sys.addaudithook(report)
from llmserve_cli.main import main
main(sys.argv[1:])
"""
OFFSETS = [0.0, 0.05, 0.2, 1.0]


def interrupt_after(seconds: float, *words: str) -> tuple[int, str]:
    """Start a command, interrupt it after some seconds, and return its exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        return process.wait(60), process.communicate()[1]
    finally:
        process.kill()


@pytest.mark.parametrize("seconds", OFFSETS)
def test_a_query_is_interrupted(seconds: float) -> None:
    # A server that accepts connections and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        code, stderr = interrupt_after(seconds, "query", "demo", "Hi", "--url", url)
    assert (code, stderr) == (130, "llmserve: interrupted\n")


@pytest.mark.parametrize("seconds", OFFSETS)
def test_a_build_is_interrupted_or_done(tmp_path: Path, seconds: float) -> None:
    folder = tmp_path / "repository"
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(folder)]
    code, stderr = interrupt_after(seconds, *words)
    if code == 0:
        # The build finished first; its output must be complete.
        assert (folder / "demo" / "config.pbtxt").is_file()
    else:
        assert (code, stderr.splitlines()[-1:]) == (130, ["llmserve: interrupted"])
        assert "Traceback" not in stderr
        assert "bug" not in stderr
        assert [path.name for path in tmp_path.iterdir()] in ([], ["repository"])


# Interrupted in a text that Python compiles, as those that dataclasses are made from.
IN_A_TEXT = """
import os, signal
import llmserve_cli.group
from llmserve_cli import main
from llmserve_cli.interrupts import raise_on_interrupt

class Interrupted:
    def main(self, **_):
        raise_on_interrupt()
        exec("os.kill(os.getpid(), signal.SIGINT)")

llmserve_cli.group.cli = Interrupted()
main.main([])
"""


def test_python_does_not_put_its_own_end_in_place_of_the_exit_code(tmp_path: Path) -> None:
    """It would for a module that is run as a program, if nothing else was compiled since then."""
    (tmp_path / "program.py").write_text(IN_A_TEXT, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "program"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr) == (130, "llmserve: interrupted\n")
