"""What was read once is not read again, before anybody asks and after a load, with real Tritons."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from llmserve.client import connect
from llmserve.errors import LLMServeError
from llmserve.runtime.contract import CACHED_TOKENS
from llmserve.testing.command import run
from tests.live.servers import TIMEOUT, Serving, eventually

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


KEPT = """
[models.small]
source = "demo"
plugin = "iterative"
"""


@pytest.mark.long
def test_pages_are_found_by_another_replica_and_after_an_unload_a_reload_and_a_death(
    tmp_path: Path,
) -> None:
    (tmp_path / "llmserve.toml").write_text(KEPT, encoding="utf-8")
    home = tmp_path / "home"
    env = {**os.environ, "LLMSERVE_HOME": str(home)}
    serving = Serving("--replicas", "2", "--warm", "0.1", cwd=tmp_path, env=env)
    try:
        second = re.findall(r"replica +grpc (\S+:\d+)", serving.output)[0]

        def ask(url: str) -> tuple[str, int]:
            with connect(url, timeout=TIMEOUT) as client:
                answer = client.generate("small", SYSTEM, max_tokens=8, temperature=0.0)
            # The last token of a prompt is always computed.
            assert (answer.input_tokens or 0) > 64
            pages = (answer.input_tokens or 0) - 1 >> 5
            eventually(lambda: len(list((home / "pages").glob("?" * 64))) >= pages)
            return answer.text, int(answer.extra[CACHED_TOKENS.name]) - 32 * pages

        def ask_when_it_is_back() -> tuple[str, int] | None:
            with suppress(LLMServeError):
                return ask(serving.url)
            return None

        text, missing = ask(serving.url)
        assert missing < 0, "nothing was there"
        assert ask(second) == (text, 0)
        for command in ("unload", "reload"):
            done = run(command, "small", "--url", serving.url, env=env)
            assert done.returncode == 0, done.stderr
        assert ask(second) == ask(serving.url) == (text, 0)
        done = run("reload", "small", "--url", serving.url, env=env)
        assert done.returncode == 0, done.stderr
        assert ask(serving.url) == (text, 0)
        for process in serving.processes("models/small/1/model.py "):
            os.kill(process, signal.SIGKILL)
        assert eventually(ask_when_it_is_back) == (text, 0)
    finally:
        serving.close()
