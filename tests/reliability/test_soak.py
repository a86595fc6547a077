"""What takes minutes: `make soak` runs it."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.live.servers import PATIENCE, WORDS, Serving, eventually, figure, repository

pytestmark = pytest.mark.soak

APART = 15.5
"""Seconds between two deaths: five within a minute, and it is left alone."""


@pytest.mark.parametrize("program", ["models/words/1/model.py ", "bin/tritonserver"])
def test_killed_twenty_times_it_serves_again(tmp_path: Path, program: str) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)))
    took: list[float] = []
    try:
        for _ in range(20):
            (process,) = serve.processes(program)
            killed = time.monotonic()
            os.kill(process, signal.SIGKILL)
            serve.said("words: restarting", killed)
            eventually(lambda: serve.answers("words"), PATIENCE)
            took.append(time.monotonic() - killed)
            serve.said("words: ready", killed)
            time.sleep(max(0.0, APART - (time.monotonic() - killed)))
        figure(f"killed twenty times, {program.strip()}: serving after", statistics.median(took))
        figure(f"killed twenty times, {program.strip()}: after at most", max(took))
        code, _ = serve.end()
        assert code == 0
        assert serve.nothing_is_left()
    finally:
        serve.close()


def test_a_model_that_hangs_is_noticed_and_loaded_anew(tmp_path: Path) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS, other=WORDS)))
    try:
        (process,) = serve.processes("models/words/1/model.py ")
        os.kill(process, signal.SIGSTOP)
        stopped = time.monotonic()
        figure("a model hangs: suspect after", serve.said("words: suspect", stopped) - stopped)
        figure("a model hangs: serving after", serve.said("words: ready", stopped) - stopped)
        assert serve.answers("words") == "word "
        assert "other: " not in serve.told
        code, seconds = serve.end()
        assert code == 0
        assert seconds < 35
        assert serve.nothing_is_left()
    finally:
        serve.close()


@pytest.mark.parametrize("time_of", range(5))
def test_serve_killed_leaves_nothing(tmp_path: Path, time_of: int) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)))
    try:
        time.sleep(0.3 * time_of)
        serve.process.kill()
        eventually(serve.nothing_is_left, PATIENCE)
    finally:
        serve.close()
