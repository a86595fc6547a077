from __future__ import annotations

import socket
from pathlib import Path

import pytest

from llmserve.errors import PortInUseError, ServerError, UsageError
from llmserve.server import ServerSettings, port_problems
from llmserve.server.settings import choose_ports


def settings(http: int, grpc: int, metrics: int, host: str = "127.0.0.1") -> ServerSettings:
    return ServerSettings(
        Path("models"), host=host, http_port=http, grpc_port=grpc, metrics_port=metrics
    )


def test_free_ports_differ_and_are_free() -> None:
    chosen = choose_ports(settings(0, 0, 0))
    assert len({chosen.http, chosen.grpc, chosen.metrics}) == 3
    assert choose_ports(settings(chosen.http, chosen.grpc, chosen.metrics)) == chosen


def test_a_name_becomes_an_address() -> None:
    assert choose_ports(settings(0, 0, 0, host="localhost")).host == "127.0.0.1"


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_taken_port_is_named(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        wanted = {"http": 0, "grpc": 0, "metrics": 0, name: taken}
        with pytest.raises(PortInUseError, match=f"port {taken} for {name} .*--{name}-port 0"):
            choose_ports(settings(**wanted))


def test_every_taken_port_is_named_at_once() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        http, metrics = one.getsockname()[1], two.getsockname()[1]
        with pytest.raises(PortInUseError) as taken:
            choose_ports(settings(http, 0, metrics))
        problems = port_problems(settings(http, 0, metrics))
    assert f"port {http} for http is in use" in taken.value.problem
    assert f"port {metrics} for metrics is in use" in taken.value.problem
    assert len(problems) == 2
    assert port_problems(settings(0, 0, 0)) == []


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (settings(4711, 4711, 0), UsageError, "the same"),
        (settings(70000, 0, 0), UsageError, "70000 is no port"),
        (settings(0, 0, 0, host="192.0.2.1"), ServerError, r"192\.0\.2\.1"),
    ],
)
def test_what_cannot_be_meant(wanted: ServerSettings, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_ports(wanted)
