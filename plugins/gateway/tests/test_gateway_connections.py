"""Connections over raw sockets: clocks, the room for new ones, and unusual requests."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from llmserve_gateway import connections as connections_module
from llmserve_gateway.connections import Clocks, Connections, note_upload
from llmserve_gateway.keys import new_key

from .gateways import certificate, gateway_command, gateway_process

LIVE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
SLOW = b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"


def connect(port: int, timeout: float = 60) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout)


def ask(port: int, request: bytes = LIVE, enough: bytes = b"\r\n\r\n") -> bytes:
    """Return the beginning of the answer, or nothing if there is none."""
    answer = b""
    with suppress(ConnectionError), connect(port) as connection:
        connection.sendall(request)
        while enough not in answer and (piece := connection.recv(65536)):
            answer += piece
    return answer


HALF_A_HEAD = LIVE + b"GET /livez HTTP/1.1\r\nhos"
SLOW_QUESTION = SLOW.replace(b"GET /livez", b"POST /v1/completions")
LATE = {
    "no byte": (b"", b""),
    "headers": (HALF_A_HEAD, b""),
    "headers byte by byte": (HALF_A_HEAD, b"t"),
    "body after its response": (SLOW, b""),
    "body after its response, byte by byte": (SLOW, b"x"),
    "body byte by byte": (SLOW_QUESTION, b"x"),
    "idle": (LIVE, b""),
    "idle with empty lines": (LIVE, b"\r\n"),
}


def test_clients_that_take_too_long_are_disconnected() -> None:
    # The defaults are 10, 45 and 75 s.
    fields = "header_seconds=1, body_seconds=1, idle_seconds=1"

    def last(port: int, sent: bytes, dribble: bytes) -> float:
        """Return how long a connection lasts."""
        with connect(port, 0.2) as client:
            client.sendall(sent)
            started, answer = time.monotonic(), b""
            with suppress(ConnectionError):
                while time.monotonic() < started + 20:
                    with suppress(TimeoutError):
                        if not (piece := client.recv(65536)):
                            break
                        answer += piece
                    client.sendall(dribble)
            assert answer.startswith(b"HTTP/1.1 200" if b"livez" in sent else b"")
            return time.monotonic() - started

    with gateway_process(fields) as (_, port), ThreadPoolExecutor(len(LATE)) as pool:
        lasting = {name: pool.submit(last, port, *case) for name, case in LATE.items()}
        seconds = {name: duration.result() for name, duration in lasting.items()}
    assert all(0.8 < duration < 9 for duration in seconds.values()), seconds


def test_slow_clients_do_not_close_the_gateway_to_others() -> None:
    with gateway_command() as port, ExitStack() as stack:
        slow: list[socket.socket] = []
        for _ in range(800):  # The limit is 768.
            slow.append(stack.enter_context(connect(port)))
            slow[-1].sendall(SLOW)
        kept = stack.enter_context(connect(port))
        for connection in cycle(slow):
            with suppress(ConnectionError):
                connection.sendall(b"x")
            if connection is slow[-1]:
                break
        for _ in range(20):
            kept.sendall(LIVE)
            assert kept.recv(65536).startswith(b"HTTP/1.1 200")
            started = time.monotonic()
            assert ask(port).startswith(b"HTTP/1.1 200")
            assert time.monotonic() - started < 5
            slow.append(stack.enter_context(connect(port)))
            slow[-1].sendall(SLOW)


def test_requests_that_are_answered_do_not_make_room() -> None:
    """The limit is two; one waits for its answer in the queue of a Triton that says nothing."""
    silent = socket.create_server(("127.0.0.1", 0))
    url = f"127.0.0.1:{silent.getsockname()[1]}"
    body = b'{"model": "m", "prompt": "Hi"}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
        b"content-length: %d\r\n\r\n%s"
    )
    with silent, gateway_process("spare_connections=0", url=url) as (_, port), ExitStack() as stack:
        senders = [stack.enter_context(connect(port)) for _ in range(2)]
        for connection in senders:
            connection.sendall(request % (len(body), body))
        for connection in senders:
            begun = b""
            while not begun.endswith(b"\r\n\r\n") and (piece := connection.recv(1)):
                begun += piece
            assert begun == b"HTTP/1.1 100 Continue\r\n\r\n", "it is being answered"
        assert ask(port) == b"", "there is no room"
        senders[0].settimeout(1)
        with pytest.raises(TimeoutError):
            senders[0].recv(1)
        senders.pop().close()
        deadline = time.monotonic() + 30
        while not ask(port):
            assert time.monotonic() < deadline, "a closed connection does not count"


def test_a_client_with_a_key_stays_while_others_make_room(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "me")
    allowed = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"
    limits = ("--max-requests", "1", "--max-queue", "1")
    with gateway_command("--keys", str(tmp_path / "keys"), *limits) as port, ExitStack() as stack:
        mine = stack.enter_context(connect(port))
        mine.sendall(allowed % key.encode())
        assert mine.recv(65536).startswith(b"HTTP/1.1 200")
        mine.settimeout(0.3)
        with suppress(TimeoutError):
            while mine.recv(65536):
                pass
        mine.settimeout(60)
        for _ in range(300):  # The limit is 258.
            stack.enter_context(connect(port)).sendall(SLOW)
        assert ask(port), "all of them have been accepted"
        mine.sendall(LIVE)
        assert mine.recv(65536).startswith(b"HTTP/1.1 200")


def test_clients_that_agree_on_encryption_at_the_same_time_are_all_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_MAX_AGREEING", 4)
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))

    async def go(listener: socket.socket, clients: list[socket.socket]) -> None:
        connections = Connections(20, Clocks(60, 60, 60, 60), lambda **_: asyncio.Protocol())
        listener.setblocking(False)
        accept = connections.accept(listener, tls, lambda: connections.new(app_state={}))
        accepting = asyncio.ensure_future(accept)
        while not connections._agreeing:
            await asyncio.sleep(0.01)
        for client in clients:
            client.setblocking(False)
            await asyncio.open_connection(sock=client, ssl=trusting, server_hostname="localhost")
        accepting.cancel()

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        clients = [stack.enter_context(connect(port)) for _ in range(12)]
        asyncio.run(go(listener, clients))


UPGRADE = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: h2c"
    b"\r\ncontent-length: 2\r\n\r\n[]"
)


def test_the_offer_of_another_protocol_is_ignored_wherever_it_is_split() -> None:
    """Java's client offers HTTP/2 with every request."""
    with gateway_command() as port:
        for at in range(0, len(UPGRADE), 3):
            answer = b""
            with connect(port) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # An empty line in front of a request is allowed.
                for piece in (b"\r\n" + UPGRADE[:at], UPGRADE[at:]):
                    connection.sendall(piece)
                    time.sleep(0.002)
                while b"}}" not in answer and (piece := connection.recv(65536)):
                    answer += piece
            assert b"not a JSON object" in answer, UPGRADE[:at]


