"""Ctrl-C at any moment of a command: one line, and an exit code that says so."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says when the program itself begins, which is when its first module is looked for.
PROGRAM = """
import os, sys

def say(event, arguments):
    global said
    if event == "import" and arguments[0] == "click" and not said:
        said = True
        os.write(1, b"x")

said = False
sys.addaudithook(say)
from llmserve_cli.main import main
main(sys.argv[1:])
"""
OFFSETS = [0.0, 0.05, 0.2, 1.0]


def interrupt_after(seconds: float, *words: str) -> tuple[int, str]:
    """Start a command, interrupt it when its program has run for so long, return what it says."""
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
    # A server that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        code, told = interrupt_after(seconds, "query", "demo", "Hi", "--url", url)
    assert (code, told) == (130, "llmserve: interrupted\n")


@pytest.mark.parametrize("seconds", OFFSETS)
def test_a_build_is_interrupted_or_done(tmp_path: Path, seconds: float) -> None:
    folder = tmp_path / "repository"
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(folder)]
    code, told = interrupt_after(seconds, *words)
    if code == 0:
        # It was faster; then all of it is there.
        assert (folder / "demo" / "config.pbtxt").is_file()
    else:
        assert (code, told.splitlines()[-1:]) == (130, ["llmserve: interrupted"])
        assert "Traceback" not in told
        assert "bug" not in told
        assert [path.name for path in tmp_path.iterdir()] in ([], ["repository"])
