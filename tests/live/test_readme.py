"""The README, command by command, as somebody types it in a checkout of their own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.test_hub import COMMIT
from tests.live.servers import Serving
from tests.support import ROOT, hub_cache

README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass
class Command:
    line: str
    shown: list[str] = field(default_factory=list)
    """What the README says that it prints; "…" stands for anything."""


def commands() -> list[Command]:
    """Read the indented blocks: a line with a prompt is typed, those after it are printed."""
    found: list[Command] = []
    typed: Command | None = None
    for line in README.splitlines():
        if line.startswith("    $ "):
            typed = Command(line.removeprefix("    $ "))
            found.append(typed)
        elif line.startswith("    ") and typed is not None:
            typed.shown.append(line[4:])
        else:
            typed = None
    return found


class Checkout:
    """A clone of what is committed, and the environment of its user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "llmserve"
        subprocess.run(["git", "clone", "--quiet", ROOT, self.folder], check=True)
        # No hub is asked: its cache has a model of the name that the README uses.
        hub_cache(folder / "hf", "gpt2", COMMIT)
        own = {key: text for key, text in os.environ.items() if not key.startswith("LLMSERVE_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.env = {**own, **offline, "PATH": path, "HOME": str(folder)}
        self.serving: Serving | None = None

    def serve(self, line: str) -> None:
        """Serve on free ports, beside whatever else runs here, in place of what was served."""
        self.stop()
        self.serving = Serving(*shlex.split(line)[2:], cwd=self.folder, env=self.env)

    def stop(self) -> None:
        if self.serving is not None:
            self.serving.interrupt()

    def at_its_ports(self, text: str) -> str:
        assert self.serving is not None
        text = text.replace("localhost:8000", self.serving.http)
        text = text.replace("localhost:8080", self.serving.frontend[0])
        return text.replace("127.0.0.1:8001", self.serving.url)

    def run(self, line: str) -> str:
        env = self.env
        if self.serving is not None:
            line = self.at_its_ports(line)
            line += f" --url {self.serving.url}" if "client.py" in line else ""
            env = {**env, "LLMSERVE_URL": self.serving.url}
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder, env=env, stdin=subprocess.DEVNULL, capture_output=True,
            encoding="utf-8", timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def run_the_python(checkout: Checkout) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = checkout.folder.parent / "ten_lines.py"
    script.write_text(checkout.at_its_ports(code), encoding="utf-8")
    assert len(checkout.run(f"python {script}").split()) > 20


def test_the_commands_in_their_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkout = Checkout(tmp_path_factory.mktemp("readme"))
    typed = commands()
    assert len(typed) > 8
    assert any(command.line == "llmserve serve" for command in typed)
    try:
        for command in typed:
            if command.line.startswith("llmserve serve"):
                checkout.serve(command.line)
                if command.line == "llmserve serve":
                    # The ten lines of Python ask the same server.
                    run_the_python(checkout)
                continue
            printed, shown = checkout.run(command.line), "\n".join(command.shown)
            if "…" in shown:
                assert printed.strip(), command.line
            else:
                # The README breaks lines where a terminal may not.
                assert printed.split() == shown.split(), command.line
    finally:
        checkout.stop()
    told = ["git", "status", "--porcelain"]
    assert subprocess.run(told, cwd=checkout.folder, capture_output=True, check=True).stdout == b""


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
