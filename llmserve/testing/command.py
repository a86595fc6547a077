"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

LLMSERVE = [sys.executable, "-m", "llmserve_cli"]


def run(
    *arguments: str,
    stdin: str = "",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
    **extra_env: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a separate process, as a user's shell does."""
    environment = {**(os.environ if env is None else env), **extra_env}
    return subprocess.run(
        [*LLMSERVE, *arguments],
        cwd=cwd, env=environment, input=stdin, stdout=stdout, stderr=subprocess.PIPE,
        encoding="utf-8", check=False, timeout=240,
    )  # fmt: skip