def test_a_request_for_a_tunnel_is_refused() -> None:
    with gateway_command() as port:
        answer = ask(port, b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_the_offer_of_another_protocol_behind_another_request_is_answered() -> None:
    with gateway_command() as port:
        for first in (LIVE, UPGRADE):
            with connect(port) as connection:
                connection.sendall(first + UPGRADE)
                answer, statuses = b"", list[bytes]()
                while len(statuses) < 2 and (piece := connection.recv(65536)):
                    answer += piece
                    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
            assert statuses == [b"200" if first is LIVE else b"400", b"400"]


def test_pipelined_requests_are_answered_in_their_order_wherever_they_are_split() -> None:
    requests = LIVE + UPGRADE.replace(b"connection: Upgrade\r\nupgrade: h2c\r\n", b"") + LIVE
    with gateway_command() as port:
        for at in range(0, len(requests), 7):
            with connect(port) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in (requests[:at], requests[at:]):
                    connection.sendall(piece)
                    time.sleep(0.002)
                answer, statuses = b"", list[bytes]()
                while len(statuses) < 3 and (piece := connection.recv(65536)):
                    answer += piece
                    statuses = re.findall(rb"HTTP/1.1 (\d+)", answer)
            assert statuses == [b"200", b"400", b"200"], at


def test_a_pipelined_body_is_no_header() -> None:
    first = LIVE + SLOW
    with gateway_command() as port:
        for at in range(len(LIVE) - 2, len(first), 9):
            with connect(port) as connection:
                connection.sendall(first[:at])
                time.sleep(0.002)
                connection.sendall(first[at:] + b"x" * 100_000)
                answer = b""
                while answer.count(b"HTTP/1.1") < 2 and (piece := connection.recv(65536)):
                    answer += piece
            assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"200"], at


