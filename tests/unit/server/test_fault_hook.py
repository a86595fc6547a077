"""Who is told of answers that are wrong: a command, or an address."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmserve.errors import ServerError
from llmserve.server.run.fault_hook import tell_fault

CONTENT = {"model": "demo", "fault": {"check": "answer", "prompt": "Once upon a time"}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        bodies: list[bytes] = vars(self.server).setdefault("bodies", [])
        bodies.append(body)
        self.send_response(404 if "gone" in self.path else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield listening
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_a_command_reads_it_as_json(tmp_path: Path) -> None:
    told = tmp_path / "it was told"
    tell_fault(f"cp /dev/stdin '{told}'", CONTENT)
    assert json.loads(told.read_text()) == CONTENT


def test_an_address_gets_it_as_json(server: HTTPServer) -> None:
    tell_fault(f"http://127.0.0.1:{server.server_port}/hook", CONTENT)
    assert [json.loads(body) for body in vars(server)["bodies"]] == [CONTENT]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (f"{sys.executable} -c 'exit(3)' token=s3cret", "its exit code was 3"),
        ("no-such-command token=s3cret", "No such file or directory"),
        ("echo 'token=s3cret", "it cannot be read"),
        ("http://127.0.0.1:1/hook?token=s3cret", "no answer"),
        ("http://[s3cret/hook", "no answer"),
    ],
)
def test_neither_command_nor_address_is_in_an_error(told: str, why: str) -> None:
    with pytest.raises(ServerError) as error:
        tell_fault(told, CONTENT)
    assert error.value.problem == why
    assert error.value.__context__ is None or error.value.__suppress_context__


def test_an_address_that_refuses_is_said_by_its_status(server: HTTPServer) -> None:
    with pytest.raises(ServerError, match="it answered 404") as error:
        tell_fault(f"http://127.0.0.1:{server.server_port}/gone?token=s3cret", CONTENT)
    assert "s3cret" not in str(error.value)
