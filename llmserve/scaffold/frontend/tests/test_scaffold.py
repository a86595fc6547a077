"""Tests of the frontend without Triton: the client is a stand-in."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.plugin import Place, UsageError
from llmserve.scaffold.frontend import llmserve_register_frontends
from llmserve.scaffold.frontend.server import ScaffoldServer


class Backwards:
    """A client of a model that answers backwards."""

    def generate(self, model: str, prompt: str) -> Any:
        assert model == "demo"
        return type("Answer", (), {"text": prompt[::-1]})


@pytest.fixture
def url() -> Iterator[str]:
    client: Any = Backwards()
    with ScaffoldServer(("127.0.0.1", 0), client, "demo") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_body_is_the_prompt(url: str) -> None:
    with urllib.request.urlopen(url, data="é!".encode(), timeout=10) as answer:
        assert answer.read().decode() == "!é"


def test_a_body_that_is_too_long_is_refused(url: str) -> None:
    request = urllib.request.Request(url, data=b"", headers={"Content-Length": "9" * 12})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=10)


def test_keys_are_refused(tmp_path: Path) -> None:
    (frontend,) = llmserve_register_frontends()
    with pytest.raises(UsageError, match="knows no keys"):
        frontend.arguments(Place("127.0.0.1:8001", "127.0.0.1", 8090, 1.0, keys=tmp_path))
