"""A reconciler, whose Triton does what the test says: in an order that a real one rarely has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.contract.report import State
from llmserve.errors import NotLoadedError, ServerError, UsageError
from llmserve.repository.repository import Model
from llmserve.server import OnDemand, ServerSettings
from llmserve.server.keep import act, observe, reconciler
from llmserve.server.keep.memory import TritonMemory
from llmserve.server.keep.observe import RunningTriton, TritonObserver
from llmserve.server.keep.reconciler import Reconciler
from llmserve.server.keep.supervisor import Supervisor
from llmserve.server.run.stubs import Stubs
from llmserve.server.settings import Ports

LOADED = "I1125 15:45:29.9 24669 model_lifecycle.cc:838] \"successfully loaded '{}'\"\n"


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

    def models(self) -> dict[str, str]:
        return dict.fromkeys(self.ready, "READY")

    def wait(self, timeout: float) -> int | None:
        return self.code

    def stop(self, *, grace: float) -> None:
        self.code = 0

    def drop(self, name: str) -> None:
        self.ready = [each for each in self.ready if each != name]

    def renew(self, name: str) -> None:
        with self.log_file.open("a") as log:
            log.write(LOADED.format(name))
        self.ready.append(name)

    def answers(self) -> dict[str, int]:
        return {}

    def takes_requests(self, name: str) -> bool:
        return name in self.ready


@pytest.fixture
def restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of every Triton that replaced one."""
    all_settings: list[ServerSettings] = []

    def start(settings: ServerSettings, **_: Any) -> Triton:
        all_settings.append(settings)
        return Triton(tmp_path / "log", *settings.names())

    monkeypatch.setattr(act, "start", start)
    return all_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    for name in ("a", "b"):
        (tmp_path / "repo" / name / "1").mkdir(parents=True)
        (tmp_path / "repo" / name / "1" / "model.py").touch()
        (tmp_path / "repo" / name / "config.pbtxt").write_text('backend: "python"')
    return tmp_path


def kept(
    folder: Path,
    triton: Any,
    lines: list[str] | None = None,
    offered: Sequence[str] = (),
    on_demand: OnDemand | None = None,
) -> Reconciler:
    settings = ServerSettings(
        folder / "repo", runtime="embedded", renewable=True, on_demand=on_demand is not None
    )
    notify = (lines if lines is not None else []).append
    return Reconciler([settings], [triton], notify, on_demand=on_demand, offered=offered)


async def until(one: Reconciler, done: Callable[[], Any]) -> None:
    """Keep it until something is so."""
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        one.step()
        await asyncio.sleep(0.01)


async def ordered(one: Reconciler, do: str, name: str) -> None:
    order = asyncio.create_task(one.order(do, name))
    await until(one, order.done)
    order.result()


def state_of(one: Reconciler) -> State:
    return one.report().state


def test_a_triton_that_ends_is_started_again_at_its_ports_with_its_models(
    folder: Path, restarts: list[ServerSettings]
) -> None:
    triton = Triton(folder / "log", "a", b="no weights")
    lines: list[str] = []

    async def scenario() -> None:
        one = kept(folder, triton, lines)
        one.step()
        triton.code = 1
        await until(one, lambda: restarts and state_of(one) is State.READY)
        assert restarts[0].models == ("a",)
        assert (restarts[0].http_port, restarts[0].grpc_port) == (1, 2)
        assert one.report().restarts == 1
        await one.settle()

    asyncio.run(scenario())
    assert lines[0] == "triton: restarting (Triton ended: killed by SIGKILL)"


def test_a_triton_that_a_signal_has_stopped_is_restarted_in_seconds(
    folder: Path, restarts: list[ServerSettings], idle: int
) -> None:
    triton = Triton(folder / "log", "a")
    triton.pid = idle
    lines: list[str] = []

    async def scenario() -> None:
        one = kept(folder, triton, lines)
        os.kill(idle, signal.SIGSTOP)
        began = time.monotonic()
        await until(one, lambda: restarts and state_of(one) is State.READY)
        assert time.monotonic() - began < 6
        await one.settle()

    asyncio.run(scenario())
    assert lines[0] == "triton: restarting (Triton is stopped, by a signal)"


def test_a_user_loads_and_unloads_what_is_on_demand(folder: Path) -> None:
    triton = Triton(folder / "log")

    async def scenario() -> None:
        one = kept(folder, triton, offered=["a"], on_demand=OnDemand())
        for do, ready in (("load", ["a"]), ("reload", ["a"]), ("unload", [])):
            await ordered(one, do, "a")
            assert triton.ready == ready
        model = one.with_demand(one.report().models[0])
        assert model.state is State.UNLOADED
        assert model.demand is not None
        assert not model.demand.loaded
        with pytest.raises(ServerError, match="no model 'c' in"):
            await one.order("load", "c")
        (folder / "repo" / "b" / "config.pbtxt").write_text("{")
        with pytest.raises(ServerError, match="b:"):
            await one.order("load", "b")
        await one.settle()

    asyncio.run(scenario())


def test_a_triton_that_cannot_unload_a_model_any_more_ends_no_server(folder: Path) -> None:
    """As one that was started again after a model was built anew, for several processes."""

    class Fixed(Triton):
        def drop(self, name: str) -> None:
            raise UsageError("this server cannot change its models")

    async def scenario() -> None:
        one = kept(folder, Fixed(folder / "log", "a", "b"))
        order = asyncio.create_task(one.order("unload", "a"))
        await until(one, lambda: one.memory.tritons[0].unloading)
        for _ in range(3):
            one.step()
            await asyncio.sleep(0.01)
        assert not order.done(), "it is restarted without the model, after a minute"
        await one.settle()
        await asyncio.gather(order, return_exceptions=True)

    asyncio.run(scenario())


