"""Finding and running a tool that is not Python's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from llmserve.errors import LLMServeError

_MISSING = re.compile(r"error while loading shared libraries: (\S+):")
_LAST_LINES = 3


def environment() -> dict[str, str]:
    """Give a tool this environment, and the CUDA runtime where a wheel of it is installed."""
    libraries = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_runtime" / "lib"
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), str(libraries) if libraries.is_dir() else ""]
    joined = os.pathsep.join(path for path in paths if path)
    # Told to be offline, AIPerf does not even read a tokenizer from a folder.
    kept = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    return {**kept, "LD_LIBRARY_PATH": joined}


def find(name: str, variable: str, mend: str) -> Path:
    """Find a program: where the environment says, on PATH, or beside this Python."""
    given = os.environ.get(variable)
    beside = Path(sysconfig.get_path("scripts"))
    found = given or shutil.which(name) or shutil.which(name, path=str(beside))
    if not found or not Path(found).is_file():
        where = f"{variable}={given}" if given else "PATH"
        raise LLMServeError(f"there is no {name} at {where}", mend=mend)
    return Path(found)


def run(command: Sequence[str], folder: Path, *, timeout: float, mend: str) -> str:
    """Run a tool in a folder and return what it printed; one line says why it failed."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except OSError as error:
        raise LLMServeError(f"{name} cannot be run: {error.strerror}", mend=mend) from None
    except subprocess.TimeoutExpired:
        raise LLMServeError(
            f"{name} was not done after {timeout:.0f} s", mend="ask for fewer --requests"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if missing := _MISSING.search(done.stdout):
        raise LLMServeError(f"{name} cannot be run: {missing[1]} is missing", mend=mend)
    said = [line.strip() for line in done.stdout.splitlines() if line.strip()][-_LAST_LINES:]
    raise LLMServeError(f"{name} failed (exit code {done.returncode}): {' / '.join(said)}")
