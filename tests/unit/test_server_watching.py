"""What the supervisor looks at: models' processes, connections, and who asks at its socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import ServerError
from llmserve.server.control import ask, listening
from llmserve.server.server import connections
from llmserve.server.stubs import Stubs
from tests.live.servers import eventually

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start what looks like a model's process, in a group of its own."""
    started = []

    def one(instance: str) -> subprocess.Popen[bytes]:
        words = ["/x/triton_python_backend_stub", "-c", "import time; time.sleep(60)", instance]
        started.append(subprocess.Popen(words, executable=sys.executable, start_new_session=True))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def test_a_process_that_died_and_that_nobody_collects_is_noticed_once(start: Start) -> None:
    process = start("my_2_3_0_1")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.look() and stubs.of("my_2_3") == [process.pid])
    assert stubs.seconds("my_2_3") >= 0
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(stubs.look) == {"my_2_3"}
    assert stubs.look() == set()
    assert stubs.of("my_2_3") == []


def test_a_process_that_was_ended_in_order_has_not_died(start: Start) -> None:
    process = start("one_0_0")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.look() and stubs.of("one"))
    process.kill()
    process.wait()
    assert all(stubs.look() == set() for _ in range(3))


def test_connections_are_counted_while_both_ends_are_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connections([port]) == 0
        with socket.create_connection(("127.0.0.1", port)):
            end, _ = server.accept()
            assert connections([port]) == 1
        eventually(lambda: connections([port]) == 0)
        end.close()


def test_who_asks_at_the_socket_is_answered_or_told_why_not(tmp_path: Path) -> None:
    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["do"] != "status":
            raise ServerError("no such model")
        return {"models": []}

    async def meet() -> None:
        async with listening(tmp_path / "sock", answer):
            asked = await asyncio.to_thread(ask, tmp_path / "sock", {"do": "status"})
            assert asked == {"models": []}
            with pytest.raises(ServerError, match="no such model"):
                await asyncio.to_thread(ask, tmp_path / "sock", {"do": "reload"})
            with pytest.raises(ServerError, match="line of JSON"):
                await asyncio.to_thread(ask, tmp_path / "sock", ["status"])  # type: ignore[arg-type]

    asyncio.run(meet())
    assert not (tmp_path / "sock").exists()
    with pytest.raises(ServerError, match="no `llmserve serve` answers"):
        ask(tmp_path / "sock", {"do": "status"})
