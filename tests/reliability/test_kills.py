"""Who notices a model's death: with a real Triton, and a supervisor without its command line.

``python -m tests.reliability.kills`` kills and stops everything.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmserve.server import Server, start
from llmserve.server.keep.reconciler import Reconciler
from llmserve.server.run.guard import ZOMBIE, state_of
from llmserve.server.run.stubs import Stubs
from tests.live.servers import TIMEOUT, WORDS, eventually, figure, repository, settings

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = repository(tmp_path_factory.mktemp("served"), words=WORDS)
    with start(settings(folder, renewable=True, partial=True)) as running:
        yield running


async def supervise(server: Server, folder: Path, lines: list[str]) -> None:
    """Supervise the server until its model has been restarted."""
    reconciler = Reconciler([settings(folder, renewable=True)], [server], lines.append)
    deadline = time.monotonic() + TIMEOUT
    while "words: ready" not in lines:
        assert time.monotonic() < deadline, lines
        reconciler.step()
        await reconciler.wait()
    await reconciler.settle()


@pytest.mark.parametrize(
    ("seen", "why"),
    [(True, "its process has died: killed by SIGKILL"), (False, "its process has died")],
    ids=["seen", "unseen"],
)
def test_a_model_that_died_before_it_was_supervised(
    server: Server, tmp_path: Path, seen: bool, why: str
) -> None:
    """A process that was seen alive during the start is known to have died at once.

    Of any other, the first canary hears it: that is certain, and no second one is awaited.
    """
    server.stubs.poll()
    (process,) = server.stubs.of("words")
    os.kill(process, signal.SIGKILL)
    eventually(lambda: state_of(process)[:1] == [ZOMBIE])
    if not seen:
        server.stubs = Stubs(server.pid)
    lines: list[str] = []
    began = time.monotonic()
    asyncio.run(supervise(server, repository(tmp_path, words=WORDS), lines))
    figure("it serves again after", time.monotonic() - began)
    assert lines == [
        f"words: restarting ({why})", f"words: loading ({why})", "words: ready"
    ]  # fmt: skip
