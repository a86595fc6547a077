"""A real Triton with small models that speak the contract, each in its own way."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmserve import errors
from llmserve.client import Client, connect
from llmserve.server import Server, ServerSettings, start

MODELS = Path(__file__).with_name("models")
SOURCES = {"echo": "echo", "plain": "echo", "foreign": "echo", "words": "words", "steps": "steps"}
LONG = "word " * 200


@dataclass(frozen=True)
class Failure:
    """A request that cannot come through, and what the error must be."""

    model: str
    call: dict[str, Any]
    kind: type[errors.LLMServeError]
    words: str


FAILURES = [
    Failure("wrods", {}, errors.ModelNotReadyError, "choose one of words, echo"),
    Failure("echo", {"prompt": "raise no /srv/w.bin"}, errors.RequestRejectedError, "no w.bin"),
    Failure("echo", {"prompt": "bytes"}, errors.ClientError, "not UTF-8"),
    Failure("echo", {"max_tokens": {}}, errors.OptionError, "max_tokens cannot be a dict"),
    Failure("foreign", {"max_tokens": 2**40}, errors.OptionError, "does not fit into INT32"),
    Failure("steps", {"prompt": "refuse"}, errors.RequestRejectedError, "no such word"),
    Failure(
        "steps",
        {"prompt": LONG, "delay": 0.1, "timeout": 0.3},
        errors.RequestTimeoutError,
        "no complete answer from 'steps' within 0.3 s",
    ),
]


@dataclass(frozen=True)
class Journal:
    """What the models noted: requests they saw cancelled, sequences started and ended."""

    repository: Path

    def read(self, model: str) -> list[str]:
        path = self.repository / model / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def shows_cancelled(self, *prompts: str) -> bool:
        return wait_for(lambda: set(prompts) <= set(self.read("words")))

    def shows_all_ended(self, started: int) -> bool:
        """Wait until every sequence has ended, of which there were at least so many."""

        def is_over() -> bool:
            events = Counter(line.split()[0] for line in self.read("steps"))
            return events["start"] == events["end"] >= started

        return wait_for(is_over)


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def serve_models(repository: Path) -> Server:
    for name, source in SOURCES.items():
        (repository / name / "1").mkdir(parents=True)
        shutil.copy(MODELS / f"{name}.pbtxt", repository / name / "config.pbtxt")
        shutil.copy(MODELS / f"{source}.py", repository / name / "1" / "model.py")
    return start(ServerSettings(repository, http_port=0, grpc_port=0, metrics_port=0))


@pytest.fixture
def another_server(tmp_path: Path) -> Iterator[Server]:
    """A server that a test may break."""
    with serve_models(tmp_path / "repository") as server:
        yield server


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    return Journal(tmp_path_factory.mktemp("client") / "repository")


@pytest.fixture(scope="module")
def url(journal: Journal) -> Iterator[str]:
    with serve_models(journal.repository) as server:
        yield server.grpc_url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with connect(url, timeout=30) as client:
        yield client


@pytest.fixture(params=FAILURES, ids=lambda failure: failure.kind.__name__)
def failure(request: pytest.FixtureRequest) -> Failure:
    return request.param  # type: ignore[no-any-return]
