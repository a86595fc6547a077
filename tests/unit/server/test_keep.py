"""A keeper, whose Triton does what the test says: in an order that a real one rarely has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import State
from llmserve.errors import LLMServeError, ServerError, UsageError
from llmserve.server import ServerSettings
from llmserve.server.keep import keeper, orders, restart
from llmserve.server.keep.detect import Detector
from llmserve.server.keep.keeper import Keeper
from llmserve.server.keep.kept import Kept, KeptModel
from llmserve.server.keep.reload import Reloader
from llmserve.server.keep.restart import Restarter
from llmserve.server.keep.supervisor import Supervisor
from llmserve.server.run.ends import End
from llmserve.server.run.stubs import Stubs
from llmserve.server.settings import Ports

RAISED = (
    "E1125 15:45:27.965258 24669 pb_stub.cc:379] Failed to initialize Python stub: "
    "ModuleNotFoundError: No module named 'acme'  At:  /x/models/a/1/model.py(6): initialize\n"
)
LOADED = "I1125 15:45:29.9 24669 model_lifecycle.cc:838] \"successfully loaded '{}'\"\n"
LOADS = 'I1125 15:45:27.965258 24669 model_lifecycle.cc:472] "loading: {}:1"\n'


class Triton:
    """It serves the models that it has, until it ends."""

    renewable = True
    grpc_url, http_url, runtime = "127.0.0.1:1", "http://127.0.0.1:2", "Triton"
    pid = 2**30
    """That of no process."""

    def __init__(self, log_file: Path, *names: str, **failures: str) -> None:
        self.log_file, self.failures, self.ready = log_file, failures, [*names]
        self.ports = Ports("127.0.0.1", 1, 2, 3)
        # A group that no process has.
        self.stubs = Stubs(2**30)
        self.process = SimpleNamespace(why_it_ended=lambda: "killed by SIGKILL")
        self.code: int | None = None
        self.obeys = True
        self.hangs = False

    def models(self) -> dict[str, str]:
        return dict.fromkeys(self.ready, "READY")

    def wait(self, timeout: float) -> int | None:
        return self.code

    def stop(self, *, grace: float) -> None:
        self.code = 0

    def drop(self, name: str) -> None:
        if self.obeys:
            self.ready = [each for each in self.ready if each != name]

    def takes_requests(self, name: str) -> bool:
        if self.hangs:
            raise ServerError("the server does not answer (timed out)")
        return name in self.ready


@pytest.fixture
def restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of every Triton that replaced one."""
    all_settings: list[ServerSettings] = []

    def start(settings: ServerSettings, **_: Any) -> Triton:
        all_settings.append(settings)
        return Triton(tmp_path / "log", *settings.names())

    monkeypatch.setattr(restart, "start", start)
    monkeypatch.setattr(orders, "CHECK_INTERVAL", 0.01)
    return all_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    for name in ("a", "b"):
        (tmp_path / "repo" / name).mkdir(parents=True)
        (tmp_path / "repo" / name / "config.pbtxt").touch()
    return tmp_path


def supervised(folder: Path, triton: Any, lines: list[str] | None = None) -> Keeper:
    settings = ServerSettings(folder / "repo", renewable=True)
    return Keeper(settings, triton, (lines if lines is not None else []).append)


async def until(one: Keeper, done: Callable[[], Any]) -> None:
    """Supervise it until something is so."""
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        one.check(time.monotonic())
        await asyncio.sleep(0.01)


async def outcome(one: Keeper, name: str) -> str:
    """Unload a model while it is supervised, and return the error."""
    request = asyncio.create_task(one.unload(name))
    await until(one, request.done)
    error = request.exception()
    assert error is None or isinstance(error, LLMServeError)
    return str(error or "")


def test_a_model_of_a_triton_that_ends_meanwhile_is_not_unloaded(
    folder: Path, restarts: list[ServerSettings]
) -> None:
    triton = Triton(folder / "log", "a", "b")

    async def scenario() -> None:
        one = supervised(folder, triton)
        with (folder / "log").open("a") as log:
            log.write(LOADS.format("a"))
        one.check(time.monotonic())
        triton.code = 1
        assert await outcome(one, "a") == "Triton is restarting: wait until it is ready"
        await until(one, lambda: restarts and one.report().state is State.READY)
        assert restarts[0].models == ("a", "b")
        assert await outcome(one, "a") == "", "it can be unloaded then"
        await one.settle()

    asyncio.run(scenario())


