"""Serves that end, or that have models which do: each test has its own."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from llmserve.testing.command import run
from tests.live.servers import (
    CRASHES,
    DIES,
    LINGERS,
    STREAMS,
    TIMEOUT,
    WORDS,
    Serving,
    Stream,
    eventually,
    figure,
    repository,
)

pytestmark = pytest.mark.long

# Its process stops for three seconds while it loads, as it would if the machine stalled.
STOPS_ONCE = WORDS.replace(
    "    def execute",
    """    def initialize(self, args):
        import os, pathlib, signal, subprocess
        marker = pathlib.Path(os.environ["STOP_MARKER"])
        if not marker.exists():
            marker.touch()
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def execute""",
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)), "--frontend", "none")
    try:
        Stream(serve, "words", 600, 0.1)
        serve.process.send_signal(number)
        serve.wait_for("stopping, requests in flight")
        code, seconds = serve.stop(number)
        figure(f"a second {number.name}, with a stream of a minute: ended after", seconds)
        assert seconds < 15
        assert code == 0
        assert serve.nothing_is_left()
    finally:
        serve.close()


def test_a_model_that_dies_repeatedly_has_failed_and_serve_reports_why(tmp_path: Path) -> None:
    serve = Serving(str(repository(tmp_path, dies=DIES)), "--frontend", "none")
    try:
        assert serve.process.wait(TIMEOUT) == 1
    finally:
        serve.close()
    assert "dies: failed (its process has died: killed by SIGKILL)" in serve.output
    assert (
        "nothing is left to serve (dies: its process has died: killed by SIGKILL): see"
        in serve.output
    )
    assert serve.output.count("dies: loading") == 4
    eventually(serve.nothing_is_left)
    Path(serve.output.rpartition("see ")[2].strip()).unlink()


def test_models_that_cannot_be_loaded_are_left_out_and_the_log_stays(tmp_path: Path) -> None:
    """Triton would wait for both of them: for the first ten minutes, for the second for ever."""
    folder = repository(tmp_path, lingers=LINGERS, crashes=CRASHES, words=WORDS)
    (repository(tmp_path, hollow=WORDS) / "hollow" / "1" / "model.py").unlink()
    serve = Serving(str(folder), "--frontend", "none")
    try:
        assert "hollow is left out: 1/model.py is missing" in serve.output
        reasons = {
            "lingers": "ModuleNotFoundError: No module named 'acme'",
            "crashes": "its process died while it was loading (killed by SIGSEGV)",
        }
        for name, why in reasons.items():
            assert f"model {name!r} failed to load: {why}" in serve.output
        assert serve.try_generate("words") == "word "
        status = json.loads(run("status", "--url", serve.url, "--json").stdout)["servers"][0]
        states = {model["name"]: model["state"] for model in status["models"]}
        assert states == dict.fromkeys([*reasons, "hollow"], "failed") | {"words": "ready"}
        (folder / "lingers" / "1" / "model.py").write_text(WORDS)
        (folder / "lingers" / "config.pbtxt").write_text(STREAMS)
        assert run("reload", "lingers", "--url", serve.url).returncode == 0
        assert serve.try_generate("lingers") == "word "
        assert serve.stop()[0] == 0
        serve.wait_for("not everything went well", after=0.1)
        log = Path(serve.output.rpartition("the log is in ")[2])
        assert "No module named 'acme'" in log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
    finally:
        serve.close()


def test_a_model_that_stops_while_it_loads_does_not_block_anything(tmp_path: Path) -> None:
    marker = tmp_path / "stopped"
    folder = repository(tmp_path / "served", stops=STOPS_ONCE, words=WORDS)
    env = {**os.environ, "STOP_MARKER": str(marker)}
    log = str(tmp_path / "triton.log")
    serve = Serving(str(folder), "--frontend", "none", "--log", log, env=env)
    try:
        assert serve.try_generate("stops") == "word "
        marker.unlink()
        refused = run("reload", "stops", "--url", serve.url)
        assert "'stops_0_0' did not respond for a second, or ended" in refused.stderr
        assert serve.try_generate("stops") == "word "
        for model in ("words", "stops"):
            assert run("reload", model, "--url", serve.url).returncode == 0
            assert serve.try_generate(model) == "word "
    finally:
        serve.close()


def test_when_serve_itself_is_killed_nothing_is_left(tmp_path: Path) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)))
    Stream(serve, "words", 600, 0.1)
    killed = time.monotonic()
    serve.process.kill()
    eventually(serve.nothing_is_left, TIMEOUT)
    eventually(lambda: not serve.processes("llmserve_gateway"), TIMEOUT)
    figure("serve killed: nothing left after", time.monotonic() - killed)
    assert time.monotonic() - killed < 20
    serve.close()