def test_a_body_is_no_header_though_the_end_of_a_pipelined_head_is_split() -> None:
    """Over a socket, so much rarely arrives at once."""

    class Transport(asyncio.Transport):
        closed = False

        def write(self, data: Any) -> None:
            assert b"431" not in data

        def close(self) -> None:
            self.closed = True

    for left in range(1, 4):
        connections = Connections(1, Clocks(1, 1, 1, 1), lambda **_: asyncio.Protocol())
        connection, transport = connections.new(app_state={}), Transport()
        connection.connection_made(transport)
        connection.data_received((LIVE + SLOW)[:-left])
        connection.data_received(SLOW[-left:] + b"x" * 100_000)
        assert not transport.closed
        connection.data_received((LIVE * 2)[:-left])
        connection.data_received(b"x: " + b"x" * 40_000)
        assert not transport.closed
        with pytest.raises(AssertionError):
            connection.data_received(b"x" * 40_000)


def test_headers_that_are_too_long_are_refused() -> None:
    with gateway_command() as port:
        for line in (b"x: " + b"x" * (2 << 20), b"x: y\r\n" * 20_000):
            request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + line + b"\r\n\r\n"
            assert not ask(port, request).startswith(b"HTTP/1.1 200")
        assert ask(port, LIVE[:-2] + b"x: %s\r\n\r\n" % (b"x" * 30_000)).startswith(b"HTTP/1.1 200")


def test_what_comes_behind_a_body_is_bounded() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"2\r\n{}\r\n"
    endless = {
        "many headers": (b"0\r\n", b"a: b\r\n" * 1000),
        "a long header": (b"0\r\na: ", b"b" * 1000),
        "an extension of a chunk": (b"1;", b"a=b;" * 1000),
    }
    with gateway_command() as port:
        for name, (begin, more) in endless.items():
            sent = 0
            with connect(port) as client, suppress(ConnectionError):
                client.sendall(head + body + begin)
                while sent < 30_000_000:
                    sent += client.send(more)
            # Those of the system's own buffers too.
            assert sent < 20_000_000, name
        few = head + body + b"0\r\n" + b"a: b\r\n" * 1000 + b"\r\n"
        assert ask(port, few).startswith(b"HTTP/1.1 400")
        pieces = b"1\r\n \r\n" * 30_000
        assert ask(port, head + pieces + body + b"0\r\n\r\n" + LIVE).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("name", [b"authorization: Bearer ", b"x-api-key: "])
def test_what_comes_behind_a_body_is_no_header(tmp_path: Path, name: bytes) -> None:
    key = name + new_key(tmp_path / "keys", "me").encode() + b"\r\n"
    line = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    body = b"\r\n2\r\n{}\r\n0\r\n"
    with gateway_command("--keys", str(tmp_path / "keys")) as port:
        for sent, status in ((line + body + key, 401), (line + key + body, 400)):
            assert ask(port, sent + b"\r\n").startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.long
def test_a_client_that_reads_no_responses_is_disconnected() -> None:
    with gateway_process("unread_seconds=1") as (_, port), socket.socket() as idle:
        idle.settimeout(60)
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", port))
        # Responses of over 8 MB, which is more than the kernel buffers.
        idle.sendall(b"GET /chat.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000)
        time.sleep(4)
        size = 0
        with suppress(ConnectionError):
            while piece := idle.recv(1 << 20):
                size += len(piece)
        assert size < 7_000_000


def test_a_file_has_more_time_to_arrive_than_other_bodies() -> None:
    connections = Connections(1, Clocks(1, 2, 3, 4), lambda **_: asyncio.Protocol())
    connection = connections.new(app_state={})
    connection.connection_made(Mock())
    scope = {"state": {"llmserve.connection": connection}}

    def allowed() -> float:
        wait = connection.wait()
        assert wait is not None
        return wait.allowed

    note_upload(scope, 60)
    assert allowed() == 1
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
    for body, seconds in ((b"x", 60), (b"x", 2)):
        connection.data_received(head + body)
        assert allowed() == 2
        if seconds == 60:
            note_upload(scope, 60)
        assert allowed() == seconds
        connection.data_received(b"x")
        with connection.answering():
            pass
        assert allowed() == 3
