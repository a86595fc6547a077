"""Tests that take minutes: `make soak` runs them."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.live.servers import TIMEOUT, WORDS, Serving, eventually, figure, repository

pytestmark = pytest.mark.soak

INTERVAL = 15.5
"""Seconds between two deaths: after five within a minute, it is not restarted."""


@pytest.mark.parametrize("program", ["models/words/1/model.py ", "bin/tritonserver"])
def test_it_recovers_from_twenty_kills(tmp_path: Path, program: str) -> None:
    log = str(tmp_path / "triton.log")
    serve = Serving(str(repository(tmp_path, words=WORDS)), "--log", log)
    took: list[float] = []
    try:
        for _ in range(20):
            (process,) = serve.processes(program)
            killed = time.monotonic()
            os.kill(process, signal.SIGKILL)
            serve.wait_for("words: restarting", killed)
            eventually(lambda: serve.try_generate("words"), TIMEOUT)
            took.append(time.monotonic() - killed)
            serve.wait_for("words: ready", killed)
            time.sleep(max(0.0, INTERVAL - (time.monotonic() - killed)))
        figure(f"killed twenty times, {program.strip()}: serving after", statistics.median(took))
        figure(f"killed twenty times, {program.strip()}: after at most", max(took))
        code, _ = serve.stop()
        assert code == 0
        assert serve.nothing_is_left()
    finally:
        serve.close()


def test_a_model_that_hangs_is_noticed_and_reloaded(tmp_path: Path) -> None:
    log = str(tmp_path / "triton.log")
    serve = Serving(str(repository(tmp_path, words=WORDS, other=WORDS)), "--log", log)
    try:
        (process,) = serve.processes("models/words/1/model.py ")
        os.kill(process, signal.SIGSTOP)
        stopped = time.monotonic()
        figure("a model hangs: suspect after", serve.wait_for("words: suspect", stopped) - stopped)
        figure("a model hangs: serving after", serve.wait_for("words: ready", stopped) - stopped)
        assert serve.try_generate("words") == "word "
        assert "other: " not in serve.output
        code, seconds = serve.stop()
        assert code == 0
        assert seconds < 35
        assert serve.nothing_is_left()
    finally:
        serve.close()


@pytest.mark.parametrize("step", range(5))
def test_serve_killed_leaves_nothing(tmp_path: Path, step: int) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)))
    try:
        time.sleep(0.3 * step)
        serve.process.kill()
        eventually(serve.nothing_is_left, TIMEOUT)
    finally:
        serve.close()
