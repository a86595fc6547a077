"""``query --openai`` before servers that are none, and with addresses and keys that are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from llmserve.errors import LLMServeError
from llmserve_cli.openai_client import KEY, OpenAIClient
from tests.support import http_server, reply

ANSWERS = {
    "whole": b'{"choices": [{"text": "hi"}]}',
    "word": b'data: {"error": "boom"}\n\n',
    "other": b'data: {"foo": 1}\n\n',
    "list": b"data: []\n\n",
    "text": b"data: nope\n\n",
    "right": b'data: {"choices": [{"text": "hi"}]}\n\n',
}


def answer(asked: BaseHTTPRequestHandler) -> None:
    asked.rfile.read(int(asked.headers["content-length"]))
    reply(asked, ANSWERS[asked.path.split("/")[1]])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http_server(answer) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "told"),
    [
        *((path, "does not stream as OpenAI's API does") for path in ("whole", "other", "list")),
        ("text", "does not stream as OpenAI's API does"),
        ("word", "boom"),
    ],
)
def test_what_is_no_stream_is_an_error_and_no_empty_answer(
    server: str, path: str, told: str
) -> None:
    with pytest.raises(LLMServeError, match=told):
        OpenAIClient(f"{server}/{path}").generate("demo", "a")


@pytest.mark.parametrize("path", ["right", "right/ü 1"])
def test_a_key_may_end_in_a_line_break_and_a_path_have_any_letter(
    server: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-1\n")
    assert OpenAIClient(f"{server}/{path}").generate("demo", "a").text == "hi"
    monkeypatch.setenv(KEY, "sk\n-1")
    with pytest.raises(LLMServeError, match=KEY):
        OpenAIClient(f"{server}/{path}").generate("demo", "a")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "http://[::1", "ftp://a"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LLMServeError, match="is no address"):
        OpenAIClient(url)
