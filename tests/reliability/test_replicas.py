"""A `serve` with two Tritons behind one gateway, of which one is killed under load."""

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

from tests.live.servers import PATIENCE, WORDS, Serving, eventually, figure, left_of, repository
from tests.support import run

READERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("served"), words=WORDS)


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Serving]:
    watched = Serving(str(folder), "--replicas", "2", "--log", str(folder / "triton.log"))
    yield watched
    watched.close()


@dataclass
class Read:
    """A stream, and what became of it."""

    sent: float
    words: int = 0
    error: str = ""


class Load:
    """Readers who ask through the gateway again and again, each for a stream of two seconds."""

    def __init__(self, serve: Serving) -> None:
        self.reads: list[Read] = []
        self._url = f"http://{serve.frontend[0]}/v1/completions"
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> list[Read]:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.reads

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            # Of another length each, so that one is always about to begin.
            pause = f"{0.05 + number / 1000}{'0' * 300}{number}"
            body = {"model": "words", "prompt": f"40 {pause}", "stream": True}
            read = Read(time.monotonic())
            self.reads.append(read)
            request = urllib.request.Request(self._url, json.dumps(body).encode())
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    for line in answer:
                        read.words += b'"word ' in line
                        if b'"error"' in line:
                            read.error = line.decode()
            except OSError as error:
                read.error = str(error)


def metrics(serve: Serving, path: str) -> str:
    root = serve.frontend[0]
    with urllib.request.urlopen(f"http://{root}{path}", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def under_way(serve: Serving) -> list[float]:
    found = re.findall(
        r"^llmserve_replica_requests_running\{.*\} (.+)$", metrics(serve, "/metrics"), re.MULTILINE
    )
    return [float(count) for count in found]


def test_status_tells_how_each_is(serve: Serving) -> None:
    done = run("status", "--url", serve.url, "--json")
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["servers"]
    assert [one["name"] for one in told["models"]] == ["words"]
    assert told["url"] == told["replicas"][0]["url"] == serve.url
    assert len({one["log"] for one in told["replicas"]}) == 2
    assert all(one["state"] == "ready" for one in told["replicas"])
    # Of whichever Triton the address is, it is that of this `serve`.
    shown = run("status", "--url", told["replicas"][1]["url"]).stdout
    assert "words (1)" in shown
    assert "words (2)" in shown


def test_threads_are_shared(serve: Serving) -> None:
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for process in serve.processes("bin/tritonserver"):
        environment = Path(f"/proc/{process}/environ").read_text(encoding="utf-8").split("\0")
        assert f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', share)}" in environment


def test_one_that_is_killed_takes_its_own_streams_with_it_and_nothing_else(
    serve: Serving,
) -> None:
    load = Load(serve)
    eventually(lambda: len(load.reads) > 2 * READERS, PATIENCE)
    eventually(lambda: all(under_way(serve)), PATIENCE)
    port = re.findall(r"replica +grpc \S+:(\d+)", serve.told)[0]
    tritons = serve.processes("bin/tritonserver").items()
    (victim,) = [process for process, words in tritons if f"--grpc-port={port}" in words]
    theirs = under_way(serve)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    serve.said(r"replica 2: triton: restarting", killed)
    serve.said(r"replica 2: triton: ready", killed)
    eventually(lambda: all(under_way(serve)), PATIENCE)
    back = time.monotonic() - killed
    page = metrics(serve, "/metrics/triton")
    reads = load.end()
    failed = [read for read in reads if read.error]
    figure(f"one of two Tritons killed with {theirs:g} streams: failed", len(failed), "")
    figure("the last of them was sent before the kill by", killed - max(r.sent for r in failed))
    figure("asked again after", back)
    # What is counted a moment before may have ended, or begun, by then.
    assert 1 <= len(failed) <= theirs + 2
    assert all(read.words for read in failed), "what had not begun was tried elsewhere"
    assert all(read.sent < killed + 2 for read in failed)
    assert all(read.words == 40 for read in reads if not read.error)
    assert "replica 1: triton" not in serve.told
    assert len(set(re.findall(r'replica="(.+?)"', page))) == 2


def test_a_model_is_taken_in_anew_by_one_after_the_other(serve: Serving, folder: Path) -> None:
    source = folder / "words" / "1" / "model.py"
    source.write_text(WORDS.replace('b"word "', 'b"changed "'))
    load = Load(serve)
    done = run("reload", "words", "--url", serve.url)
    assert done.returncode == 0, done.stderr
    assert not [read.error for read in load.end() if read.error]
    (told,) = json.loads(run("status", "--url", serve.url, "--json").stdout)["servers"]
    for one in told["replicas"]:
        with urllib.request.urlopen(f"{one['http']}/v2/models/words/ready", timeout=PATIENCE):
            log = Path(one["log"]).read_text(encoding="utf-8", errors="replace")
        assert log.count("successfully loaded 'words'") >= 2


def test_it_ends_with_all_of_them(serve: Serving) -> None:
    code, seconds = serve.end()
    figure("two Tritons stopped after", seconds)
    assert code == 0, serve.told
    assert not left_of(serve.name)
    assert not serve.processes("bin/tritonserver")
