"""Tests of the frontend without Triton: the client is a stand-in."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import Address, Place, UsageError
from llmserve.scaffold.frontend import llmserve_register_frontends, server
from llmserve.scaffold.frontend.server import ScaffoldServer


class Backwards:
    """A client of a model that answers backwards."""

    def generate(self, model: str, prompt: str) -> Any:
        assert model == "demo"
        return type("Answer", (), {"text": prompt[::-1]})


@pytest.fixture
def url() -> Iterator[str]:
    client: Any = Backwards()
    with ScaffoldServer(("127.0.0.1", 0), client, "demo") as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_the_body_is_the_prompt(url: str) -> None:
    with urllib.request.urlopen(url, data="é!".encode(), timeout=10) as answer:
        assert answer.read().decode() == "!é"


def test_a_body_that_is_too_long_is_refused(url: str) -> None:
    request = urllib.request.Request(url, data=b"", headers={"Content-Length": "9" * 12})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=10)


def test_a_body_that_trickles_in_is_cut_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmserve.scaffold.frontend.server._SECONDS_TO_SEND", 0.5)
    began = time.monotonic()
    with connection_of(url) as connection:
        connection.sendall(b"POST / HTTP/1.0\r\nContent-Length: 1000\r\n\r\n")
        connection.settimeout(0.05)
        while time.monotonic() - began < 10:
            connection.sendall(b"x")
            with suppress(TimeoutError):
                assert connection.recv(1) == b""
                break
    assert time.monotonic() - began < 10


def test_an_incomplete_body_is_refused(url: str) -> None:
    with connection_of(url) as connection:
        connection.sendall(b"POST / HTTP/1.0\r\nContent-Length: 9\r\n\r\nabc")
        connection.shutdown(socket.SHUT_WR)
        assert b" 400 " in connection.recv(1000)


def test_a_client_that_is_in_no_hurry_does_not_keep_the_process_beyond_its_grace() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--url", "127.0.0.1:1", "--model", "demo"]
    words = [sys.executable, "-m", server.__name__, *options, "--port", str(port), "--grace", "1"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        with connection_of(f"http://127.0.0.1:{port}") as connection:
            connection.sendall(b"POST / HTTP/1.0\r\n")
            # The connection is accepted by the system first, and then by the process.
            time.sleep(0.2)
            began = time.monotonic()
            for _ in range(2):
                process.terminate()
                time.sleep(0.2)
            _, errors = process.communicate(timeout=20)
        assert 0.9 < time.monotonic() - began < 15
        assert (process.returncode, errors) == (0, "")


def connection_of(url: str) -> socket.socket:
    """Connect to a frontend that is starting."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_keys_are_refused(tmp_path: Path) -> None:
    (frontend,) = llmserve_register_frontends()
    with pytest.raises(UsageError, match="knows no keys"):
        frontend.arguments(
            Place((Address("127.0.0.1:8001"),), "127.0.0.1", 8090, 1.0, keys=tmp_path)
        )
