"""The memory of what listens at an address."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmserve_cli.adopting import process_memory
from llmserve_cli.adopting.process_memory import listener, memory_at, memory_of

_HOLDS = "held = bytearray(b'1') * (64 << 20); print(1, flush=True); input()"


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# HELP\nprocess_resident_memory_bytes 1.5e+09\nother 2\n")

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Metrics)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_what_listens_is_found_and_what_it_started_counts(url: str) -> None:
    port = int(url.rpartition(":")[2].partition("/")[0])
    assert listener(port) == os.getpid()
    alone = memory_at(url)
    assert alone is not None
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout
        assert child.stdout.readline()
        both = memory_at(url)
        assert both is not None
        assert both - alone > 50 << 20
    finally:
        child.kill()
        child.communicate()


def test_a_server_of_another_user_or_machine_says_it_itself(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "listener", lambda _: None)
    assert memory_at(url) == 1_500_000_000


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/v1", "127.0.0.1:1", "http://[::1", ""])
def test_what_cannot_be_known_is_none(address: str) -> None:
    assert memory_at(address) is None


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    done = subprocess.Popen([sys.executable, "-c", ""], cwd=tmp_path)
    done.wait()
    assert memory_of(done.pid) is None