def test_a_triton_that_does_not_unload_a_model_is_restarted_without_it(
    folder: Path, restarts: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_UNLOAD_BEGINS", 0.1)
    triton = Triton(folder / "log", "a", "b")
    triton.obeys = False
    lines: list[str] = []

    async def scenario() -> None:
        one = supervised(folder, triton, lines)
        assert await outcome(one, "a") == ""
        await one.settle()

    asyncio.run(scenario())
    assert restarts[0].models == ("b",)
    assert "triton: restarting (Triton does not unload a)" in lines
    assert lines[-1] == "a: unloaded"


def test_an_unload_that_waits_for_a_load_is_no_reason_for_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "_UNLOAD_BEGINS", 0.3)
    monkeypatch.setattr(orders, "CHECK_INTERVAL", 0.01)
    triton = Triton(folder / "log", "a", "b")
    triton.obeys = False

    async def scenario() -> None:
        one = supervised(folder, triton)
        with (folder / "log").open("a") as log:
            log.write(LOADS.format("b"))
        one.check(time.monotonic())
        unloading = asyncio.create_task(one.unload("a"))
        began = time.monotonic()
        await until(one, lambda: time.monotonic() - began > 0.6)
        with (folder / "log").open("a") as log:
            log.write(LOADED.format("b"))
        await until(one, lambda: time.monotonic() - began > 0.7)
        assert one.alive
        triton.ready.remove("a")
        await until(one, unloading.done)
        await one.settle()

    asyncio.run(scenario())


def test_a_model_of_a_triton_that_does_not_answer_is_not_called_unloaded(folder: Path) -> None:
    triton = Triton(folder / "log", "a", "b")
    triton.hangs = True
    lines: list[str] = []

    async def scenario() -> None:
        one = supervised(folder, triton, lines)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one.unload("a"), 0.3)
        await one.settle()

    asyncio.run(scenario())
    assert lines == []


def test_a_user_may_unload_all_that_answers(folder: Path, restarts: list[ServerSettings]) -> None:
    """It is no failure, not even if what is left has failed, or if Triton then ends."""
    triton = Triton(folder / "log", "a", b="no weights")

    async def scenario() -> None:
        one = supervised(folder, triton)
        assert await outcome(one, "a") == ""
        assert not one.kept.failed
        assert await outcome(one, "b") == ""
        triton.code = 1
        await until(one, lambda: restarts and one.report().state is State.READY)
        assert restarts[0].names() == []
        assert not one.kept.failed
        await one.settle()

    asyncio.run(scenario())


def test_if_all_models_have_failed_nothing_is_left_to_answer(folder: Path) -> None:
    async def scenario() -> None:
        one = supervised(folder, Triton(folder / "log", a="no weights"))
        assert one.kept.failed
        assert one.why_it_failed() == {"a: no weights"}
        await one.settle()

    asyncio.run(scenario())


def test_a_server_that_has_loaded_goes_on_without_its_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    settings = ServerSettings(folder / "repo", renewable=True)
    triton: Any = Triton(folder / "log", "a")
    gone = folder / "no folder" / "serve.sock"
    server = Supervisor([settings], [triton], notify=lines.append, control=gone)
    # What it would have waited for: it checks once, then its user stops it.
    # No signal: it would end the tests' own process if it came a moment later.
    monkeypatch.setattr(Keeper, "check", lambda *_: server._signalled())
    server.run()
    assert lines[0].startswith(
        "note: `llmserve reload` and others cannot reach this server: [Errno"
    )
    assert lines[1] == "stopping, requests in flight are finished first"


# The pieces alone.


def kept(folder: Path, triton: Any) -> Kept:
    return Kept(ServerSettings(folder / "repo", renewable=True), triton, lambda _: None)


FAILED = "E1125 15:45:27.9 24669 m.cc:472] \"failed to load 'a' version 1: Internal: {}\"\n"


@pytest.mark.parametrize(
    ("served", "why", "state"),
    [
        (True, "RuntimeError: busy", State.RESTARTING),
        (True, "ImportError: no acme", State.FAILED),
        (False, "RuntimeError: busy", State.FAILED),
    ],
)
def test_a_load_that_failed_is_tried_again_if_it_may_succeed(
    folder: Path, served: bool, why: str, state: State
) -> None:
    one, given_up = kept(folder, Triton(folder / "log", "a")), list[KeptModel]()
    model = one.models["a"]
    model.state, model.served = State.LOADING, served
    with (folder / "log").open("a") as log:
        log.write(FAILED.format(why))
    Detector(one, given_up.append).check(time.monotonic())
    assert (model.state, given_up) == (state, [model])


