"""``query --openai`` with servers that do not speak the API, and with wrong URLs and keys."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from llmserve.client.http_answer import BrokenAnswerError
from llmserve.client.openai import KEY, OpenAIApi, OpenAIClient
from llmserve.errors import LLMServeError, UnreachableError
from llmserve.testing.web import http_server, reply
from tests.unit.test_boundaries import CORE, PLUGINS, ROOT, sources

ANSWERS = {
    "whole": b'{"choices": [{"text": "hi"}]}',
    "word": b'data: {"error": "boom"}\n\n',
    "other": b'data: {"foo": 1}\n\n',
    "list": b"data: []\n\n",
    "text": b"data: nope\n\n",
    "deep": b'data: {"choices": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n\n",
    "number": b'data: {"choices": [{"text": 5}]}\n\n',
    "texts": b'data: {"choices": [{"delta": {"content": ["hi"]}}]}\n\n',
    "right": b'data: {"choices": [{"text": "hi"}]}\n\n',
    "null": b'data: {"choices": null}\n\ndata: {"choices": [{"text": "hi"}]}\n\n',
}
NO_STREAM = "does not stream as OpenAI's API does"


def answer(request: BaseHTTPRequestHandler) -> None:
    request.rfile.read(int(request.headers["content-length"]))
    reply(request, ANSWERS[request.path.split("/")[1]])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http_server(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "message"),
    [
        *(
            (path, NO_STREAM)
            for path in ("whole", "other", "list", "text", "deep", "number", "texts")
        ),
        ("word", "boom"),
    ],
)
def test_a_wrong_stream_is_an_error_and_no_empty_answer(
    server: str, path: str, message: str
) -> None:
    with pytest.raises(LLMServeError, match=message):
        OpenAIClient(f"{server}/{path}").generate("demo", "a")


def test_a_refusal_that_is_nested_too_deep_to_read_is_told_by_its_first_words() -> None:
    assert "(" + "[" * 200 + ")" in OpenAIApi.refusal(500, b"[" * 50_000).problem


@pytest.mark.parametrize("path", ["right", "right/ü 1", "null"])
def test_a_key_may_end_in_a_line_break_and_a_path_may_have_any_character(
    server: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-1\n")
    assert OpenAIClient(f"{server}/{path}").generate("demo", "a").text == "hi"
    monkeypatch.setenv(KEY, "sk\n-1")
    with pytest.raises(LLMServeError, match=KEY):
        OpenAIClient(f"{server}/{path}").generate("demo", "a")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "http://[::1", "ftp://a"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(LLMServeError, match="is not an address"):
        OpenAIClient(url)


def test_a_connection_attempt_that_the_system_gives_up_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(*_: object) -> socket.socket:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(UnreachableError, match="Connection timed out"):
        OpenAIClient("http://127.0.0.1:9").generate("demo", "a")


def test_no_other_client_speaks_the_api() -> None:
    """What serves the API reads these words too; nothing else may write them once more."""
    folders = [CORE, ROOT / "cli", *(folder for folder in PLUGINS if "gateway" not in folder.name)]
    paths = [path for folder in folders for path in sources(folder)]
    speaking = [path for path in paths if '"stream_options"' in path.read_text(encoding="utf-8")]
    assert speaking == [CORE / "client" / "openai.py"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 9)"), "refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), "verify failed"),
        (BrokenAnswerError("bad \x1b[31m"), r"bad \x1b[31m"),
        (BrokenAnswerError(), "BrokenAnswerError"),
    ],
)
def test_an_address_without_a_server_is_told_without_numbers(error: Exception, words: str) -> None:
    text = str(OpenAIApi("http://x:1/v1").unreachable(error))
    assert f"{words}: start one" in text
    assert "Errno" not in text