def test_supervision_that_fails_is_tried_again_for_a_minute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        lines: list[str] = []
        one = kept(folder, Triton(folder / "log", "a"), lines)
        failing = True

        def decide(*_: Any) -> list[Any]:
            if failing:
                raise KeyError("a fault of ours")
            return []

        monkeypatch.setattr(reconciler, "decide", decide)
        for _ in range(3):
            one.step()
        assert lines == [
            "note: supervision failed, and is tried again: KeyError: 'a fault of ours'"
        ]
        failing = False
        one.step()
        failing = True
        one.step()
        assert len(lines) == 2
        monkeypatch.setattr(reconciler, "_PATIENCE", 0.0)
        with pytest.raises(KeyError):
            one.step()
        await one.settle()

    asyncio.run(run())


def test_a_hold_is_granted_at_once_if_its_model_is_loaded(folder: Path) -> None:
    async def scenario() -> None:
        one = kept(folder, Triton(folder / "log", "a"), offered=["a", "b"], on_demand=OnDemand())
        one.step()
        assert one.hold("a").granted.done()
        waiting = one.hold("b")
        assert not waiting.granted.done()
        await until(one, waiting.granted.done)
        await one.settle()
        with pytest.raises(NotLoadedError):
            await one.hold("a").granted

    asyncio.run(scenario())


def test_who_waits_at_the_end_is_refused(folder: Path) -> None:
    async def scenario() -> None:
        one = kept(folder, Triton(folder / "log"), offered=["a"], on_demand=OnDemand())
        one.step()
        hold, order = one.hold("a"), asyncio.create_task(one.order("unload", "a"))
        await asyncio.sleep(0)
        await one.settle()
        with pytest.raises(NotLoadedError):
            await hold.granted
        with pytest.raises(ServerError):
            await order
        one.release(hold)

    asyncio.run(scenario())


def test_a_part_is_not_offered_beside_its_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "part_of", "a")

    async def scenario() -> None:
        one = kept(folder, Triton(folder / "log"), offered=["a"], on_demand=OnDemand())
        for do in ("load", "reload", "unload"):
            with pytest.raises(ServerError, match=f"b is a part of a: {do} a"):
                await one.order(do, "b")
        await one.settle()

    asyncio.run(scenario())


def test_a_server_that_has_loaded_goes_on_without_its_socket(folder: Path) -> None:
    lines: list[str] = []
    settings = ServerSettings(folder / "repo", renewable=True)
    triton: Any = Triton(folder / "log", "a")
    gone = folder / "no folder" / "serve.sock"
    server = Supervisor([settings], [triton], control=gone)

    def stop_then(line: str) -> None:
        # No signal: it would end the tests' own process if it came a moment later.
        lines.append(line)
        if len(lines) == 1:
            server.stop()

    server.notify = stop_then
    server.run()
    assert lines[0].startswith(
        "note: `llmserve reload` and others cannot reach this server: [Errno"
    )
    assert lines[1] == "stopping, requests in flight are finished first"


# What shows that a model is alive


def test_every_process_of_a_model_has_another_number(folder: Path) -> None:
    """What a canary has heard of one must not end another, in a Triton that was started again."""
    log = folder / "log"
    running = RunningTriton(ServerSettings(folder / "repo"), Triton(log, "a"))  # type: ignore[arg-type]
    numbers = []
    for loads in (0, 2, 0, 1):
        for _ in range(loads):
            running.server.renew("a")
        running.log.read()
        numbers.append(running.load_number("a"))
        running.take_over(Triton(log, "a"))  # type: ignore[arg-type]
    assert numbers == [0, 3, 4, 6]


@pytest.fixture
def idle() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


async def with_observer(folder: Path, triton: Any, use: Callable[[Any], Any]) -> Any:
    """Use an observer whose Triton has a model a, with a part b."""
    running = RunningTriton(ServerSettings(folder / "repo", runtime="embedded"), triton)
    memory = TritonMemory(0)
    memory.add("a", State.READY, 0.0, ("b",))
    observer = TritonObserver(running, memory, lambda: None)
    try:
        return await use(observer)
    finally:
        await observer.close()


def test_a_triton_that_does_not_answer_is_waited_for_as_long_as_it_works(
    folder: Path, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "_SILENT", 0.5)
    triton = Triton(folder / "log", "a")

    def answer_late() -> dict[str, int]:
        time.sleep(2.0)
        return {"a": 1}

    monkeypatch.setattr(triton, "answers", answer_late)

    def answers() -> Mapping[str, int]:
        found: Mapping[str, int] = asyncio.run(
            with_observer(folder, triton, lambda observer: observer.answers())
        )
        return found

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        triton.pid = busy.pid
        assert answers() == {"a": 1}
        busy.kill()
    triton.pid = idle
    with pytest.raises(ServerError, match=r"no answer in 0\.5 s, and it does nothing"):
        answers()


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
    triton: Any = Triton(folder / "log")
    triton.stubs = SimpleNamespace(of=lambda name: [1] if name in running else [])

    async def has_processes(observer: TritonObserver) -> list[bool]:
        return [observer.has_processes(name) for name in "ac"]

    assert asyncio.run(with_observer(folder, triton, has_processes)) == [seen, False]
