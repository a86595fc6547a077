"""Builds that are killed, that meet each other or a full disk, or that have hostile names."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

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
import contextlib, os, random, signal, sys, time
from pathlib import Path
import llmserve
from llmserve.repository.manifest import Manifest, hashes
from llmserve.repository.publish import recover

here, plugin, source, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])

def build(repository, tokens):
    llmserve.build(plugin, source, output=repository, name="m", max_tokens=tokens, force=True)

def programs():
    # Those that a build has started have its folder among their arguments.
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(here / ".repo").encode() in words.read_bytes():
                found.append(words.parent.name)
    return found

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
for tokens in range(3, 3 + kills):
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
deadline = time.monotonic() + 30
while programs() and time.monotonic() < deadline:
    time.sleep(0.1)
assert not programs()
# What a killed build has left goes with the next one, once its programs have ended.
build(here / "repo", 100)
left = {path.name for path in here.iterdir()} - {"repo", "other", Path(source).name}
assert not left, left
print(new)
"""


# A plugin that places the model of a folder, and one that converts a GGUF file.
BUILDS = [("iterative", "demo"), ("openvino", GGUF)]


def source_in(folder: Path, source: str) -> str:
    if source != GGUF:
        return source
    write_model(folder / source)
    return str(folder / source)


@pytest.mark.parametrize(("plugin", "source"), [("hf", "demo"), ("openvino", GGUF)])
def test_a_build_that_is_killed_leaves_the_old_model_or_the_new_one(
    plugin: str, source: str, tmp_path: Path
) -> None:
    kills = 20 if plugin == "hf" else 2
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, plugin, source_in(tmp_path, source), str(kills)],
        capture_output=True, text=True, check=False, timeout=480,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = f"a build of {plugin} from {source} killed at {kills} points: models new by then"
    figure(words, int(done.stdout), "")


BUILD = """
import resource, sys, llmserve
plugin, source, repository, tokens, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit),) * 2)
llmserve.build(plugin, source, output=repository, name="m", max_tokens=int(tokens))
"""


def start(plugin: str, source: str, folder: Path, tokens: int, limit: int = 0) -> Any:
    words = [plugin, source, str(folder / "repo"), str(tokens), str(limit)]
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, *words], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("plugin", "source"), BUILDS)
def test_of_two_builds_at_once_both_are_whole(plugin: str, source: str, tmp_path: Path) -> None:
    model = source_in(tmp_path, source)
    builds = [start(plugin, model, tmp_path, tokens) for tokens in (3, 4)]
    for build in builds:
        _, errors = build.communicate(timeout=300)
        assert build.returncode == 0, errors
    manifest = Manifest.read(tmp_path / "repo" / "m")
    assert manifest is not None
    assert manifest.options["max_tokens"] in (3, 4)
    assert manifest.missing(tmp_path / "repo" / "m") == []
    assert {path.name for path in tmp_path.iterdir()} - {source} == {"repo"}


def contents_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(("plugin", "source"), [("iterative", "demo"), ("openvino", GGUF)])
def test_a_disk_that_fills_in_the_middle_is_said_and_the_old_model_stays(
    plugin: str, source: str, tmp_path: Path
) -> None:
    """Files that reach a limit fail as those on a full disk do."""
    model = source_in(tmp_path, source)
    assert start(plugin, model, tmp_path, 3).wait(300) == 0
    before = contents_of(tmp_path)
    full = start(plugin, model, tmp_path, 4, limit=200_000)
    _, errors = full.communicate(timeout=300)
    last = errors.splitlines()[-1]
    assert last.startswith("llmserve.errors.OutputError: "), errors
    assert "File too large" in last
    assert contents_of(tmp_path) == before


PARTS = ["..", "../x", "/x", "a/b", "a\\b", "~", "$HOME", "`id`", "a;b", "a b", "a\nb", "a\0b"]
PARTS += ["", ".", "-x", "a|b", "a>b", "a*", "CON\x1b[1m", "é", "a" * 300, "%2e%2e", "..\u2215x"]
NAMES = [*PARTS, *(f"m{part}" for part in PARTS), *(f"{part}/m" for part in PARTS[:6])]


def test_no_name_writes_outside_the_repository(tmp_path: Path) -> None:
    (tmp_path / "in" / "repo").mkdir(parents=True)
    refused = 0
    outside = tmp_path / "outside"
    names = [*NAMES, str(outside), f"{outside}/m"]
    for name in names:
        try:
            llmserve.build("hf", "demo", output=tmp_path / "in" / "repo", name=name)
        except (LLMServeError, ValueError):
            refused += 1
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"repo"}
    inside = [path.name for path in (tmp_path / "in" / "repo").iterdir() if path.is_dir()]
    assert all(name.isascii() and name.isprintable() for name in inside)
    figure(f"{len(names)} hostile names: refused", refused, "")
