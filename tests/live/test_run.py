"""`llmserve run`: built once, served while one talks to it, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmserve.builder.store import Store
from llmserve.server import find_servers
from llmserve.testing.command import LLMSERVE, run
from tests.live.servers import eventually
from tests.loopback_hub import COMMIT, MODEL, Hub, demo_files
from tests.terminal import CTRL_C, Terminal

pytestmark = pytest.mark.long

JAPAN = "What is the capital of Japan?"
TOKYO = "The capital of Japan is Tokyo.\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of these tests; other tests' servers are none of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def serving(home: Path) -> list[int]:
    """Return the processes of the servers that serve a model of this store."""
    return [
        server.report.pid
        for server in find_servers()
        if server.repository.is_relative_to(home.resolve())
    ]


def is_gone(process: int) -> Callable[[], bool]:
    return lambda: not Path(f"/proc/{process}").exists()


def test_a_conversation_and_others_that_ask_meanwhile(home: Path) -> None:
    with Terminal("run", "demo", "--plugin", "hf", "--set", "decoupled=true") as terminal:
        terminal.wait_for("llmserve: demo is built")
        terminal.wait_for(r"openai http://127\.0\.0\.1:\d+/v1, grpc 127\.0\.0\.1:\d+\n", 240)
        terminal.say(JAPAN)
        terminal.wait_for(r"is Tokyo\.\n\[\d+ tokens, \S+ tokens/s, first after \S+ s\]")
        (process,) = serving(home)
        # It is neither built nor served again.
        words = ("run", "demo", "--plugin", "hf", "--set", "decoupled=true")
        again = run(*words, JAPAN)
        assert (again.stdout, again.stderr, again.returncode) == (TOKYO, "", 0)
        assert run(*words, stdin=f"{JAPAN}\n").stdout == TOKYO
        assert run(*words, JAPAN, "--max-tokens", "2").stdout == "The capital\n"
        # Another option builds it again, and the server takes that up.
        changed = run(*words, "--set", "max_tokens=3", JAPAN)
        assert changed.stdout == "The capital of\n"
        built, reloaded = changed.stderr.splitlines()
        assert built == "llmserve: demo is built"
        # Whoever else asks this server gets the new one as well.
        assert reloaded.startswith("llmserve: demo has changed, and is reloaded for all who use ")
        assert serving(home) == [process]
        assert run("list").stdout.split()[-1] == "demo"
        # Ctrl-C is for the answer: the server goes on.
        terminal.say("Tell me a story")
        terminal.wait_for("Once upon")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\d+ tokens")
        terminal.process.kill()
        eventually(is_gone(process))


def test_a_model_of_the_hub_is_fetched_once_and_again_when_it_has_changed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(demo_files())
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    words = ("run", "acme/tiny", JAPAN, "--plugin", "hf", "--set", "chat=true")
    with hub.serving() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        first = run(*words)
        assert (first.stdout, first.returncode) == (TOKYO, 0), first.stderr
        assert "llmserve: tiny is built" in first.stderr
        hub.asked.clear()
        # A model that cannot be served ends it before any Triton starts.
        unchanged = run(*words, "--runtime", "binary")
        assert (unchanged.returncode, "is built" in unchanged.stderr) == (1, False)
        asked = [each for each in hub.asked if MODEL in each.path]
        assert len(asked) == 1, "one request says that nothing has changed"
        hub.commit = COMMIT[::-1]
        changed = run(*words, "--runtime", "binary")
        assert "llmserve: tiny is built" in changed.stderr
    gone = run(*words, "--runtime", "binary")
    assert (gone.returncode, gone.stderr) == (1, unchanged.stderr)
    # It is loaded from the cache, without waiting for a hub that cannot be reached.
    begun = time.monotonic()
    served = run(*words)
    assert (served.stdout, served.returncode) == (TOKYO, 0), served.stderr
    assert time.monotonic() - begun < 120


def test_a_model_that_cannot_be_served_ends_it_with_the_reason(home: Path) -> None:
    failed = run("run", "demo", "Hi", "--plugin", "hf", "--device", "cuda:7")
    assert (failed.returncode, failed.stdout) == (1, "")
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("llmserve: model 'demo' failed to load: "), failed.stderr
    assert run("list").stderr.startswith("demo: it could not be served (model 'demo' failed to")
    assert serving(home) == []


def test_an_interrupted_build_leaves_nothing(home: Path) -> None:
    process = subprocess.Popen(
        [*LLMSERVE, "run", "demo", "--plugin", "hf", "Hi"], stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: home.is_dir() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    assert process.stderr.read().endswith("llmserve: interrupted\n")
    assert serving(home) == []
    left = [path.name for path in (home / "models").glob("*")]
    # Either not begun, or done: nothing between.
    assert left in ([], ["demo"])
    assert len(Store().models()) == len(left)