@pytest.mark.parametrize(("served", "state"), [(True, State.RESTARTING), (False, State.READY)])
def test_a_triton_that_does_not_begin_to_load_is_restarted_for_a_model_that_it_had(
    folder: Path, served: bool, state: State
) -> None:
    one = kept(folder, Triton(folder / "log", "a"))
    one.models["a"].state, one.models["a"].served = State.LOADING, served
    Detector(one, lambda _: None).check(time.monotonic() + 20)
    assert one.triton.state is state
    assert one.models["a"].state is (State.RESTARTING if served else State.FAILED)


@pytest.fixture
def idle() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def test_a_triton_that_a_signal_has_stopped_is_restarted_in_seconds(
    folder: Path, restarts: list[ServerSettings], idle: int
) -> None:
    triton = Triton(folder / "log", "a")
    triton.pid = idle
    lines: list[str] = []

    async def scenario() -> None:
        one = supervised(folder, triton, lines)
        os.kill(idle, signal.SIGSTOP)
        began = time.monotonic()
        await until(one, lambda: restarts and one.report().state is State.READY)
        assert time.monotonic() - began < 6
        await one.settle()

    asyncio.run(scenario())
    assert lines[0] == "triton: restarting (Triton is stopped, by a signal)"


def test_a_triton_that_does_not_answer_is_waited_for_as_long_as_it_works(
    folder: Path, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "_SILENT", 0.5)
    triton = Triton(folder / "log", "a")

    def answer_late() -> dict[str, int]:
        time.sleep(2.0)
        return {"a": 1}

    monkeypatch.setattr(triton, "answers", answer_late, raising=False)

    async def seen() -> Mapping[str, int]:
        one = supervised(folder, triton)
        try:
            return await keeper._Seen(one.kept).answers()
        finally:
            await one.settle()

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        triton.pid = busy.pid
        assert asyncio.run(seen()) == {"a": 1}
        busy.kill()
    triton.pid = idle
    with pytest.raises(ServerError, match=r"no answer in 0\.5 s, and it does nothing"):
        asyncio.run(seen())


def test_a_model_that_waits_for_another_to_load_is_not_taken_for_stuck(folder: Path) -> None:
    """Triton loads one after the other, and begins with the next only at its next look."""
    one, given_up = kept(folder, Triton(folder / "log", "a", "b")), list[KeptModel]()
    detector, now = Detector(one, given_up.append), time.monotonic()
    one.models["b"].state, one.models["b"].served = State.LOADING, False
    one.models["b"].since = now
    with (folder / "log").open("a") as log:
        log.write(LOADS.format("a"))
    detector.check(now + 20)
    with (folder / "log").open("a") as log:
        log.write(LOADED.format("a"))
    detector.check(now + 20.5)
    assert not given_up
    detector.check(now + 37)
    assert one.models["b"].state is State.FAILED
    assert given_up == [one.models["b"]], "it must not be loaded later, when nobody expects it"


