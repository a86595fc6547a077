"""Follows all advice that llmserve prints about pip, in a new environment, and serves afterwards.

    python -m tests.advice

It takes minutes and downloads what the commands install, so only CI runs it. The commands are those
that the environment itself prints: for everything that the sources ask to be installed, and for an
environment that was broken on purpose.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

TOO_LARGE = {"llmserve-deploy[ray]"}
"""Ray alone is 470 MB; `make test-ray` installs it."""
HEALTHY = """
import numpy
from llmserve.packages import conflicts
assert int(numpy.__version__.split(".")[0]) < 2, numpy.__version__
assert not conflicts(), [str(found) for found in conflicts()]
"""
BREAKING = (
    [("numpy>=2", "scipy>=1.18"), ("numpy<2",)]
    # No scipy for an older Python needs numpy 2.
    if sys.version_info >= (3, 12)
    else [("numpy>=2",)]
)
"""What pip does if it is asked for one thing only, and what then looks like the remedy."""


def advised() -> Iterator[str]:
    """Yield what the sources ask to be installed."""
    for folder in ("llmserve", "cli", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == "install_command":
                    constants = (a.value for a in call.args if isinstance(a, ast.Constant))
                    yield from (value for value in constants if isinstance(value, str))


class Environment:
    """A virtual environment, in which commands are run as a user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        # Only PyTorch keeps its version: for GPUs it has gigabytes, and no command is about it.
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        torch = folder / "torch.txt"
        torch.write_text("".join(line + "\n" for line in pinned if line.startswith("torch==")))
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        self.env = {**os.environ, "PATH": path, "PIP_CONSTRAINT": str(torch)}

    def run(self, *command: str, fails: bool = False) -> str:
        """Run a program of the environment in the clone; print it, and return its output."""
        if command[0] != "python":
            print("$", *command, flush=True)
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout
        return done.stdout

    def follow(self, command: str) -> None:
        """Run a printed command in the shell, with the environment on its path."""
        print("$", command, flush=True)
        subprocess.run(["sh", "-c", f"{command} --quiet"], cwd=ROOT, env=self.env, check=True)
        self.run("python", "-c", HEALTHY)


def main() -> None:
    started = time.monotonic()
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    words = [word for line in requirements if line.startswith("-e") for word in line.split()]
    with tempfile.TemporaryDirectory() as scratch:
        place = Environment(Path(scratch))
        # Without other constraints: what a user gets today.
        place.run("pip", "install", "--quiet", *words)
        place.run("python", "-c", HEALTHY)
        for requirement in dict.fromkeys(advised()):
            if requirement not in TOO_LARGE:
                code = "import sys; from llmserve.packages import install_command as command\n"
                code += "print(command(sys.argv[1]))"
                place.follow(place.run("python", "-c", code, requirement).strip())
        place.run("pip", "install", "--quiet", "-e", "plugins/openvino")
        repository = str(place.folder / "r")
        place.run("llmserve", "build", "--plugin", "openvino", "--model", "demo",
                  "--weight_format", "int8", "--output", repository)  # fmt: skip
        place.run("llmserve", "demo")
        place.run("llmserve", "build", "--plugin", "hf", "--model", "demo", "--output", repository,
                  "--name", "hf")  # fmt: skip
        for number in range(len(BREAKING)):
            for step in BREAKING[: number + 1]:
                place.run("pip", "install", "--quiet", *step)
            report = place.run("llmserve", "check", repository, fails=number > 0)
            line = next(line for line in report.splitlines() if "numpy<2" in line)
            place.follow(f"pip install {line.rpartition(' install ')[2]}")
            place.run("llmserve", "check", repository)
        place.run("llmserve", "demo")
    print(f"every command left an environment that serves ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
