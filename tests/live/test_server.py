"""A real Triton is started and used."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from llmserve.errors import ServerError
from llmserve.server import LoadProgress, Server, ServerSettings, start
from llmserve.server.settings import Ports, choose_ports
from llmserve.testing.orders import Orders
from tests.live.servers import (
    ECHO,
    IMPORTS,
    RAISES,
    SLOW,
    echo,
    eventually,
    leftovers,
    repository,
    settings,
)


@pytest.fixture(scope="module")
def progress() -> list[LoadProgress]:
    return []


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, progress: list[LoadProgress]
) -> Iterator[Server]:
    folder = repository(tmp_path_factory.mktemp("models"), echo=ECHO)
    with start(settings(folder), on_progress=progress.append) as running:
        yield running


def test_it_answers(server: Server, progress: list[LoadProgress]) -> None:
    assert echo(server, "naïve 🌊") == "naïve 🌊"
    assert re.fullmatch(r"embedded Triton \d+\.\d+\.\d+", server.runtime)
    assert server.alive()
    assert server.wait(0.01) is None
    assert any(step.loading == ("echo",) for step in progress)
    assert progress[-1].ready == ("echo",)
    with urllib.request.urlopen(server.metrics_url, timeout=60) as metrics:
        assert b"nv_inference_count" in metrics.read()


def test_models_are_loaded_and_unloaded(tmp_path: Path) -> None:
    folder = repository(tmp_path, echo=ECHO, second=ECHO, broken=IMPORTS)
    with Orders.start(settings(folder, renewable=True, models=("echo",))) as orders:
        server = orders.server
        for text in ("here", "again"):
            orders.load("second")
            assert echo(server, text, model="second") == text
            orders.unload("second")
            assert server.models() == {"echo": "READY"}
        with pytest.raises(ServerError, match="ModuleNotFoundError: No module named 'acme'"):
            orders.load("second", "broken")
        with pytest.raises(ServerError, match="absent"):
            orders.load("absent")
        eventually(lambda: server.models() == {"echo": "READY", "second": "READY"})
        assert echo(server, "still") == "still"
        assert orders.server is server


@pytest.mark.long
def test_a_load_that_hangs_is_ended_and_the_old_model_answers_meanwhile(tmp_path: Path) -> None:
    folder = repository(tmp_path, echo=ECHO)
    with Orders.start(settings(folder, renewable=True, ready_timeout=8)) as orders:
        server = orders.server
        (folder / "echo" / "1" / "model.py").write_text(SLOW)
        repository(folder, new=SLOW)
        for name in ("echo", "new"):
            with pytest.raises(ServerError, match="it was not loaded within 8 s"):
                orders.load(name)
            assert echo(server, "still") == "still"
        (folder / "echo" / "1" / "model.py").write_text(ECHO)
        orders.load("echo")
        assert orders.server is server, "it was not restarted"
        assert echo(server, "again") == "again"


@pytest.mark.parametrize("models", [("echo",), ("echo", "engine")])
def test_only_an_engine_of_several_processes_that_it_serves_keeps_it_from_changing_models(
    tmp_path: Path, models: tuple[str, ...]
) -> None:
    (repository(tmp_path, echo=ECHO, engine=ECHO) / "engine" / "launch.sh").touch()
    with start(settings(tmp_path, renewable=True, models=models)) as server:
        assert server.renewable is ("engine" not in models)


def test_a_free_port_that_is_lost_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = socket.socket()
    choose = choose_ports

    def choose_and_lose(options: ServerSettings) -> Ports:
        chosen = choose(options)
        if rival.getsockname()[1] == 0:
            rival.bind(("127.0.0.1", chosen.grpc))
            rival.listen()
        return chosen

    monkeypatch.setattr("llmserve.server.startup.choose_ports", choose_and_lose)
    with rival, start(settings(repository(tmp_path, echo=ECHO))) as second:
        assert not second.grpc_url.endswith(f":{rival.getsockname()[1]}")
        assert echo(second, "again") == "again"


def test_a_model_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ServerError) as failed:
        start(
            settings(repository(tmp_path, fine=ECHO, bad=RAISES)),
            on_progress=lambda step: steps.append(str(step)),
        )
    assert failed.value.problem == (
        "model 'bad' failed to load: ValueError: the weights are cut short"
    )
    # The loading steps that are seen depend on timing, but there must be no second start.
    assert [line for line, _ in groupby(steps)].count("starting Triton") == 1
    log = Path(str(failed.value.hint).removeprefix("see "))
    assert "cut short" in log.read_text(encoding="utf-8")
    assert leftovers(log.name.rsplit("-", 1)[0]) == []
    log.unlink()


def test_a_repository_that_triton_refuses(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    (repository(tmp_path / "models", echo=ECHO) / "notes").mkdir()
    with pytest.raises(ServerError, match="notes") as failed:
        start(settings(tmp_path / "models", log_file=log))
    assert failed.value.hint == f"see {log}"
    assert "\n" not in str(failed.value)


def test_a_model_without_its_file_does_not_hang(tmp_path: Path) -> None:
    """Triton itself waits forever for the stub, which has ended."""
    (repository(tmp_path, hollow=ECHO) / "hollow" / "1" / "model.py").unlink()
    with pytest.raises(ServerError, match=r"model file not found in '.*hollow/1/model\.py'"):
        start(settings(tmp_path, log_file=tmp_path / "triton.log", ready_timeout=120))