@pytest.mark.parametrize("served", [False, True])
def test_a_process_that_goes_on_after_an_error_is_ended_if_it_serves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Triton would load nothing else meanwhile; of a model that was loaded, another may answer."""
    one = kept(folder, Triton(folder / "log", "a"))
    killed: list[str] = []
    monkeypatch.setattr(one.stubs, "kill", killed.append)
    detector, now = Detector(one, lambda _: None), time.monotonic()
    one.models["a"].state, one.models["a"].served, one.models["a"].since = (
        State.LOADING,
        served,
        now,
    )
    with (folder / "log").open("a") as log:
        log.write(LOADS.format("a") + RAISED)
    detector.check(now)
    assert killed == [], "it may be about to end"
    detector.check(now + 4)
    assert killed == ([] if served else ["a"])


@pytest.mark.parametrize("on_demand", [False, True])
def test_a_triton_that_waits_for_a_dead_process_is_restarted_for_others_later(
    folder: Path, on_demand: bool
) -> None:
    """What is loaded on demand fails alone; whoever uses the others is answered first."""
    one = kept(folder, Triton(folder / "log", "a", "b"))
    one.settings = replace(one.settings, on_demand=on_demand)
    model = one.models["a"]
    model.state, model.served, model.died_at, model.how = State.LOADING, False, 1.0, End(1)
    Detector(one, lambda _: None).check(time.monotonic())
    assert one.triton.state is (State.READY if on_demand else State.RESTARTING)
    assert model.state is (State.FAILED if on_demand else State.RESTARTING)
    assert one.models["b"].alive is on_demand
    assert (one.restart_wanted is not None) is on_demand
    one.lost(time.monotonic(), "Triton waits for a", fault=False)
    assert one.restart_wanted is None
    assert one.models["b"].state is State.RESTARTING


def test_a_dead_model_is_reloaded_with_its_parts_once_its_wait_is_over(folder: Path) -> None:
    triton: Any = Triton(folder / "log", "a", "b")
    renewed: list[str] = []
    triton.renew = renewed.append
    one = kept(folder, triton)
    one.models["a"].parts = ("b",)
    one.models["a"].died(10.0, "its process has died")
    Reloader(one).check(10.4)
    assert renewed == []
    Reloader(one).check(10.6)
    assert (renewed, one.models["a"].state) == (["b", "a"], State.LOADING)


def test_a_triton_that_cannot_reload_is_restarted(folder: Path) -> None:
    def renew(name: str) -> None:
        raise UsageError("this server cannot change its models")

    triton: Any = Triton(folder / "log", "a")
    triton.renew = renew
    one = kept(folder, triton)
    one.models["a"].died(10.0, "its process has died")
    Reloader(one).check(11.0)
    assert one.triton.state is State.RESTARTING


def test_a_triton_is_restarted_with_what_has_not_failed(
    folder: Path, restarts: list[ServerSettings]
) -> None:
    one = kept(folder, Triton(folder / "log", "a", b="no weights"))
    one.lost(10.0, "Triton ended")

    async def go() -> None:
        restarter = Restarter(one)
        restarter.check(10.1)
        assert not restarter.is_busy(), "it waits a moment"
        restarter.check(10.6)
        while restarter.is_busy():
            await asyncio.sleep(0.001)

    asyncio.run(go())
    assert [settings.models for settings in restarts] == [("a",)]
    assert (one.triton.state, one.models["a"].state) == (State.READY, State.READY)


def test_a_triton_that_hangs_too_often_is_ended(folder: Path) -> None:
    """Canaries find that out, between two checks."""
    triton = Triton(folder / "log", "a")

    async def scenario() -> None:
        one = supervised(folder, triton)
        one.kept.triton.failed(time.monotonic(), "no answer")
        await until(one, lambda: triton.code is not None)
        triton.code = None
        for _ in range(4):
            one.check(time.monotonic())
            await asyncio.sleep(0.01)
        assert triton.code is None, "it is ended once"
        await one.settle()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("backends", "running", "seen"),
    [
        ({"a": "python", "b": "python"}, "ab", True),
        ({"a": "python", "b": "python"}, "b", False),
        ({"a": "python", "b": "python"}, "a", False),
        ({"a": "python", "b": "onnxruntime"}, "a", True),
        ({"a": "python", "b": "onnxruntime"}, "b", False),
        ({"a": "python", "b": "onnxruntime"}, "", False),
        ({"a": "ensemble", "b": "python"}, "b", True),
        ({"a": "ensemble", "b": "python"}, "", False),
        # A backend that is written in Python, and one in a container.
        ({"a": "vllm", "b": "ensemble"}, "a", True),
        ({"a": "vllm", "b": "ensemble"}, "", False),
    ],
)
def test_what_should_have_a_process_is_seen_to_have_one(
    folder: Path, backends: dict[str, str], running: str, seen: bool
) -> None:
    """A model b is a part of a."""
    for name, backend in backends.items():
        key = "platform" if backend == "ensemble" else "backend"
        (folder / "repo" / name / "config.pbtxt").write_text(f'{key}: "{backend}"')
    kept: Any = SimpleNamespace(
        models={"a": SimpleNamespace(parts=("b",))},
        stubs=SimpleNamespace(of=lambda name: [1] if name in running else []),
        settings=SimpleNamespace(repository=folder / "repo"),
    )
    assert keeper._Seen(kept).has_processes("a") is seen
    assert not keeper._Seen(kept).has_processes("c")
