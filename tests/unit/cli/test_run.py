"""`llmserve run` without a Triton: what it refuses, and the process of its server."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmserve.commands import Status
from llmserve.contract.report import ModelReport, ServerReport, State
from llmserve.errors import (
    LLMServeError,
    ModelNotReadyError,
    OptionError,
    ServerError,
    UsageError,
)
from llmserve.server import ChildProcess, Running
from llmserve_cli import run as run_module
from llmserve_cli.group import cli
from llmserve_cli.server_process import ServerProcess, serving


def invoke(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli, ["run", *words], input=stdin, standalone_mode=False)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["demo", "Hi", "--serve-only"], UsageError, "--serve-only takes no prompt: leave one of"),
        (
            ["demo", "--plugin", "hf", "--dtype", "a", "--set", "dtype=b"],
            OptionError,
            "given twice",
        ),
        (["demo", "--name", ""], UsageError, "--name is empty"),
        (["demo", "--plugin", "hf", "--set", "decopled=true"], OptionError, "mean 'decoupled'"),
        (["dmeo", "--plugin", "hf"], LLMServeError, "did you mean 'demo'?"),
        (["./none", "--plugin", "hf"], LLMServeError, "no folder at ./none"),
        (["none.gguf", "--plugin", "hf"], LLMServeError, "no file at none.gguf: "),
        (["", "--plugin", "hf"], LLMServeError, "the model is not named"),
        (["x" * 400, "--plugin", "hf"], LLMServeError, "x… cannot be a path: File name too long"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_built(
    words: list[str], kind: type[LLMServeError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = invoke(*words).exception
    assert isinstance(error, kind)
    assert message in str(error)


def test_a_terminal_without_a_place_for_the_answers_is_refused() -> None:
    command = "import sys; sys.stdin.isatty = lambda: True; from llmserve_cli.main import main; "
    command += "main(['run', 'demo'])"
    result = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert result.stderr == (
        "llmserve: standard output is no terminal to have a conversation in: give a prompt, or "
        "--serve-only\n"
    )


def test_serve_only_is_serve(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = invoke("demo", "--plugin", "hf", "--serve-only", "--port", port).exception
    assert (
        str(error) == f"port {port} for frontend is in use on 127.0.0.1: --port 0 picks a free one"
    )
    assert (tmp_path / "home" / "models" / "demo" / "demo" / "config.pbtxt").is_file()


def test_ports_that_are_taken_are_replaced_by_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_module._frontend_port(9000) == 9000
    taken: set[int] = set()

    def free_port(host: str, port: int, name: str) -> int:
        if port in taken:
            raise ServerError("in use")
        return port

    monkeypatch.setattr("llmserve.server.free_port", free_port)
    usual = {"http_port": 8000, "grpc_port": 8001, "metrics_port": 8002}
    assert (run_module._frontend_port(None), run_module._triton_ports()) == (None, usual)
    taken |= {8001, 8080}
    assert run_module._frontend_port(None) == 0
    assert run_module._triton_ports() == {**usual, "grpc_port": 0}


def test_what_a_server_says_when_it_cannot_start_is_the_error(tmp_path: Path) -> None:
    words = pytest.raises(ServerError, match=r"no repository at .*none")
    with words as raised, serving(tmp_path / "none", []):
        raise AssertionError
    assert raised.value.exit_code == 3


def test_a_server_that_was_killed_is_noticed() -> None:
    process = ChildProcess(["sleep", "60"])
    started = ServerProcess(process, Status("starting"))
    started.follow()
    started.check()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ServerError, match="the server has ended: killed by SIGKILL"):
        started.check()
    started.stop()


def test_a_triton_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started = ServerProcess(ChildProcess(["sleep", "60"]), Status("starting"))
    started.follow()
    started.is_starting = False
    model = ModelReport("m", State.LOADING, "Triton ended: killed by SIGKILL")
    report = ServerReport(State.LOADING, "u", models=(model,), pid=started.process.pid)
    monkeypatch.setattr(
        "llmserve_cli.server_process.find_servers", lambda: [Running(Path("s"), report)]
    )
    with pytest.raises(ModelNotReadyError, match=r"the server is loading \(Triton ended: killed"):
        started.check()
    report = replace(report, state=State.READY)
    started.check()
    started.stop()


def test_why_a_server_has_ended_is_not_shown_as_progress_too() -> None:
    steps: list[str] = []
    lines = ["llmserve: loading m\n", "llmserve: m failed to load\n"]
    process: Any = SimpleNamespace(stderr=lines, poll=lambda: 1, killed_by="")
    status: Any = SimpleNamespace(update=steps.append)
    started = ServerProcess(process, status)
    started.follow()
    with pytest.raises(ServerError, match=r"^m failed to load$"):
        started.check()
    assert steps == ["loading m"]


def test_what_the_command_has_noted_is_not_shown_of_its_server_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMSERVE_BLOCK_PLUGINS", "nope")
    servers: list[ServerProcess] = []
    follow = ServerProcess.follow

    def followed(self: ServerProcess) -> None:
        servers.append(self)
        follow(self)

    monkeypatch.setattr(ServerProcess, "follow", followed)
    with pytest.raises(ServerError, match="no repository at"), serving(tmp_path / "none", []):
        raise AssertionError
    assert any("LLMSERVE_BLOCK_PLUGINS names 'nope'" in line for line in servers[0].lines)
    assert "nope" not in capsys.readouterr().err
