"""Requests to a server that is scripted byte by byte, from a thread and from an event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Protocol

import pytest

from llmserve.client.deadlines import Timeout, Timeouts
from llmserve.client.http_answer import BrokenAnswerError
from llmserve.client.openai import OpenAIApi

Script = Callable[[socket.socket, bytes], None]
"""What a server does on a connection, with the request that has come on it."""
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nX-Request-Id: 7\r\n\r\nhello"
BODY = b'{"a": 1}'
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.left = threading.Event()
        """Set when a client has closed a connection."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.api = OpenAIApi(f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1")
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while request := connection.recv(1 << 16):
                    self.requests.append(request)
                    self.script(connection, request)
        except OSError:
            pass
        self.left.set()


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    with closing(Server(script)) as server:
        yield server


def say(*parts: bytes) -> Script:
    def script(connection: socket.socket, _: bytes) -> None:
        for part in parts:
            connection.sendall(part)

    return script


Answered = tuple[int, str, bytes]
"""The status, the id and the content."""


class Ask(Protocol):
    def __call__(
        self, api: OpenAIApi, timeout: Timeout, lines: bool, body: bytes = BODY
    ) -> Answered: ...


def in_thread(api: OpenAIApi, timeout: Timeout, lines: bool, body: bytes = BODY) -> Answered:
    with closing(api.open(api.post("/completions", body), timeout)) as answer:
        content = b"|".join(answer.lines()) if lines else answer.read()
        return answer.status, answer.headers.get("x-request-id", ""), content


def in_loop(api: OpenAIApi, timeout: Timeout, lines: bool, body: bytes = BODY) -> Answered:
    async def go() -> Answered:
        async with api.session() as session:
            request = api.post("/completions", body)
            with closing(await session.open(request, timeout)) as answer:
                content = (
                    b"|".join([line async for line in answer.lines()])
                    if lines
                    else await answer.read()
                )
                return answer.status, answer.headers.get("x-request-id", ""), content

    return asyncio.run(go())


both = pytest.mark.parametrize("ask", [in_thread, in_loop])


@both
def test_a_request_is_sent_as_it_is_and_its_answer_read(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(say(HELLO)) as server:
        assert ask(server.api, None, False) == (200, "7", b"hello")
        (request,) = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nauthorization: Bearer secret\r\n" in head
    assert (body, head.endswith(b"content-length: %d" % len(body))) == (BODY, True)


@both
def test_lines_of_a_stream_come_when_they_are_whole(ask: Ask) -> None:
    with serving(say(STREAM, b"4\r\nda\nt\r\n", b"3\r\na\n\n\r\n", b"0\r\n\r\n")) as server:
        assert ask(server.api, None, True) == (200, "", b"da|ta|")


@both
@pytest.mark.parametrize(
    "timeout", [0.2, Timeouts(first=0.2), Timeouts(first=20, between=0.2), Timeouts(whole=0.2)]
)
def test_an_answer_that_does_not_come_is_late(ask: Ask, timeout: Timeout) -> None:
    is_begun = isinstance(timeout, Timeouts) and timeout.between is not None
    began = time.monotonic()
    with serving(say(STREAM if is_begun else b"")) as server:
        with pytest.raises(TimeoutError):
            ask(server.api, timeout, True)
        assert server.left.wait(5)
    assert 0.2 <= time.monotonic() - began < 5


@both
@pytest.mark.parametrize(
    "content", [b"", HELLO[:-1], b"HTTP/1.1 200 OK\r\n", b"hello\r\n\r\n", STREAM + b"5\r\nab"]
)
def test_an_answer_that_breaks_off_is_broken(ask: Ask, content: bytes) -> None:
    def script(connection: socket.socket, _: bytes) -> None:
        connection.sendall(content)
        connection.close()

    with serving(script) as server, pytest.raises(BrokenAnswerError):
        ask(server.api, None, False)


@both
def test_no_server_is_told_from_one_that_breaks(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        ask(OpenAIApi(f"http://127.0.0.1:{port}/v1"), None, False)


@both
def test_a_refusal_is_read_though_the_request_is_not(ask: Ask) -> None:
    """A server that refuses a large request at its head does not read the rest."""

    def script(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        time.sleep(0.2)
        connection.close()

    with serving(script) as server:
        assert ask(server.api, None, False, b"x" * (8 << 20)) == (413, "", b"big")


def test_leaving_a_stream_cancels_it() -> None:
    with serving(say(STREAM, b"3\r\na\n\n\r\n")) as server:
        with closing(server.api.open(server.api.post("/completions", {}))) as answer:
            assert next(answer.lines()) == b"a"
        assert server.left.wait(5)


def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    async def go(server: Server) -> None:
        async with server.api.session() as session:
            task = asyncio.ensure_future(session.open(server.api.post("/completions", {})))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with serving(say()) as server:
        asyncio.run(go(server))
        assert server.left.wait(5)


def test_a_task_that_is_cancelled_at_any_moment_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Also while its connection is being made: before Python 3.12, ``wait_for`` would go on."""

    async def go(server: Server) -> None:
        async with server.api.session() as session:
            for steps in range(300):
                task = asyncio.ensure_future(session.open(server.api.post("/completions", {}), 5))
                for _ in range(steps % 60):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task], timeout=1)
                assert task.cancelled()

    with serving(say()) as server:
        asyncio.run(go(server))
    assert not caplog.messages


def test_a_name_is_looked_up_again_when_its_machine_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was turned off does not even refuse connections."""

    def found(host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        assert host == "model.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.pop(0), port))]

    async def go(port: int) -> bytes:
        api = OpenAIApi(f"http://model.example:{port}/v1")
        async with api.session() as session:
            with pytest.raises(ConnectionError):
                await session.open(api.get("/models"), 0.2)
            with closing(await session.open(api.get("/models"), 5)) as answer:
                return await answer.read()

    addresses = ["127.0.0.2", "127.0.0.1"]
    with serving(say(HELLO)) as server, ExitStack() as stack:
        port = int(server.api.url.rpartition(":")[2].partition("/")[0])
        gone = stack.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        # Its queue is full: nothing more is answered.
        stack.enter_context(socket.create_connection(gone.getsockname()))
        monkeypatch.setattr(socket, "getaddrinfo", found)
        assert asyncio.run(go(port)) == b"hello"
    assert not addresses


def test_connections_are_used_again_and_made_anew_if_they_were_closed() -> None:
    served: set[socket.socket] = set()

    def script(connection: socket.socket, _: bytes) -> None:
        if closes and connection in served:
            connection.close()
            return
        served.add(connection)
        connection.sendall(HELLO)

    async def go(server: Server) -> None:
        async with server.api.session() as session:
            for _ in range(5):
                with closing(await session.open(server.api.post("/completions", {}), 5)) as answer:
                    assert await answer.read() == b"hello"

    for closes in (False, True):
        with serving(script) as server:
            asyncio.run(go(server))
            assert server.connections == (5 if closes else 1)


def test_a_server_that_has_worked_on_a_request_does_not_get_it_twice() -> None:
    def script(connection: socket.socket, _: bytes) -> None:
        if len(server.requests) == 1:
            connection.sendall(HELLO)
        else:
            time.sleep(0.2)
            connection.close()

    async def go() -> None:
        async with server.api.session() as session:
            for _ in range(2):
                with closing(await session.open(server.api.post("/completions", {}), 5)) as answer:
                    await answer.read()

    with serving(script) as server:
        with pytest.raises(BrokenAnswerError):
            asyncio.run(go())
        assert len(server.requests) == 2


def test_a_stream_that_nobody_reads_waits_at_the_server() -> None:
    """What has arrived and is not read is bounded, also if the server never stops."""
    sent = 0

    def script(connection: socket.socket, _: bytes) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        connection.settimeout(0.5)
        for _piece in range(1000):
            connection.sendall(b"x" * (1 << 16))
            sent += 1 << 16

    async def go() -> None:
        async with server.api.session() as session:
            with closing(await session.open(server.api.post("/completions", {}), 20)):
                while not server.left.is_set():
                    await asyncio.sleep(0.05)

    with serving(script) as server:
        asyncio.run(go())
    assert sent < 40 << 20
