"""The command line in processes of its own, as a user's shell runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

LLMSERVE = [sys.executable, "-m", "llmserve_cli"]
FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--frontend-port", "0"]
PROMPT = "Programming in C++ is like"


def run(*words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LLMSERVE, *words],
        env={**os.environ, **env},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class Serving:
    """`llmserve serve` in a process of its own, as in a second terminal."""

    def __init__(self, repository: Path, *words: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [*LLMSERVE, "serve", str(repository), *FREE, *words],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        assert self.process.stderr is not None
        self.told = ""
        for line in self.process.stderr:
            self.told += line
            if "Ctrl-C stops it" in line:
                break
        assert "Ctrl-C stops it" in self.told, self.told

    @property
    def url(self) -> str:
        found = re.search(r"grpc +(\S+)", self.told)
        assert found
        return found[1]

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode
