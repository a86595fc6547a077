"""What is shown of requests to a server with OpenAI's API."""

from __future__ import annotations

import shlex
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from llmserve_certify.examine import Ask, Gone, Refusal
from llmserve_certify.openai import OpenAIEndpoint

from .toy_server import ToyServer


def lines(endpoint: OpenAIEndpoint) -> list[str]:
    return [
        endpoint.curl(Ask("it's")),
        endpoint.values_curl(["it's"]),
        endpoint.hostile_curl(endpoint.hostile()[0]),
    ]


def test_a_shell_puts_the_users_key_into_every_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = OpenAIEndpoint("http://h:1/v1", "m")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert not [line for line in lines(endpoint) if "authorization" in line]
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    for line in lines(endpoint):
        assert ' -H "authorization: Bearer $OPENAI_API_KEY" ' in line
        assert "sk-1" not in line
        assert shlex.split(line)[-2] == "-d"


@pytest.mark.parametrize("url", ["http://me:se@cret@h:1/v1", "me:secret@h:1", "HTTP://me@h:1/v1"])
def test_a_password_in_the_address_is_shown_nowhere(url: str) -> None:
    endpoint = OpenAIEndpoint(url, "m")
    assert endpoint.url == "http://h:1/v1"
    for line in lines(endpoint):
        assert "http://h:1/v1/" in line
        assert "@" not in line


def test_what_another_kind_of_server_sends_is_shown_as_text() -> None:
    """A server of gRPC answers with bytes that would control a terminal."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"\x00\x1b[31m\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = OpenAIEndpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "m")
        with pytest.raises(Gone) as found:
            endpoint.ask(Ask("Hello"))
        thread.join()
    assert found.value.problem.isprintable()


def test_a_server_that_refuses_to_count_in_streams_is_asked_without() -> None:
    server = ToyServer()
    server.strict = True
    ask = Ask("Hello", options={"max_tokens": 8, "temperature": 0}, stream=True)
    with server.serving() as url:
        endpoint = OpenAIEndpoint(url, "toy")
        assert "stream_options" in endpoint.curl(ask)
        with ThreadPoolExecutor(8) as pool:
            assert len({answer.text for answer in pool.map(endpoint.ask, [ask] * 8)}) == 1
        assert endpoint.ask(ask).text == "".join(endpoint.pieces(ask))
        assert "stream_options" not in endpoint.curl(ask)
        wrong = ask.with_options(temperature=-1)
        with pytest.raises(Refusal) as refused:
            endpoint.ask(wrong)
    assert refused.value.status == 400


def test_a_busy_server_says_nothing_of_counts_in_streams() -> None:
    class Busy(OpenAIEndpoint):
        asked = 0

        def _open(self, url: str, body: object) -> NoReturn:
            self.asked += 1
            raise Refusal(503, "later")

    endpoint, ask = Busy("http://h:1/v1", "m"), Ask("Hello", stream=True)
    with pytest.raises(Refusal, match="later"):
        endpoint.ask(ask)
    assert endpoint.asked == 1
    assert "stream_options" in endpoint.curl(ask)


def test_an_address_without_a_server_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(Gone, match=r"^no answer from .*: Connection refused"):
        OpenAIEndpoint(f"http://127.0.0.1:{port}/v1", "m").ask(Ask("Hello"))
