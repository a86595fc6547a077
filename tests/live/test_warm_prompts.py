"""A system prompt that a model has read before anybody asks, with the real gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.live.servers import Serving, eventually

SYSTEM = "You answer questions from sailors, in a few words, and never about the weather. " * 4
FILE = """
[models.small]
source = "demo"
plugin = "iterative"
warm = ["prompts/system.txt", "prompts/long.txt"]
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("warm")
    (folder / "llmserve.toml").write_text(FILE, encoding="utf-8")
    (folder / "prompts").mkdir()
    (folder / "prompts/system.txt").write_text(SYSTEM + "\n", encoding="utf-8")
    (folder / "prompts/long.txt").write_text("word " * 20_000, encoding="utf-8")
    serving = Serving(cwd=folder)
    yield serving
    serving.close()


def ask(serving: Serving, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://{serving.frontend[0]}{path}", data)
    try:
        with urlopen(request, timeout=60) as response:
            return json.load(response)
    except HTTPError as error:
        return json.load(error)


def cached(serving: Serving, question: str, system: str = SYSTEM) -> int:
    """Return how much of a conversation that nobody has had was read before."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "small", "messages": messages, "max_tokens": 1}
    details = ask(serving, "/v1/chat/completions", body)["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


@pytest.mark.long
def test_the_first_conversation_finds_the_system_prompt_read_and_after_a_death_too(
    serving: Serving,
) -> None:
    eventually(lambda: ask(serving, "/readyz")["ready"])
    tokens = len(ask(serving, "/tokenize", {"model": "small", "prompt": SYSTEM})["tokens"])
    assert tokens >= 64
    first = cached(serving, "Where is the harbour?")
    assert tokens - 32 < first <= tokens + 32
    assert not cached(serving, "Where is the harbour?", "Something else. " + SYSTEM)
    # What cannot be read is told, and keeps nobody from asking.
    assert "small: a prompt was not read ahead: long.txt: " in serving.output
    died = serving.kill_stub("small")
    serving.wait_for("small: has read", after=died)
    eventually(lambda: ask(serving, "/readyz")["ready"])
    assert cached(serving, "How deep is the sea?") == first
