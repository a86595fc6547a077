"""``llmserve release`` in front of what is no gateway, and with files that cannot be written."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmserve.errors import LLMServeError
from llmserve_gateway.release_commands import release

RELEASE: dict[str, Any] = {
    "model": "old", "new": "new", "kind": "canary", "stage": "watched", "why": "", "share": 0.05,
    "requests": {"old": 1, "new": 0}, "compared": 0, "verdict": "undecided", "measures": [],
    "pairs": [],
}  # fmt: skip


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    """Yield the address of a server that answers everything so."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}/v1"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def said(*words: str) -> str:
    """Return what a command prints, or the line of its error."""
    result = CliRunner().invoke(release, words)
    if isinstance(result.exception, LLMServeError):
        return str(result.exception)
    assert result.exception is None, result.exception
    return result.output


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (200, b"<html>", "is no gateway of llmserve: give another address with --openai"),
        (200, b'{"object": "list"}', "is no gateway of llmserve"),
        (200, b"[" * 100_000, "is no gateway of llmserve"),
        (404, b"<html>", "the server answered 404 (<html>)"),
        (403, b'{"error": {"message": "this key may not"}}', "this key may not"),
        (401, b'{"error": {"message": "no key"}}', "no key: set OPENAI_API_KEY"),
    ],
)
@pytest.mark.parametrize("words", [["status"], ["promote", "old"], ["abort", "old"]])
def test_what_is_no_gateway_is_said_in_a_line(
    words: list[str], status: int, body: bytes, line: str
) -> None:
    with server(status, body) as url:
        assert line in said(*words, "--openai", url)


def test_that_nothing_answers_is_said_in_a_line() -> None:
    line = said("status", "--openai", "http://127.0.0.1:9/v1")
    assert line.startswith("no server answers at http://127.0.0.1:9/v1: Connection refused")


def test_a_report_that_cannot_be_written_is_said_in_a_line(tmp_path: Path) -> None:
    with server(200, json.dumps({"releases": [RELEASE]}).encode()) as url:
        page = tmp_path / "absent" / "page.html"
        assert f"{page} cannot be written: No such file" in said(
            "report", "old", str(page), "--openai", url
        )
        assert "there is no release of 'x'" in said(
            "report", "x", str(tmp_path / "a.html"), "--openai", url
        )
        assert (
            said("report", "old", str(tmp_path / "a.html"), "--openai", url).count("written") == 1
        )
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.json"}
