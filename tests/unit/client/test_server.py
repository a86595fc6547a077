"""How a client copes with a server that stops midway, hides its models or never answers."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from llmserve import errors
from llmserve.client import Timeouts, connect, connect_async, script
from llmserve.client.aio import AsyncChannel
from llmserve.testing import ScriptedTriton


def run_script(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    client = shutil.copy(script.__file__, folder / "client.py")
    command = [sys.executable, str(client), "--model", "m", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_stream_that_stops_in_the_middle_is_no_answer(
    scripted: ScriptedTriton, url: str, tmp_path: Path
) -> None:
    scripted.finish = "early"
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
    result = run_script(tmp_path, "--url", url, "p")
    assert (result.returncode, "ended the stream too early" in result.stderr) == (4, True)


def test_models_are_named_where_the_index_is_restricted(url: str) -> None:
    with connect(url) as client, pytest.raises(errors.ModelNotReadyError) as caught:
        client.generate("otter", "p")
    assert str(caught.value) == "the server does not have 'otter': choose one of other, m"


def test_a_name_that_triton_reads_only_in_part_is_no_model(
    scripted: ScriptedTriton, url: str
) -> None:
    with connect(url) as client:
        for name in ("m\0", "m\0other"):
            with pytest.raises(errors.ModelNotReadyError, match=r"does not have 'm.x00"):
                client.generate(name, "p")
        assert scripted.prompts == []
        assert client.generate("m", "p").text == "cut off"


def test_a_read_that_is_cancelled_ends_its_call_and_not_the_read() -> None:
    """gRPC does not free what it has allocated for a read whose task is cancelled."""

    class Call:
        cancelled = 0

        def __init__(self) -> None:
            self.over = asyncio.Event()

        async def read(self) -> str:
            try:
                await self.over.wait()
            except asyncio.CancelledError:
                pytest.fail("the read was cancelled")
            raise asyncio.CancelledError

        def cancel(self) -> None:
            self.cancelled += 1
            self.over.set()

    async def go() -> None:
        channel = AsyncChannel(cast("Any", None))  # It connects to nothing.
        for seconds in (0.01, None):
            call = Call()
            reading = asyncio.ensure_future(channel.read(call, seconds))
            await asyncio.sleep(0)
            if seconds is None:
                reading.cancel()
            with pytest.raises((asyncio.CancelledError, asyncio.TimeoutError)):
                await reading
            assert call.cancelled == 1

    asyncio.run(go())


def test_escapes_in_an_answer_reach_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evil = "a\x1b]0;title\x07b\x9b31m\r\n\té 👩‍🚀"
    assert script._printable(evil) == evil
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert script._printable(evil) == "a\\x1b]0;title\\x07b\\x9b31m\\r\n\té 👩‍🚀"


@pytest.mark.parametrize(
    ("timeout", "pieces", "message"),
    [
        (Timeouts(first=0.3), [], "no answer from 'm' within 0.3 s"),
        (Timeouts(between=0.3), ["cut "], "no more from 'm' within 0.3 s"),
        (Timeouts(whole=1.2, between=30), ["cut "], "no complete answer from 'm' within 1.2 s"),
        (1.2, ["cut "], "no complete answer from 'm' within 1.2 s"),
    ],
)
def test_a_timeout_names_what_did_not_arrive(
    scripted: ScriptedTriton, url: str, timeout: Any, pieces: list[str], message: str
) -> None:
    scripted.pieces, scripted.finish = pieces, "silent"
    with connect(url) as client:
        stream = client.stream("m", "p", timeout=timeout)
        assert [next(stream).text for _ in pieces] == pieces
        with pytest.raises(errors.RequestTimeoutError, match=message):
            next(stream)

    async def ask() -> None:
        async with connect_async(url, timeout=timeout) as client:
            await client.generate("m", "p")

    with pytest.raises(errors.RequestTimeoutError, match=message):
        asyncio.run(ask())


@pytest.mark.parametrize("accepts", [True, False], ids=["silent", "full"])
def test_a_connection_that_cannot_be_made_is_given_up(tmp_path: Path, accepts: bool) -> None:
    """The listener accepts a connection and never answers, or its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        queued = [] if accepts else [socket.create_connection(listener.getsockname())]
        start = time.monotonic()
        message = f"no Triton answers at {url} in time"
        with (
            connect(url, connect_timeout=0.5) as client,
            pytest.raises(errors.UnreachableError, match=message),
        ):
            client.generate("m", "p")
        assert time.monotonic() - start < 8
        del queued


GOING_AWAY = b"\0\0\x08\x07\0\0\0\0\0" + bytes(8)
"""An HTTP/2 frame: its sender closes the connection and has processed no request."""


@pytest.mark.parametrize(("last_frame", "sent"), [(GOING_AWAY, 1), (b"", 0)])
def test_only_a_request_that_was_not_processed_is_resent(
    scripted: ScriptedTriton, url: str, last_frame: bytes, sent: int
) -> None:
    """The first connection ends as soon as a request arrives; the others lead to a server."""
    host, _, port = url.partition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            first, _ = listener.accept()
            first.sendall(b"\0\0\0\x04\0\0\0\0\0")
            while b"ModelConfig" not in first.recv(65536):
                pass
            first.sendall(last_frame)
            first.close()
            for _ in range(2):
                connection, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                for ends in ((connection, server), (server, connection)):
                    threading.Thread(target=_forward, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with connect(f"127.0.0.1:{listener.getsockname()[1]}") as client:
            if sent:
                assert client.generate("m", "p").text == "cut off"
            else:
                with pytest.raises(errors.UnreachableError):
                    client.generate("m", "p")
    assert len(scripted.prompts) == sent


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
