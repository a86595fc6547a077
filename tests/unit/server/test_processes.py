"""Processes that end or hang, and their guards: real ones, without a Triton."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmserve.contract.report import State
from llmserve.plugin import Address
from llmserve.plugins.roles import Frontend, Place
from llmserve.server.find.launch import Launch, inherited_environment
from llmserve.server.keep import act
from llmserve.server.keep.observe import FrontendTimes
from llmserve.server.keep.reconciler import Reconciler
from llmserve.server.run.frontend import RunningFrontend, start_frontend
from llmserve.server.run.guard import LOCK, ZOMBIE, remove_leftovers, state_of
from llmserve.server.run.process import GuardedProcess, make_scratch
from llmserve.server.settings import free_port
from tests.live.servers import eventually, leftovers

# It survives its guard, as a Triton does that still has requests.
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
HTTP = """
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status})
        self.end_headers()

signal.signal(signal.SIGTERM, signal.SIG_IGN)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def guard_of(process: int) -> int:
    return int(state_of(process)[1])


def gone(process: int) -> bool:
    return state_of(process)[:1] in ([], [ZOMBIE])


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[GuardedProcess]:
    name, scratch = make_scratch()
    log = tmp_path / "log"
    launch = Launch((sys.executable, "-c", STUBBORN), inherited_environment(), "test")
    process = GuardedProcess(launch, name, scratch, log, grace=5.0)
    eventually(lambda: "ready" in log.read_text())
    Path(f"/dev/shm/{name}-segment").touch()
    yield process
    process.stop(0.0)
    assert gone(process.pid)
    assert leftovers(name) == []


def test_what_outlives_a_killed_guard_is_ended_and_cleaned_up(stubborn: GuardedProcess) -> None:
    os.kill(guard_of(stubborn.pid), signal.SIGKILL)
    assert stubborn.wait(10) is not None
    assert stubborn.why_it_ended() == "its guard was killed by SIGKILL"
    assert not gone(stubborn.pid), "it ignores SIGTERM, which it gets when its guard dies"


def test_what_a_killed_guard_has_begun_to_clean_up_is_cleaned_up(
    stubborn: GuardedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = Path(stubborn._watch.scratch)
    folders = [scratch / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    rmdir = os.rmdir

    def killed_at_the_last(path: str, **arguments: int) -> None:
        rmdir(path, **arguments)
        if not any(folder.exists() for folder in folders):
            os._exit(0)

    if (child := os.fork()) == 0:
        monkeypatch.setattr("os.rmdir", killed_at_the_last)
        remove_leftovers("llmserve-none", scratch)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert (scratch / LOCK).exists()
    os.kill(stubborn._guard.pid, signal.SIGKILL)
    stubborn.stop(grace=5)
    assert not scratch.exists()


def test_a_stopped_guard_still_reports_the_end_of_its_process(stubborn: GuardedProcess) -> None:
    os.kill(guard_of(stubborn.pid), signal.SIGSTOP)
    os.kill(stubborn.pid, signal.SIGKILL)
    assert eventually(lambda: stubborn.wait(0), 10) == 128 + signal.SIGKILL
    assert stubborn.why_it_ended() == "killed by SIGKILL"


def test_a_stopped_guard_obeys(stubborn: GuardedProcess) -> None:
    os.kill(guard_of(stubborn.pid), signal.SIGSTOP)
    began = time.monotonic()
    stubborn.stop(0.0)
    assert time.monotonic() - began < 10


# Frontends


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningFrontend]]:
    """Return a function that starts an HTTP server as a frontend, by default one that answers."""
    started = []

    def start_one(source: str = HTTP, status: int = 200, health: str = "/livez") -> RunningFrontend:
        frontend = Frontend(
            name="test",
            summary="",
            command=lambda place: ["-c", source.replace("{status}", str(status)), str(place.port)],
            health=health,
        )
        place = Place(
            (Address("127.0.0.1:1"),), "127.0.0.1", free_port("127.0.0.1", 0, "test"), grace=5.0
        )
        started.append(start_frontend(frontend, place, tmp_path / "log"))
        return started[-1]

    yield start_one
    for running in started:
        running.stop(0.0)


async def kept_until(
    running: RunningFrontend,
    lines: list[str],
    done: Callable[[Reconciler], object],
    interval: float = 60.0,
    patience: float = 60.0,
) -> Reconciler:
    """Keep a frontend, without any Triton, until something is so."""
    times = FrontendTimes(interval, timeout=0.5, patience=patience)
    one = Reconciler([], [], lines.append, [running], times=times)
    deadline = time.monotonic() + 30
    while not done(one):
        assert time.monotonic() < deadline, lines
        one.step()
        await asyncio.sleep(0.05)
    await one.settle()
    return one


def is_ready_again(one: Reconciler) -> bool:
    (report,) = one.frontend_reports()
    return report.restarts > 0 and report.state is State.READY


