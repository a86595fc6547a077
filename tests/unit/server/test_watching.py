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

from llmserve.contract.report import ServerReport, State
from llmserve.errors import ServerError
from llmserve.server.keep.control import ask, listening
from llmserve.server.run import stubs
from llmserve.server.run.activity import Activity
from llmserve.server.run.ends import End
from llmserve.server.run.guard import members, state_of
from llmserve.server.run.stubs import Stubs
from llmserve.server.server import connections
from llmserve.server.workarounds import waited_for
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
    assert eventually(stubs.poll) == {"my_2_3": End(signal=signal.SIGKILL)}
    assert stubs.poll() == {}
    assert stubs.of("my_2_3") == []


@pytest.mark.parametrize(("after", "of_memory"), [(4, True), (3, False)])
def test_a_process_that_the_system_kills_for_memory_is_told_from_others(
    start: Start, tmp_path: Path, after: int, of_memory: bool
) -> None:
    """As the kernel counts it: one that was killed before counts for no later end."""
    kills = tmp_path / "proc" / "vmstat"
    kills.parent.mkdir()
    kills.write_text("nr_free_pages 7\noom_kill 3\n")
    process = start("m_0_0")
    stubs = Stubs(process.pid, root=tmp_path)
    eventually(lambda: not stubs.poll() and stubs.of("m"))
    kills.write_text(f"nr_free_pages 7\noom_kill {after}\n")
    os.kill(process.pid, signal.SIGKILL)
    end = End(signal=signal.SIGKILL, of_memory=of_memory)
    assert eventually(stubs.poll) == {"m": end}
    assert ("which has too little memory" in str(end)) == of_memory


def test_a_process_that_was_never_seen_alive_is_one_of_a_model_that_loads() -> None:
    """As one that crashes while it imports its model; a zombie has no command line any more."""
    copy = "import os; open('/proc/self/comm', 'w').write('triton_python_b'); os._exit(3)"
    leader = subprocess.Popen(
        [sys.executable, "-c", f"import os, time\nif not os.fork():\n {copy}\ntime.sleep(60)"],
        start_new_session=True,
    )
    try:
        stubs = Stubs(leader.pid)
        eventually(lambda: any(state_of(pid)[:1] == ["Z"] for pid in members(leader.pid)))
        assert eventually(lambda: stubs.poll(["new"])) == {"new": End(3)}
    finally:
        leader.kill()
        leader.wait()


def test_a_process_that_hangs_is_killed_and_that_is_no_death(start: Start) -> None:
    process = start("one_0_0")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.poll() and stubs.of("one"))
    os.kill(process.pid, signal.SIGSTOP)
    stubs.kill("one")
    eventually(lambda: state_of(process.pid)[:1] == ["Z"])
    assert [stubs.poll() for _ in range(3)] == [{}] * 3


def test_a_process_that_stays_stopped_is_noticed_and_one_that_goes_on_is_not(start: Start) -> None:
    process = start("one_0_0")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.poll() and stubs.of("one"))
    assert not stubs.stopped(0.0)
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: state_of(process.pid)[:1] == ["T"])
    assert [stubs.stopped(at) for at in (10.0, 11.0)] == [set()] * 2
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: state_of(process.pid)[:1] != ["T"])
    assert not stubs.stopped(11.5)
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: state_of(process.pid)[:1] == ["T"])
    assert [stubs.stopped(at) for at in (12.5, 14.4, 14.5)] == [set(), set(), {"one"}]


def test_the_model_is_known_while_triton_still_completes_its_configuration(
    tmp_path: Path, start: Start
) -> None:
    """The name of the instance has one number less then."""
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)
    model = tmp_path / "models" / "m_1" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen([program, model, "m_1_0"], start_new_session=True)
    try:
        stubs = Stubs(process.pid)
        eventually(lambda: not stubs.poll() and stubs.of("m_1"))
    finally:
        process.kill()
        process.wait()


def test_a_process_that_its_parent_ended_has_not_died(start: Start) -> None:
    process = start("one_0_0")
    stubs = Stubs(process.pid)
    eventually(lambda: not stubs.poll() and stubs.of("one"))
    process.kill()
    process.wait()
    assert all(stubs.poll() == {} for _ in range(3))


def test_a_process_that_ends_while_its_threads_are_listed_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def list_nothing(_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(os, "listdir", list_nothing)
    monkeypatch.setattr(os, "scandir", list_nothing)
    assert Activity.of([os.getpid()]).waited == {}
    assert waited_for(os.getpid()) == set()


def test_the_memory_of_many_models_is_measured_with_one_look_at_each_process(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start("one_0_0")
    group = Stubs(process.pid)
    eventually(lambda: not group.poll() and group.of("one"))
    looks: list[int] = []

    def look(process: int) -> list[str]:
        looks.append(process)
        return state_of(process)

    monkeypatch.setattr(stubs, "state_of", look)
    assert group.memory("one")[0] > 0
    assert [group.memory("another") for _ in range(10)] == [(0, 0)] * 10
    assert looks == [process.pid]
    group.poll()
    assert group.memory("one")[0] > 0, "and again after the next"


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
    async def answer(request: Mapping[str, Any]) -> ServerReport:
        if request["do"] != "status":
            raise ServerError("no such model")
        return ServerReport(State.READY)

    async def exchange() -> None:
        async with listening(tmp_path / "sock", answer):
            status = await asyncio.to_thread(ask, tmp_path / "sock", {"do": "status"})
            assert status == ServerReport(State.READY)
            with pytest.raises(ServerError, match="no such model"):
                await asyncio.to_thread(ask, tmp_path / "sock", {"do": "reload"})
            with pytest.raises(ServerError, match="line of JSON"):
                await asyncio.to_thread(ask, tmp_path / "sock", ["status"])  # type: ignore[arg-type]

    asyncio.run(exchange())
    assert not (tmp_path / "sock").exists()
    with pytest.raises(ServerError, match="no `llmserve serve` answers"):
        ask(tmp_path / "sock", {"do": "status"})
