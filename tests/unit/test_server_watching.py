"""What the supervisor watches: processes of models, connections, and its control socket."""

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
    """Return a function that starts a process like a model's, in its own process group."""
    started = []

    def start_process(instance: str) -> subprocess.Popen[bytes]:
        words = ["/x/triton_python_backend_stub", "-c", "import time; time.sleep(60)", instance]
        started.append(subprocess.Popen(words, executable=sys.executable, start_new_session=True))
        return started[-1]

    yield start_process
    for process in started:
        process.kill()
        process.wait()


def test_a_dead_process_that_is_not_reaped_is_noticed_once(start: Start) -> None:
    process = start("my_2_3_0_1")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.poll() and stubs.of("my_2_3") == [process.pid])
    assert stubs.seconds("my_2_3") >= 0
    os.kill(process.pid, signal.SIGKILL)
    assert eventually(stubs.poll) == {"my_2_3"}
    assert stubs.poll() == set()
    assert stubs.of("my_2_3") == []


def test_a_process_that_its_parent_ended_has_not_died(start: Start) -> None:
    process = start("one_0_0")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.poll() and stubs.of("one"))
    process.kill()
    process.wait()
    assert all(stubs.poll() == set() for _ in range(3))


def test_connections_are_counted_while_both_ends_are_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert connections([port]) == 0
        with socket.create_connection(("127.0.0.1", port)):
            end, _ = server.accept()
            assert connections([port]) == 1
        eventually(lambda: connections([port]) == 0)
        end.close()


def test_a_request_at_the_socket_gets_an_answer_or_an_error(tmp_path: Path) -> None:
    async def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["do"] != "status":
            raise ServerError("no such model")
        return {"models": []}

    async def exchange() -> None:
        async with listening(tmp_path / "sock", answer):
            status = await asyncio.to_thread(ask, tmp_path / "sock", {"do": "status"})
            assert status == {"models": []}
            with pytest.raises(ServerError, match="no such model"):
                await asyncio.to_thread(ask, tmp_path / "sock", {"do": "reload"})
            with pytest.raises(ServerError, match="line of JSON"):
                await asyncio.to_thread(ask, tmp_path / "sock", ["status"])  # type: ignore[arg-type]

    asyncio.run(exchange())
    assert not (tmp_path / "sock").exists()
    with pytest.raises(ServerError, match="no `llmserve serve` answers"):
        ask(tmp_path / "sock", {"do": "status"})