@pytest.mark.parametrize(
    ("victim", "number", "why"),
    [
        ("frontend", signal.SIGSTOP, "it is stopped, by a signal"),
        ("frontend", signal.SIGKILL, "killed by SIGKILL"),
        ("guard", signal.SIGKILL, "its guard was killed by SIGKILL"),
    ],
)
def test_a_frontend_that_hangs_or_ends_is_replaced_once(
    start: Callable[..., RunningFrontend], victim: str, number: int, why: str
) -> None:
    lines: list[str] = []
    running = start()
    old = running.process.pid
    os.kill(old if victim == "frontend" else guard_of(old), number)
    began = time.monotonic()
    # Its guard may report an end only after the requests of a short interval have failed.
    one = asyncio.run(kept_until(running, lines, is_ready_again))
    new = one.frontends[0].running
    try:
        assert time.monotonic() - began < 10
        assert f"test: restarting ({why})" in lines
        assert one.frontend_reports()[0].restarts == 1
        assert gone(old)
        assert new.process.pid != old
        assert new.reacts(5.0)
    finally:
        new.stop(0.0)


def test_a_frontend_that_hangs_is_replaced(start: Callable[..., RunningFrontend]) -> None:
    lines: list[str] = []
    hangs = HTTP.replace("self.send_response({status})", "import time; time.sleep(60)")
    one = asyncio.run(kept_until(start(hangs), lines, is_ready_again, interval=0.1))
    one.frontends[0].running.stop(0.0)
    assert "test: suspect (no answer in 0.5 s)" in lines
    assert "test: restarting (no answer in 0.5 s)" in lines


# It computes for so many seconds before it answers the first request.
BUSY = HTTP.replace(
    "self.send_response({status})",
    """import time
        began = time.monotonic()
        while not hasattr(Handler, "done") and time.monotonic() - began < SECONDS:
            pass
        Handler.done = True
        self.send_response(200)""",
)


def test_a_frontend_that_has_much_to_do_is_not_taken_for_one_that_hangs(
    start: Callable[..., RunningFrontend],
) -> None:
    lines: list[str] = []
    busy = start(BUSY.replace("SECONDS", "3"))
    one = asyncio.run(kept_until(busy, lines, lambda _: "test: ready" in lines, interval=0.1))
    assert lines == ["test: suspect (no answer in 0.5 s, while it works)", "test: ready"]
    assert one.frontend_reports()[0].restarts == 0


def test_a_frontend_that_only_works_is_replaced_at_last(
    start: Callable[..., RunningFrontend],
) -> None:
    lines: list[str] = []
    last = "test: restarting (no answer in 0.5 s)"
    busy = start(BUSY.replace("SECONDS", "60"))
    asyncio.run(kept_until(busy, lines, lambda _: last in lines, interval=0.1, patience=2.0))
    assert lines[0] == "test: suspect (no answer in 0.5 s, while it works)"
    assert lines[-1] == last


def test_a_frontend_that_cannot_be_started_yet_is_tried_again(
    start: Callable[..., RunningFrontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is; and a log that someone has deleted is none to end."""
    lines: list[str] = []
    running = start()
    running.log_file.unlink()
    running.stop(0.0)

    def fail(*_: object) -> RunningFrontend:
        raise OSError("no space left")

    monkeypatch.setattr(act, "start_again", fail)
    tried = "test: restarting (OSError: no space left)"
    asyncio.run(kept_until(running, lines, lambda _: tried in lines))
    assert running._last_line() == "its log is gone"


def test_a_frontend_that_is_still_being_started_does_not_delay_the_end(
    start: Callable[..., RunningFrontend], tmp_path: Path
) -> None:
    first = tmp_path / "first"
    first.touch()
    once = f"import pathlib, time\nif not pathlib.Path('{first}').exists():\n    time.sleep(600)\n"
    running = start(once + HTTP)
    first.unlink()
    os.kill(running.process.pid, signal.SIGKILL)
    began = time.monotonic()
    asyncio.run(kept_until(running, [], lambda one: one.frontends[0].is_busy))
    assert time.monotonic() - began < 10


def test_a_refusal_shows_that_a_frontend_does_not_hang(
    start: Callable[..., RunningFrontend],
) -> None:
    assert start(status=429).reacts(5.0)
    # It hangs up, as the gateway does beyond its number of connections.
    assert start(HTTP.replace("self.send_response({status})", "return")).reacts(5.0)


def test_a_frontend_without_a_path_to_ask_is_not_asked(
    start: Callable[..., RunningFrontend],
) -> None:
    lines: list[str] = []
    silent = start(HTTP.replace("self.send_response({status})", "sys.exit()"), health="")
    began = time.monotonic()
    asyncio.run(kept_until(silent, lines, lambda _: time.monotonic() - began > 1.5, interval=0.1))
    assert lines == []
