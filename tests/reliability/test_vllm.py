"""A `serve` with a model in vLLM, which is killed, abandoned, reloaded and made to fail.

The tests depend on their order; only `make test-vllm` installs vLLM.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import llmserve
from llmserve.errors import LLMServeError
from llmserve.testing.command import run
from tests.live.servers import PROMPT, TIMEOUT, Serving, eventually, figure

pytest.importorskip("vllm", reason="only `make test-vllm` installs vLLM")

MODEL = "model"
LONG: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True}
# Tells when vLLM is told to end a request, on the clock that all processes of a machine share.
# While a file is there, a step fails, or an engine cannot be made.
PROBE = """
import pathlib, time
from llmserve_vllm.library import LLMEngine
_abort, _step, _make = LLMEngine.abort_request, LLMEngine.step, LLMEngine.from_vllm_config
_folder = pathlib.Path({folder!r})
def _aborting(self, *args):
    with (_folder / "aborted").open("a") as file:
        print(time.monotonic(), file=file)
    return _abort(self, *args)
def _stepping(self):
    if (_folder / "fail").exists():
        (_folder / "fail").unlink()
        raise RuntimeError("made to fail")
    return _step(self)
def _making(*args, **options):
    if (_folder / "full").exists():
        (_folder / "full").unlink()
        raise MemoryError("no room")
    return _make(*args, **options)
LLMEngine.abort_request, LLMEngine.step, LLMEngine.from_vllm_config = _aborting, _stepping, _making
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, probe: Path) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("served")
    built = llmserve.build(
        "vllm", "demo", name=MODEL, output=folder, enforce_eager=True, dtype="float32",
        max_num_seqs=4,
    ).folder  # fmt: skip
    entry = built / "1" / "model.py"
    source = entry.read_text(encoding="utf-8") + PROBE.format(folder=str(probe))
    entry.write_text(source, encoding="utf-8")
    running = Serving(str(folder), "--log", str(folder / "triton.log"))
    yield running
    running.close()


class Stream:
    """A long stream that a thread reads while other things happen."""

    def __init__(self, serve: Serving) -> None:
        self.pieces: list[str] = []
        self.error: Exception | None = None
        self._serve = serve
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: self.pieces or self.error, TIMEOUT)

    def end(self) -> str:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()
        return "".join(self.pieces)

    def _read(self) -> None:
        try:
            for piece in self._serve.client.stream(MODEL, PROMPT, timeout=TIMEOUT, **LONG):
                self.pieces.append(piece.text)
        except Exception as error:
            self.error = error


@contextmanager
def begun(serve: Serving) -> Iterator[Any]:
    """Yield a stream through the gateway that has begun."""
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, **LONG}
    url = f"http://{serve.frontend[0]}/v1/completions"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=TIMEOUT) as page:
        assert page.readline()
        yield page


def answer(serve: Serving) -> str:
    return serve.client.generate(MODEL, PROMPT, max_tokens=16, timeout=TIMEOUT).text


def answers_again(serve: Serving) -> str:
    def ask() -> str | None:
        with suppress(LLMServeError):
            return answer(serve)
        return None

    return str(eventually(ask, TIMEOUT))


@pytest.fixture(scope="module")
def expected(serve: Serving) -> str:
    return answer(serve)


def test_a_request_whose_client_has_gone_is_aborted_in_vllm_within_half_a_second(
    serve: Serving, probe: Path
) -> None:
    took = []
    for through_gateway in (False, True) * 3:
        (probe / "aborted").unlink(missing_ok=True)
        if through_gateway:
            with begun(serve):
                left = time.monotonic()
        else:
            pieces = serve.client.stream(MODEL, PROMPT, **LONG)
            next(pieces)
            left = time.monotonic()
            pieces.close()
        eventually((probe / "aborted").exists, TIMEOUT)
        time_of = eventually(lambda: (probe / "aborted").read_text(encoding="utf-8").split())
        took.append(float(time_of[0]) - left)
    figure("a client gone: vLLM is told after", max(took))
    assert max(took) < 0.5 * 4, "a busy machine gets four times as long"


def test_a_killed_model_comes_back_with_the_same_answers(serve: Serving, expected: str) -> None:
    with begun(serve) as page:
        killed = serve.kill_stub(MODEL)
        assert b"died while it answered" in page.read()
    figure("a model in vLLM killed: its stream ends after", time.monotonic() - killed)
    noticed = serve.wait_for(rf"{MODEL}: restarting .*killed by SIGKILL", killed) - killed
    assert answers_again(serve) == expected
    figure("a model in vLLM killed: noticed after", noticed)
    figure("a model in vLLM killed: serving after", time.monotonic() - killed)


def test_a_killed_triton_comes_back_with_the_same_answers(serve: Serving, expected: str) -> None:
    (process,) = serve.processes("bin/tritonserver")
    stream = Stream(serve)
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    stream.end()
    assert isinstance(stream.error, LLMServeError)
    serve.wait_for("triton: restarting", killed)
    assert answers_again(serve) == expected
    assert len(serve.processes(f"models/{MODEL}/1/model.py ")) == 1
    figure("Triton killed: vLLM serves after", time.monotonic() - killed)


def test_a_reload_lets_streams_finish_and_leaves_one_engine(serve: Serving, expected: str) -> None:
    (before,) = serve.processes(f"models/{MODEL}/1/model.py ")
    stream = Stream(serve)
    done = run("reload", MODEL, "--url", serve.url)
    assert done.returncode == 0, done.stderr
    assert answer(serve) == expected
    assert stream.end().startswith(expected)
    assert stream.error is None
    eventually(lambda: before not in serve.processes(f"models/{MODEL}/1/model.py "), TIMEOUT)
    assert len(serve.processes(f"models/{MODEL}/1/model.py ")) == 1


def test_a_step_that_fails_ends_those_in_flight_and_the_next_gets_a_new_engine(
    serve: Serving, probe: Path, expected: str
) -> None:
    """Also if there is no room for one at first; the process and the model stay."""
    before = serve.processes(f"models/{MODEL}/1/model.py ")
    restarts = serve.output.count("restarting")
    streams = [Stream(serve) for _ in range(3)]
    (probe / "full").touch()
    (probe / "fail").touch()
    for stream in streams:
        stream.end()
        assert "made to fail" in str(stream.error)
    with pytest.raises(LLMServeError, match="no room"):
        answer(serve)
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: answer(serve), range(6))) == {expected}
    assert serve.processes(f"models/{MODEL}/1/model.py ") == before
    assert serve.output.count("restarting") == restarts


def test_it_stops_with_streams_that_finish(serve: Serving) -> None:
    stream = Stream(serve)
    code, seconds = serve.stop()
    figure("a serve with vLLM stopped with a stream: ended after", seconds)
    assert code == 0, serve.output
    stream.end()
    assert stream.error is None
    eventually(serve.nothing_is_left, TIMEOUT)
