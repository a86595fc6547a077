"""A server works with any path, locale and home, and next to users who must not change it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import llmserve
from llmserve.server import start
from llmserve.testing.command import LLMSERVE
from tests.live.servers import ECHO, Serving, echo, repository, settings
from tests.support import ROOT

pytestmark = pytest.mark.long

ODD = "a b;touch pwned;'\"$(touch pwned) é käse"


def test_any_path_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton passes paths to a shell without quoting them, and opens only ASCII paths."""
    temporary = tmp_path / ODD / "tmp"
    temporary.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(temporary)
    folder = repository(tmp_path / ODD / "models", echo=ECHO, other=ECHO)
    with start(settings(folder, ready_timeout=240)) as server:
        assert echo(server, "naïve") == "naïve"
    with start(settings(folder, ready_timeout=240, models=("echo",))) as server:
        assert echo(server, "alone") == "alone"
        assert server.models() == {"echo": "READY"}
    assert not list(tmp_path.rglob("pwned"))
    assert not list(temporary.iterdir()), "nothing is left behind"


TEXT = """
import json, os, subprocess, sys
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        print("é printed é “quoted”")
        here = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(here, "words.txt")) as file:
            self.words = file.read()
        with open(os.path.join(os.environ["HOME"], "note.txt"), "w") as file:
            file.write("käse")
        program = [sys.executable, "-c", "import acme_words; print(chr(8220) + acme_words.NAME)"]
        self.words += subprocess.run(program, capture_output=True, text=True, check=True).stdout
        import acme_words
        self.words += acme_words.NAME

    def execute(self, requests):
        import numpy as np
        out = np.array([self.words.encode()], dtype=object)
        return [pb.InferenceResponse([pb.Tensor("OUT", out)]) for _ in requests]
"""
SCRIPT = """
import sys
from pathlib import Path
from tests.live.servers import echo, settings
from llmserve.server import start

with start(settings(Path(sys.argv[1]), ready_timeout=240)) as server:
    sys.stdout.buffer.write(echo(server, "x", model="text").encode())
"""
LOCALES = [{}, {"LC_ALL": "C"}, {"LC_ALL": "xx_YY.UTF-8", "LANG": "xx"}]


@pytest.fixture(scope="module")
def accents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a virtual environment and a package, whose names are not ASCII."""
    home = tmp_path_factory.mktemp("names") / "käse"
    venv.create(home / "environment", symlinks=True, system_site_packages=False)
    [packages] = home.glob("environment/lib/python*/site-packages")
    (packages / "parent.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if path), encoding="utf-8"
    )
    (packages / "acme_words.py").write_text("NAME = 'éacme'", encoding="utf-8")
    folder = repository(home / "models", text=TEXT)
    (folder / "text" / "1" / "words.txt").write_text("“words”", encoding="utf-8")
    return home


@pytest.mark.parametrize("locale", LOCALES, ids=["unset", "C", "unknown"])
def test_models_read_and_write_utf8_in_every_locale(
    accents: Path, tmp_path: Path, locale: dict[str, str]
) -> None:
    done = subprocess.run(
        [accents / "environment" / "bin" / "python", "-c", SCRIPT, str(accents / "models")],
        env={"PATH": os.environ["PATH"], **locale, "HOME": str(accents), "TMPDIR": str(tmp_path)},
        cwd=ROOT, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert done.stdout.decode() == "“words”“éacme\néacme"
    note = accents / "note.txt"
    assert note.read_text(encoding="utf-8") == "käse"
    note.unlink()


def test_the_demo_model_is_served_from_a_bare_environment(tmp_path: Path) -> None:
    """No locale, no compiler, an empty cache, and a home whose name is not ASCII."""
    home = tmp_path / "maison d'été"
    home.mkdir()
    folder = tmp_path / ODD
    llmserve.build("iterative", "demo", output=folder)
    path = os.environ["PATH"]
    bare = {"PATH": path, "HOME": str(home), "CC": "/bin/false", "CXX": "/bin/false"}
    served = Serving(str(folder), env=bare)
    try:
        args = ["query", "demo", "The capital of France is", "--max-tokens", "4"]
        done = subprocess.run(
            [*LLMSERVE, *args, "--url", served.url],
            env=bare, capture_output=True, encoding="utf-8", check=False, timeout=240,
        )  # fmt: skip
        assert "Paris" in done.stdout, done.stderr
    finally:
        assert served.interrupt() == 0


def test_options_of_triton_itself_reach_it(tmp_path: Path) -> None:
    folder = repository(tmp_path / "r", echo=ECHO)
    log = tmp_path / "triton.log"
    words = ("--runtime", "embedded", "--frontend", "none", "--log", str(log))
    flags = ("--triton-flag", "log-verbose=1", "--triton-flag", "http-thread-count=2")
    serving = Serving(str(folder), *words, *flags)
    try:
        (command,) = serving.processes("tritonserver --").values()
        assert {"--log-verbose=1", "--http-thread-count=2"} <= {*command}
        assert "HTTP request: " in log.read_text(errors="replace"), "a line of that verbosity"
    finally:
        serving.close()
