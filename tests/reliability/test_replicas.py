"""A `serve` with two Tritons behind one gateway, one of which is killed under load."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmserve.testing.command import run
from tests.live.servers import TIMEOUT, WORDS, Serving, eventually, figure, leftovers, repository

pytestmark = pytest.mark.long

CLIENTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("served"), words=WORDS)


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Serving]:
    running = Serving(str(folder), "--replicas", "2", "--log", str(folder / "triton.log"))
    yield running
    running.close()


@dataclass
class Stream:
    """A stream and its outcome."""

    sent: float
    words: int = 0
    error: str = ""


class Load:
    """Clients that request one two-second stream after another through the gateway."""

    def __init__(self, serve: Serving) -> None:
        self.streams: list[Stream] = []
        self._url = f"http://{serve.frontend[0]}/v1/completions"
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> list[Stream]:
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT)
        return self.streams

    def _run(self, number: int) -> None:
        while not self._stopped.is_set():
            # Each has a different length, so that one is always about to begin.
            pause = f"{0.05 + number / 1000}{'0' * 300}{number}"
            body = {"model": "words", "prompt": f"40 {pause}", "stream": True}
            stream = Stream(time.monotonic())
            self.streams.append(stream)
            request = urllib.request.Request(self._url, json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                    for line in response:
                        stream.words += b'"word ' in line
                        if b'"error"' in line:
                            stream.error = line.decode()
            except OSError as error:
                stream.error = str(error)


def metrics(serve: Serving, path: str) -> str:
    root = serve.frontend[0]
    with urllib.request.urlopen(f"http://{root}{path}", timeout=TIMEOUT) as response:
        return str(response.read().decode())


def running_requests(serve: Serving) -> list[float]:
    counts = re.findall(
        r"^llmserve_replica_requests_running\{.*\} (.+)$", metrics(serve, "/metrics"), re.MULTILINE
    )
    return [float(count) for count in counts]


def test_status_reports_each_replica(serve: Serving) -> None:
    done = run("status", "--url", serve.url, "--json")
    assert done.returncode == 0, done.stderr
    (server,) = json.loads(done.stdout)["servers"]
    assert [model["name"] for model in server["models"]] == ["words"]
    replicas = server["replicas"]
    assert server["url"] == replicas[0]["url"] == serve.url
    assert len({replica["log"] for replica in replicas}) == 2
    assert all(replica["state"] == "ready" for replica in replicas)
    # The address of either Triton leads to this `serve`.
    output = run("status", "--url", replicas[1]["url"]).stdout
    assert "words (1)" in output
    assert "words (2)" in output


def test_the_tritons_divide_the_threads(serve: Serving) -> None:
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for process in serve.processes("bin/tritonserver"):
        environment = Path(f"/proc/{process}/environ").read_text(encoding="utf-8").split("\0")
        assert f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', share)}" in environment


def test_a_triton_that_is_killed_breaks_only_its_own_streams(serve: Serving) -> None:
    load = Load(serve)
    eventually(lambda: len(load.streams) > 2 * CLIENTS, TIMEOUT)
    eventually(lambda: all(running_requests(serve)), TIMEOUT)
    port = re.findall(r"replica +grpc \S+:(\d+)", serve.output)[0]
    tritons = serve.processes("bin/tritonserver").items()
    (victim,) = [process for process, args in tritons if f"--grpc-port={port}" in args]
    running = running_requests(serve)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    serve.wait_for(r"replica 2: triton: restarting", killed)
    serve.wait_for(r"replica 2: triton: ready", killed)
    eventually(lambda: all(running_requests(serve)), TIMEOUT)
    recovered = time.monotonic() - killed
    page = metrics(serve, "/metrics/triton")
    streams = load.end()
    failed = [stream for stream in streams if stream.error]
    figure(f"one of two Tritons killed with {running:g} streams: failed", len(failed), "")
    last = max(stream.sent for stream in failed)
    figure("the last of them was sent before the kill by", killed - last)
    figure("in use again after", recovered)
    # Streams may have ended or begun between the count and the kill.
    assert 1 <= len(failed) <= running + 2
    assert all(stream.words for stream in failed), "streams that had not begun were retried"
    assert all(stream.sent < killed + 2 for stream in failed)
    assert all(stream.words == 40 for stream in streams if not stream.error)
    assert "replica 1: triton" not in serve.output
    assert len(set(re.findall(r'replica="(.+?)"', page))) == 2


def test_a_model_is_reloaded_by_one_triton_after_the_other(serve: Serving, folder: Path) -> None:
    source = folder / "words" / "1" / "model.py"
    source.write_text(WORDS.replace('b"word "', 'b"changed "'))
    load = Load(serve)
    done = run("reload", "words", "--url", serve.url)
    assert done.returncode == 0, done.stderr
    assert not [stream.error for stream in load.end() if stream.error]
    (server,) = json.loads(run("status", "--url", serve.url, "--json").stdout)["servers"]
    for replica in server["replicas"]:
        with urllib.request.urlopen(f"{replica['http']}/v2/models/words/ready", timeout=TIMEOUT):
            log = Path(replica["log"]).read_text(encoding="utf-8", errors="replace")
        assert log.count("successfully loaded 'words'") >= 2


def test_it_stops_all_of_them(serve: Serving) -> None:
    code, seconds = serve.stop()
    figure("two Tritons stopped after", seconds)
    assert code == 0, serve.output
    assert not leftovers(serve.name)
    assert not serve.processes("bin/tritonserver")
