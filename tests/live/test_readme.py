"""The commands of the README, run in their order in a fresh checkout."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.live.servers import Serving
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass
class Command:
    line: str
    expected: list[str] = field(default_factory=list)
    """The lines that the README shows as its output; "…" stands for anything."""


def commands() -> list[Command]:
    """Read the indented blocks: a line with a prompt is a command, those after it its output."""
    result: list[Command] = []
    current: Command | None = None
    for line in README.splitlines():
        if line.startswith("    $ "):
            current = Command(line.removeprefix("    $ "))
            result.append(current)
        elif line.startswith("    ") and current is not None:
            current.expected.append(line[4:])
        else:
            current = None
    return result


class Checkout:
    """A clone of the committed files, and an environment like that of a new user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "llmserve"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.folder], check=True)
        env = {key: text for key, text in os.environ.items() if not key.startswith("LLMSERVE_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.env = {**env, **offline, "PATH": path, "HOME": str(folder)}
        self.serving: Serving | None = None

    def serve(self, line: str) -> None:
        """Stop the running server, and start one on ports that are free."""
        self.stop()
        self.serving = Serving(*shlex.split(line)[2:], cwd=self.folder, env=self.env)

    def stop(self) -> None:
        if self.serving is not None:
            self.serving.interrupt()

    def with_actual_ports(self, text: str) -> str:
        assert self.serving is not None
        text = text.replace("localhost:8000", self.serving.http)
        text = text.replace("localhost:8080", self.serving.frontend[0])
        return text.replace("127.0.0.1:8001", self.serving.url)

    def run(self, line: str) -> str:
        if self.serving is not None:
            line = self.with_actual_ports(line)
            line += f" --url {self.serving.url}" if "client.py" in line else ""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def run_the_python(checkout: Checkout) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = checkout.folder.parent / "ten_lines.py"
    script.write_text(checkout.with_actual_ports(code), encoding="utf-8")
    assert len(checkout.run(f"python {script}").split()) > 20


def test_the_commands_in_their_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkout = Checkout(tmp_path_factory.mktemp("readme"))
    steps = commands()
    assert len(steps) > 6
    assert any(step.line == "llmserve serve" for step in steps)
    try:
        for command in steps:
            if command.line.startswith("llmserve serve"):
                checkout.serve(command.line)
                if command.line == "llmserve serve":
                    # The ten lines of Python use the same server.
                    run_the_python(checkout)
                continue
            printed, expected = checkout.run(command.line), "\n".join(command.expected)
            if "…" in expected:
                assert printed.strip(), command.line
            else:
                # The README breaks lines where a terminal does not.
                assert printed.split() == expected.split(), command.line
    finally:
        checkout.stop()
    args = ["git", "status", "--porcelain"]
    assert subprocess.run(args, cwd=checkout.folder, capture_output=True, check=True).stdout == b""


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
