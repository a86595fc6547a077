"""A `serve` whose processes are killed one after the other; the tests build on each other."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llmserve.errors import ClientError
from tests.live.servers import DIES, PATIENCE, WORDS, Serving, eventually, figure, repository
from tests.support import run

TOKEN = "hf_planted0123456789"
ELSEWHERE = ["unshare", "-Urm", "sh", "-c"]
"""A mount namespace of one's own, where one may mount what one likes."""
# Its process stands still for three seconds while it loads, as it does with its machine.
STANDS_STILL = WORDS.replace(
    "    def execute",
    """    def initialize(self, args):
        import os, pathlib, signal, subprocess
        stood = pathlib.Path(os.environ["STOOD_STILL"])
        if not stood.exists():
            stood.touch()
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)

    def execute""",
)
# With a field that came after the embedded Triton.
NEWER = 'platform: "ensemble" ensemble_scheduling { max_inflight_requests: 4 }'
LITTLE = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("served"), words=WORDS, other=WORDS)


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Serving]:
    watched = Serving(str(folder), env={**os.environ, "HF_TOKEN": TOKEN})
    yield watched
    watched.close()


class Stream:
    """A stream that somebody reads while other things happen."""

    def __init__(self, serve: Serving, model: str, count: int, pause: float) -> None:
        self.words: list[str] = []
        self.error: Exception | None = None
        self._arguments = serve, model, f"{count} {pause}"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: self.words or self.error, PATIENCE)

    def whole(self) -> int:
        self._thread.join(PATIENCE)
        assert self.error is None, self.error
        return len(self.words)

    def _read(self) -> None:
        serve, model, prompt = self._arguments
        try:
            for piece in serve.client.stream(model, prompt, timeout=PATIENCE):
                self.words.append(piece.text)
        except Exception as error:
            self.error = error


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_frontend_is_started_and_its_address_comes_first(serve: Serving) -> None:
    addresses = [line.split() for _, line in serve.lines if "http://" in line]
    assert [name for name, _ in addresses] == ["openai", "http", "metrics"]
    root = addresses[0][1].removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/readyz", timeout=PATIENCE) as answer:
        assert {"words", "other"} <= set(json.loads(answer.read())["models"])


def test_nothing_listens_beyond_this_machine(serve: Serving) -> None:
    inodes = set()
    for process in [serve.process.pid, *serve.processes("")]:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                inodes.add(link.readlink().name)
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                listening.append(words[1].partition(":")[0])
    assert all(address.endswith(("0100007F", "000001000000")) for address in listening)
    assert len(listening) >= 4
    figure("listeners on loopback, and none elsewhere", len(listening), "")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_no_other_user_can_load_code_over_its_ports(serve: Serving, action: str) -> None:
    """Whoever is on this machine reaches the ports, and can read Triton's command line."""
    code = base64.b64encode(b"raise SystemExit").decode()
    body = {"parameters": {"config": '{"backend": "python"}', "file:1/model.py": code}}
    (words,) = serve.processes("bin/tritonserver").values()
    http = next(word.partition("=")[2] for word in words if word.startswith("--http-port"))
    url = f"http://127.0.0.1:{http}/v2/repository/models/other/{action}"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE)
    assert refused.value.code in range(400, 504)
    assert b"polling is enabled" in refused.value.read()
    assert serve.answers("other") == "word "
    (looked_through,) = [word for word in words if word.startswith("--model-repository")]
    assert Path(looked_through.partition("=")[2]).parent.stat().st_mode & 0o077 == 0


