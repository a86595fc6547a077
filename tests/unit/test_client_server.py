"""What a server can do to a client: stop in the middle, hide its models, speak something else."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llmserve import errors
from llmserve.client import connect, connect_async, script
from tests.unit.scripted import Scripted


def emitted(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    client = shutil.copy(script.__file__, folder / "client.py")
    command = [sys.executable, str(client), "--model", "m", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_stream_that_stops_in_the_middle_is_no_answer(
    scripted: Scripted, url: str, tmp_path: Path
) -> None:
    scripted.ends = "early"
    with connect(url) as client:
        with pytest.raises(errors.UnreachableError, match="before the answer was complete"):
            client.generate("m", "p")
        pieces = client.stream("m", "p")
        assert [next(pieces).text, next(pieces).text] == scripted.pieces
        with pytest.raises(errors.UnreachableError, match="before the answer was complete"):
            next(pieces)

    async def ask() -> None:
        async with connect_async(url) as client:
            await client.generate("m", "p")

    with pytest.raises(errors.UnreachableError, match="before the answer was complete"):
        asyncio.run(ask())
    done = emitted(tmp_path, "--url", url, "p")
    assert (done.returncode, "ended the stream too early" in done.stderr) == (4, True)


def test_models_are_named_where_the_index_is_restricted(url: str) -> None:
    with connect(url) as client, pytest.raises(errors.ModelNotReadyError) as caught:
        client.generate("otter", "p")
    assert str(caught.value) == "the server does not have 'otter': choose one of other, m"


def test_escapes_in_an_answer_reach_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evil = "a\x1b]0;title\x07b\x9b31m\r\n\té 👩‍🚀"
    assert script._printable(evil) == evil
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert script._printable(evil) == "a\\x1b]0;title\\x07b\\x9b31m\\r\n\té 👩‍🚀"
