"""The control socket, and the commands that find a running `serve` by it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import llmserve
from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import (
    LLMServeError,
    ModelNotReadyError,
    ServerError,
    UnreachableError,
    UsageError,
)
from llmserve.server import LoadProgress, ServerSettings
from llmserve.server.keep import control
from llmserve.server.keep.control import announced, ask, control_folder, listening, running_servers
from llmserve.server.keep.start_report import StartReport
from llmserve.testing import ScriptedTriton
from llmserve_cli.group import cli

Announce = Callable[..., AbstractContextManager[Path]]


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's servers are listed, and no others."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("LLMSERVE_URL", raising=False)
    return folder


class Fake:
    """A `serve` that says that it is at an address, and records what it is asked."""

    def __init__(self, url: str, repository: Path, *models: str, state: str = "ready") -> None:
        self.report = ServerReport(
            State(state), pid=7, url=url, runtime="Triton", repository=str(repository.resolve()),
            models=tuple(ModelReport(name, State(state)) for name in models),
        )  # fmt: skip
        self.asked: list[Mapping[str, Any]] = []

    async def answer(self, request: Mapping[str, Any]) -> ServerReport:
        if request["do"] != "status":
            self.asked.append(request)
        return self.report


@pytest.fixture
def serving() -> Iterator[Callable[..., Fake]]:
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> Fake:
            fake = Fake(*arguments, **options)
            stack.enter_context(announced(fake.answer))
            return fake

        yield start


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def refused(*words: str) -> LLMServeError:
    error = run(*words).exception
    assert isinstance(error, LLMServeError)
    return error


def test_a_server_is_listed_from_its_start_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "repo" / "demo").mkdir(parents=True)
    loading = StartReport(ServerSettings(tmp_path / "repo", grpc_port=0))
    with announced(loading.answer) as path:
        assert path.parent.stat().st_mode & 0o777 == 0o700
        ((found, status),) = running_servers()
        assert (found, status.pid, status.url) == (path, os.getpid(), "")
        assert (status.state, status.models[0].state) == ("loading", "loading")
        with pytest.raises(ServerError, match="still loading"):
            ask(path, {"do": "reload", "model": "demo"})
        loading.follow(LoadProgress(1.0, loading=(), ready=("demo",)))
        ((_, status),) = running_servers()
        assert (status.state, status.models[0].state) == ("loading", "ready")
        loading.done({"demo": "no weights"})
        ((_, status),) = running_servers()
        assert (status.state, status.models[0].why) == ("ready", "no weights")

        async def supervise() -> None:
            async def answer(request: Mapping[str, Any]) -> ServerReport:
                return ServerReport(State.SUSPECT, pid=9)

            async with listening(path, answer):
                assert await asyncio.to_thread(lambda: list(running_servers())) == [
                    (path, ServerReport(State.SUSPECT, pid=9))
                ]

        asyncio.run(supervise())
    assert list(control_folder().iterdir()) == []


def test_a_model_may_appear_while_a_status_is_told(tmp_path: Path) -> None:
    """Another thread follows the start meanwhile."""
    (tmp_path / "repo" / "demo").mkdir(parents=True)
    loading, ended = StartReport(ServerSettings(tmp_path / "repo")), threading.Event()

    def follow() -> None:
        for number in range(2000):
            loading.follow(LoadProgress(1.0, loading=(), ready=(f"new{number}",)))
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    while not ended.is_set():
        asyncio.run(loading.answer({"do": "status"}))
    thread.join()
    assert len(asyncio.run(loading.answer({"do": "status"})).models) == 2001


def test_a_socket_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> AbstractContextManager[None]:
        raise RuntimeError("whatever it is")

    async def answer(request: Mapping[str, Any]) -> ServerReport:
        raise AssertionError(request)

    monkeypatch.setattr(control, "listening", fail)
    with pytest.raises(RuntimeError, match="whatever it is"), announced(answer):
        pass


def test_what_a_killed_server_left_is_removed(runtime_folder: Path) -> None:
    dead = control_folder() / "1-dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    assert dead.exists()
    assert list(running_servers()) == []
    assert not dead.exists()


def test_a_server_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_TIMEOUT", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(control_folder() / "17-hangs.sock"))
        listener.listen()
        result = run("status")
        assert result.stdout.startswith("process 17  not answering\n")
        assert str(result.exception) == "not ready: process 17"
        error = refused("reload", "m")
        assert str(error) == "process 17 does not answer: continue it, or stop it"
        assert "the server process 17 is not answering: wait" in str(refused("query", "m", "Hi"))


def test_a_query_finds_the_server_that_runs(
    scripted: ScriptedTriton, url: str, serving: Callable[..., Fake], tmp_path: Path
) -> None:
    serving(url, tmp_path, "m")
    assert run("query", "m", "Hi").stdout == "cut off\n"
    assert scripted.prompts == ["Hi"]
    assert run("status").stdout.startswith(f"{url}  Triton, ready, {tmp_path}\n")


def test_status_says_what_the_models_are_and_which_are_not_loaded(
    serving: Callable[..., Fake], tmp_path: Path
) -> None:
    scripted = ScriptedTriton(models={"m": "unary"}, pieces=['{"context_length": 512}'])
    folder = tmp_path / "models"
    for name in ("m", "n"):
        llmserve.build("hf", "demo", name=name, output=folder)
    with scripted.serving() as url:
        serving(url, folder, "m")
        lines = run("status").stdout.splitlines()[1:]
        (server,) = json.loads(run("status", "--json").stdout)["servers"]
        assert str(refused("query", "n", "Hi")) == (
            f"'n' is not loaded in the server {url}: load it: llmserve reload n"
        )
        # A server that has its files is meant, though another one runs here.
        serving("127.0.0.1:1", tmp_path / "other", "o")
        assert "not loaded in the server" in str(refused("query", "n", "Hi"))
    size = r"\d[.\d]* MB"
    assert lines[0].split() == ["STATE", "PLUGIN", "SIZE", "CONTEXT", "RESTARTS"]
    assert re.fullmatch(rf"m +ready +hf +{size} +512 +0", lines[1])
    assert re.fullmatch(rf"n +unloaded +hf +{size} +0 +llmserve reload n loads it", lines[2])
    by_name = {model["name"]: model for model in server["models"]}
    assert by_name["m"]["disk"] > 1_000_000
    assert (by_name["m"]["context"], by_name["n"]["context"]) == (512, None)


def test_after_a_build_the_next_step_is_for_the_server_that_runs(
    serving: Callable[..., Fake], tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    words = ["build", "--plugin", "hf", "--model", "demo", "--output", str(folder), "--force"]
    assert run(*words).stderr == f"next: llmserve serve {folder}\n"
    serving("127.0.0.1:1", folder, "other")
    assert run(*words).stderr == "next: llmserve reload demo, in the server 127.0.0.1:1 that runs\n"


def test_without_a_server_the_usual_address_is_tried(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server of this machine may be there.
    monkeypatch.setattr("llmserve.client.url.DEFAULT_URL", "127.0.0.1:1")
    assert "at 127.0.0.1:1: " in str(refused("query", "m", "Hi", "--timeout", "5"))
    for words in (["status"], ["reload", "m"], ["unload", "m"]):
        error = refused(*words)
        assert isinstance(error, UnreachableError)
        assert str(error) == "no `llmserve serve` runs here: start one"
    error = refused("query", "m", "Hi", "--repository", "elsewhere")
    assert str(error).startswith("no `llmserve serve` runs for elsewhere: start one, or look")
    assert list(runtime_folder.iterdir()) == [], "who looks for servers leaves nothing"


@pytest.mark.parametrize("state", ["loading", "restarting"])
def test_a_server_that_is_not_ready_is_named(
    serving: Callable[..., Fake], tmp_path: Path, state: str
) -> None:
    serving("", tmp_path, "m", state=state)
    error = refused("query", "m", "Hi")
    assert isinstance(error, ModelNotReadyError)
    assert str(error).startswith(f"the server process 7 of {tmp_path} is {state}: wait until")
    assert run("status").stdout.startswith("process 7  Triton, ")


def test_one_of_several_is_chosen_by_its_model_then_by_the_folder(
    serving: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (tmp_path / name / "model_repository" for name in ("here", "there"))
    here.mkdir(parents=True)
    there.mkdir(parents=True)
    first = serving("127.0.0.1:1", here, "both", "first")
    second = serving("127.0.0.1:2", there, "both", "second")
    assert run("reload", "first").stderr.endswith("first is reloaded\n")
    assert run("unload", "second").stderr.endswith("second is unloaded\n")
    error = refused("reload", "both")
    assert isinstance(error, UsageError)
    assert "\n" not in str(error)
    assert str(error).startswith("2 servers run here (127.0.0.1:")
    assert str(error).endswith("choose one with --url or --repository")
    for folder in (here, here.parent):
        monkeypatch.chdir(folder)
        assert run("reload", "both").exception is None
    assert run("reload", "new").stderr.endswith("new is loaded\n"), "it was not there before"
    assert run("reload", "both", "--url", "127.0.0.1:2").exception is None
    assert run("unload", "both", "--repository", str(there)).exception is None
    load, unload = ({"do": do, "model": "both"} for do in ("reload", "unload"))
    assert first.asked[1:] == [load, load, {"do": "reload", "model": "new"}]
    assert second.asked[1:] == [load, unload]


@pytest.mark.parametrize("option", ["--port", "--frontend-port"])
def test_a_port_of_serve_is_that_of_its_frontend(tmp_path: Path, option: str) -> None:
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(tmp_path / "r"))
    free = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("serve", str(tmp_path / "r"), *free, option, str(port))
    assert (
        str(error) == f"port {port} for frontend is in use on 127.0.0.1: --port 0 picks a free one"
    )
    error = refused("serve", str(tmp_path / "r"), *free[:-2], "--metrics-port", "9", option, "9")
    assert "port 9 is for Triton's metrics and for openai: choose another --port" in str(error)
    error = refused("serve", str(tmp_path / "r"), *free, "--frontend", "none", option, "9")
    assert str(error).startswith("--port is for a frontend, and there is none: ")
    assert "pip install" in str(error)


def test_a_served_model_is_unloaded_before_it_is_removed(
    serving: Callable[..., Fake], tmp_path: Path
) -> None:
    repository = tmp_path / "repo"
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(repository))
    server = serving("127.0.0.1:1", repository, "demo")
    words = ["remove", "demo", "--repository", str(repository)]
    assert str(refused(*words)) == f"remove deletes {repository / 'demo'}: confirm it with --yes"
    assert server.asked == []
    assert run(*words, "--yes").stderr.endswith(f"{repository / 'demo'} is deleted\n")
    assert server.asked == [{"do": "unload", "model": "demo"}]
    assert not (repository / "demo").exists()


def test_a_model_that_may_not_be_deleted_is_not_unloaded_either(
    serving: Callable[..., Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repo"
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(repository))
    server = serving("127.0.0.1:1", repository, "demo")
    words = ["remove", "demo", "--repository", str(repository), "--yes"]
    access = os.access

    def as_others(path: Path, may: int, **options: Any) -> bool:
        # Root may change everything.
        writable = Path(path).stat().st_mode & 0o200 or not may & os.W_OK
        return bool(writable) and access(path, may, **options)

    monkeypatch.setattr(os, "access", as_others)
    for kept in (repository, repository / "demo", repository / "demo" / "1"):
        mode = kept.stat().st_mode
        kept.chmod(0o555)
        error = refused(*words)
        kept.chmod(mode)
        assert str(error).startswith(
            f"{repository / 'demo'} cannot be deleted: this user cannot change {kept}: do it as"
        )
    assert server.asked == []
    assert run(*words).exception is None


def test_a_model_that_a_silent_server_may_serve_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repo"
    run("build", "--plugin", "hf", "--model", "demo", "--output", str(repository))
    words = ["remove", "demo", "--repository", str(repository), "--yes"]
    monkeypatch.setattr(control, "_TIMEOUT", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(control_folder() / "17-hangs.sock"))
        listener.listen()
        error = refused(*words)
        assert str(error).startswith("process 17 does not answer, and may serve demo: continue it")
        assert (repository / "demo").exists()
        assert run(*words, "--force").exception is None
    assert not (repository / "demo").exists()