def test_a_killed_models_process_comes_back_and_the_others_do_not_notice(serve: Serving) -> None:
    stream = Stream(serve, "other", 150, 0.05)
    door = next(line.split()[-1] for _, line in serve.lines if "openai" in line)
    ready = f"{door.removesuffix('v1')}readyz/words"
    for _ in range(2):
        killed = serve.kill_stub("words")
        eventually(lambda: status_of(ready) == 503, PATIENCE)
        figure("a model's process killed: the front door says so after", time.monotonic() - killed)
        known = serve.said(r"words: restarting \(its process has died\)", killed) - killed
        eventually(lambda: serve.answers("words") == "word ", PATIENCE)
        healed = time.monotonic() - killed
        serve.said("words: ready", killed)
        figure("a model's process killed: known after", known)
        figure("a model's process killed: serving after", healed)
        assert known < 15
        assert healed < 30
        eventually(lambda: status_of(ready) == 200, PATIENCE)
    assert stream.whole() == 150
    assert "other: " not in serve.told


def test_status_tells_how_they_are(serve: Serving) -> None:
    done = run("status", "--url", serve.url, "--json")
    assert done.returncode == 0, done.stderr
    (server,) = json.loads(done.stdout)["servers"]
    found = {model["name"]: (model["state"], model["restarts"]) for model in server["models"]}
    assert found == {"words": ("ready", 2), "other": ("ready", 0)}
    shown = run("status", "--url", serve.url).stdout
    assert "words" in shown
    assert "openai" in shown
    assert run("status", "--url", "127.0.0.1:1").returncode == 4


def test_a_frontend_that_is_killed_comes_back(serve: Serving) -> None:
    (process,) = serve.processes("llmserve_gateway --url")
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    serve.said("openai: restarting", killed)
    figure("the frontend killed: serving after", serve.said("openai: ready", killed) - killed)


def test_a_model_that_was_changed_is_taken_in_when_it_is_asked_for(
    serve: Serving, folder: Path
) -> None:
    source = folder / "other" / "1" / "model.py"
    source.write_text(WORDS.replace('b"word "', 'b"changed "'))
    stream = Stream(serve, "other", 100, 0.1)
    time.sleep(2.5)
    assert serve.answers("other") == "word ", "nothing changes until somebody says so"
    done = run("reload", "other", "--url", serve.url)
    assert done.returncode == 0, done.stderr
    assert serve.answers("other") == "changed "
    assert set(stream.words) == {"word "}
    assert stream.whole() == 100, "what the old one has begun it finishes"

    source.write_text("raise ValueError('half a file')")
    done = run("reload", "other", "--url", serve.url)
    assert done.returncode == 1
    assert "half a file" in done.stderr
    assert serve.answers("other") == "changed ", "the old one serves on"
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "config.pbtxt").write_text("{{{")
    for nobody in ("nobody", "", ".", "broken"):
        assert run("reload", nobody, "--url", serve.url).returncode == 1
    (folder / "newer" / "1").mkdir(parents=True)
    (folder / "newer" / "config.pbtxt").write_text(NEWER)
    done = run("reload", "newer", "--url", serve.url)
    assert "'newer' failed to load: this Triton cannot read its config.pbtxt" in done.stderr
    assert serve.answers("other") == "changed ", "nothing but a model is loaded"
    assert "triton: restarting" not in serve.told
    for name in ("broken", "newer"):
        shutil.rmtree(folder / name)
    source.write_text(WORDS)
    assert run("reload", "other", "--url", serve.url).returncode == 0


def test_triton_killed_comes_back_with_all_models_and_leaves_nothing(serve: Serving) -> None:
    (process,) = serve.processes("bin/tritonserver")
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    serve.said("triton: restarting", killed)
    eventually(serve.nothing_is_left, PATIENCE)
    eventually(lambda: serve.answers("words") and serve.answers("other"), PATIENCE)
    figure("Triton killed: serving after", time.monotonic() - killed)
    serve.said("triton: ready", killed)


