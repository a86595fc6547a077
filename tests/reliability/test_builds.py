"""Builds that are killed, that meet each other, or that have hostile names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import llmserve
from llmserve.errors import LLMServeError
from llmserve.repository.manifest import Manifest
from tests.gguf_files import write_model
from tests.live.servers import figure

pytestmark = pytest.mark.long
GGUF = "tiny.gguf"

# The forked child has already imported everything, so the kill hits the build itself.
KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import llmserve
from llmserve.repository.manifest import Manifest, hashes
from llmserve.repository.publish import recover

here = Path(sys.argv[1])

def build(repository, tokens):
    llmserve.build("hf", "demo", output=repository, name="m", max_tokens=tokens, force=True)

def built_tokens():
    folder = here / "repo" / "m"
    # `serve` does the same, because a build can die between two moves.
    recover(folder.parent)
    manifest = Manifest.read(folder)
    assert manifest and manifest.missing(folder) == manifest.edits(folder) == [], manifest
    return manifest.options["max_tokens"]

build(here / "repo", 1)
started = time.monotonic()
build(here / "repo", 2)
took = time.monotonic() - started
chance, old, new = random.Random(0), 2, 0
for tokens in range(3, 23):
    child = os.fork()
    if child == 0:
        build(here / "repo", tokens)
        os._exit(0)
    time.sleep(chance.random() * took * 2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    now = built_tokens()
    assert now in (old, tokens), (now, old, tokens)
    new += now == tokens
    old = now
build(here / "repo", 99)
build(here / "other", 99)
assert hashes(here / "repo" / "m") == hashes(here / "other" / "m")
left = {path.name for path in here.iterdir()} - {"repo", "other"}
assert not left, left
print(new)
"""


def test_a_build_that_is_killed_leaves_the_old_model_or_the_new_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figure("a build killed at 20 points: models that were new by then", int(done.stdout), "")


BUILD = """
import sys, llmserve
plugin, source, repository, tokens = sys.argv[1:]
llmserve.build(plugin, source, output=repository, name="m", max_tokens=int(tokens))
"""


@pytest.mark.parametrize("source", ["demo", GGUF])
@pytest.mark.parametrize("plugin", ["iterative", "openvino"])
def test_of_two_builds_at_once_both_are_whole(plugin: str, source: str, tmp_path: Path) -> None:
    model = source
    if source == GGUF:
        write_model(tmp_path / source)
        model = str(tmp_path / source)
    words = [sys.executable, "-c", BUILD, plugin, model, str(tmp_path / "repo")]
    builds = [
        subprocess.Popen([*words, tokens], stderr=subprocess.PIPE, text=True)
        for tokens in ("3", "4")
    ]
    for build in builds:
        _, errors = build.communicate(timeout=300)
        assert build.returncode == 0, errors
    manifest = Manifest.read(tmp_path / "repo" / "m")
    assert manifest is not None
    assert manifest.options["max_tokens"] in (3, 4)
    assert manifest.missing(tmp_path / "repo" / "m") == []
    assert {path.name for path in tmp_path.iterdir()} - {source} == {"repo"}


FULL = """
import resource, sys, llmserve
llmserve.build("iterative", "demo", output=sys.argv[1], name="m")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
llmserve.build("iterative", "demo", output=sys.argv[1], name="m", max_tokens=4)
"""


def test_a_disk_that_fills_in_the_middle_is_said_and_the_old_model_stays(tmp_path: Path) -> None:
    """Files that reach a limit fail as those on a full disk do."""
    repository = tmp_path / "repo"
    done = subprocess.run(
        [sys.executable, "-c", FULL, repository], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert "OutputError: model.safetensors cannot be copied to the repository: File too" in last
    manifest = Manifest.read(repository / "m")
    assert manifest is not None
    assert manifest.missing(repository / "m") == manifest.edits(repository / "m") == []
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


PARTS = ["..", "../x", "/tmp/x", "a/b", "a\\b", "~", "$HOME", "`id`", "a;b", "a b", "a\nb", "a\0b"]
PARTS += ["", ".", "-x", "a|b", "a>b", "a*", "CON\x1b[1m", "é", "a" * 300, "%2e%2e", "..\u2215x"]
NAMES = [*PARTS, *(f"m{part}" for part in PARTS), *(f"{part}/m" for part in PARTS[:6])]


def test_no_name_writes_outside_the_repository(tmp_path: Path) -> None:
    (tmp_path / "in" / "repo").mkdir(parents=True)
    refused = 0
    for name in NAMES:
        try:
            llmserve.build("hf", "demo", output=tmp_path / "in" / "repo", name=name)
        except (LLMServeError, ValueError):
            refused += 1
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"repo"}
    assert not Path("/tmp/x").exists()
    inside = [path.name for path in (tmp_path / "in" / "repo").iterdir() if path.is_dir()]
    assert all(name.isascii() and name.isprintable() for name in inside)
    figure(f"{len(NAMES)} hostile names: refused", refused, "")
