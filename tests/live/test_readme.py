"""The README, command by command, as somebody types it in a checkout of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.test_hub import COMMIT
from tests.support import hub_cache

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READY = "Ctrl-C stops it."


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


def words(text: str) -> list[str]:
    """The README breaks lines where a terminal may not."""
    return text.split()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readme") / "llmserve"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("home")
    # No hub is asked: its cache has a model of the name that the README uses.
    hub_cache(home / "hf", "gpt2", COMMIT)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("LLMSERVE_")},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(home),
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def serving(line: str, checkout: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run `serve` on free ports, beside whatever else runs here; give its addresses."""
    free = "--http-port 0 --grpc-port 0 --metrics-port 0 --frontend-port 0"
    server = subprocess.Popen(
        ["bash", "-c", f"exec {line} {free}"],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert server.stderr is not None
    printed = ""
    try:
        for text in server.stderr:
            printed += text
            if READY in text:
                break
        assert READY in printed, printed
        yield {
            "http": re.findall(r"http +http://(\S+)", printed)[0],
            "grpc": re.findall(r"grpc +(\S+)", printed)[0],
        }
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()


def run(line: str, checkout: Path, environment: dict[str, str], at: dict[str, str]) -> str:
    if at:
        line = line.replace("localhost:8000", at["http"]).replace("127.0.0.1:8001", at["grpc"])
        line += f" --url {at['grpc']}" if "client.py" in line else ""
        environment = {**environment, "LLMSERVE_URL": at["grpc"]}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_commands_in_their_order(checkout: Path, environment: dict[str, str]) -> None:
    todo = commands()
    assert len(todo) > 8
    served: list[list[Command]] = [[]]
    for command in todo:
        if command.line.startswith("llmserve serve"):
            served.append([])
        served[-1].append(command)
    for first, *others in served:
        if not first.line.startswith("llmserve serve"):
            expect(first, run(first.line, checkout, environment, {}))
            for command in others:
                expect(command, run(command.line, checkout, environment, {}))
            continue
        with serving(first.line, checkout, environment) as at:
            for command in others:
                expect(command, run(command.line, checkout, environment, at))
    told = ["git", "status", "--porcelain"]
    assert subprocess.run(told, cwd=checkout, capture_output=True, check=True).stdout == b""


def expect(command: Command, printed: str) -> None:
    shown = "\n".join(command.shown)
    if "…" in shown:
        assert printed.strip()
    else:
        assert words(printed) == words(shown), command.line


def test_the_python(checkout: Path, environment: dict[str, str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    built = "llmserve build --plugin hf --model demo --output served"
    run(built, checkout, environment, {})
    with serving("llmserve serve served", checkout, environment) as at:
        (checkout.parent / "ten_lines.py").write_text(
            code.replace("127.0.0.1:8001", at["grpc"]), encoding="utf-8"
        )
        printed = run("python ../ten_lines.py", checkout, environment, at)
    assert len(words(printed)) > 20


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