def test_another_serve_of_the_same_models_with_little_shared_memory(
    serve: Serving, folder: Path
) -> None:
    """Whoever sends more than it holds hits one model; HOME cannot be written to either."""
    if subprocess.run([*ELSEWHERE, LITTLE, "sh", "true"], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    home = {**os.environ, "HOME": "/proc/nobody"}
    words = [str(folder), "--frontend", "none"]
    little = Serving(*words, env=home, within=[*ELSEWHERE, LITTLE, "sh"])
    try:
        with pytest.raises(ClientError) as refused:
            little.client.generate("words", "a" * (100 << 20), timeout=PATIENCE)
        assert "'words'" in str(refused.value)
        assert "shared memory" in str(refused.value)
        assert little.name not in str(refused.value)
        assert little.answers("other") == "word "
        eventually(lambda: little.answers("words") == "word ", PATIENCE)
        assert little.end()[0] == 0
        assert little.nothing_is_left()
    finally:
        little.close()
    assert serve.answers("words") == serve.answers("other") == "word "


def test_stopped_with_a_dead_model_and_ten_streams_all_of_them_finish(serve: Serving) -> None:
    log = Path(re.findall(r"log in (\S+)", serve.told)[0]).read_text(
        encoding="utf-8", errors="replace"
    )
    streams = [Stream(serve, "other", 60, 0.05) for _ in range(10)]
    serve.kill_stub("words")
    code, seconds = serve.end(signal.SIGTERM)
    figure("stopped with ten streams of 3 s and a dead model: gone after", seconds)
    assert code == 0, serve.told
    assert [stream.whole() for stream in streams] == [60] * 10
    assert seconds < 35
    assert serve.nothing_is_left()
    assert run("status", "--url", serve.url).returncode == 4
    assert TOKEN not in log + serve.told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)), "--frontend", "none")
    try:
        Stream(serve, "words", 600, 0.1)
        serve.process.send_signal(number)
        serve.said("stopping, requests in flight")
        code, seconds = serve.end(number)
        figure(f"a second {number.name}, with a stream of a minute: gone after", seconds)
        assert seconds < 15
        assert code == 0
        assert serve.nothing_is_left()
    finally:
        serve.close()


def test_a_model_that_dies_over_and_over_has_failed_and_serve_says_why(tmp_path: Path) -> None:
    serve = Serving(str(repository(tmp_path, dies=DIES)), "--frontend", "none")
    try:
        assert serve.process.wait(PATIENCE) == 1
    finally:
        serve.close()
    assert "dies: failed (its process has died)" in serve.told
    assert "nothing is left to serve (dies: its process has died): see" in serve.told
    assert serve.told.count("dies: loading") == 4
    eventually(serve.nothing_is_left)
    Path(serve.told.rpartition("see ")[2].strip()).unlink()


def test_a_model_that_stood_still_while_it_loaded_holds_up_nothing(tmp_path: Path) -> None:
    stood = tmp_path / "stood"
    folder = repository(tmp_path / "served", still=STANDS_STILL, words=WORDS)
    environment = {**os.environ, "STOOD_STILL": str(stood)}
    serve = Serving(str(folder), "--frontend", "none", env=environment)
    try:
        assert serve.answers("still") == "word "
        stood.unlink()
        refused = run("reload", "still", "--url", serve.url)
        assert "'still_0_0' stood still for a second, or ended" in refused.stderr
        assert serve.answers("still") == "word "
        for model in ("words", "still"):
            assert run("reload", model, "--url", serve.url).returncode == 0
            assert serve.answers(model) == "word "
    finally:
        serve.close()


def test_when_serve_itself_is_killed_nothing_is_left(tmp_path: Path) -> None:
    serve = Serving(str(repository(tmp_path, words=WORDS)))
    Stream(serve, "words", 600, 0.1)
    killed = time.monotonic()
    serve.process.kill()
    eventually(serve.nothing_is_left, PATIENCE)
    eventually(lambda: not serve.processes("llmserve_gateway"), PATIENCE)
    figure("serve killed: nothing left after", time.monotonic() - killed)
    assert time.monotonic() - killed < 20
    serve.close()
