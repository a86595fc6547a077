"""No other user of the machine reads a prompt or an answer out of what a server keeps."""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from llmserve.server.run.guard import members
from llmserve.testing import LiveTriton
from tests.intruder import as_another_user
from tests.live.servers import name_of

CANARY = "the canary sings of 4f1c0de5"


def kept_by(name: str, process: int) -> set[Path]:
    """Return what a server and its models have in shared memory and in the temporary folder."""
    temporary = Path(tempfile.gettempdir())
    paths = {path for folder in (Path("/dev/shm"), temporary) for path in folder.glob(f"{name}*")}
    for each in members(process):
        with suppress(OSError):
            paths |= {link.readlink() for link in Path(f"/proc/{each}/fd").iterdir()}
    folders = (Path("/dev/shm"), temporary)
    return {p for p in paths if p.exists() and any(f in p.parents for f in folders)}


def has_canary(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(CANARY.encode()) >= 0


def readable(paths: set[Path]) -> list[str]:
    """Return what this user can read of these files and folders."""
    found: list[str] = []
    for path in sorted(paths):
        with suppress(OSError):
            if path.is_dir():
                found += map(str, (path, *path.iterdir()))
            else:
                with path.open("rb"):
                    found.append(str(path))
    return found


@pytest.mark.parametrize("plugin", ["hf", "iterative"])
def test_another_user_reads_no_prompt(triton: LiveTriton, plugin: str) -> None:
    model = triton.build(plugin)
    answer = triton.client.generate(model, CANARY, max_tokens=4, exclude_input_in_output=False)
    assert CANARY in answer.text
    kept = kept_by(name_of(triton.server.http_url), triton.server.pid)
    # Models are no secret.
    kept = {path for path in kept if triton.repository not in path.parents}
    segments = {path for path in kept if path.parent == Path("/dev/shm")}
    assert any(map(has_canary, segments)), "the prompt is there to be found"
    assert triton.server.log_file in kept
    assert [path for path in kept if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    if os.getuid() == 0:
        assert as_another_user(lambda: readable(kept)) == []
