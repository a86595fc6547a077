"""A `serve` whose processes are killed one after another; the tests depend on their order."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

from llmserve.errors import ClientError
from llmserve.repository.manifest import Manifest
from llmserve.server import health
from llmserve.server.run.guard import state_of
from llmserve.testing.command import run
from tests.live.servers import (
    ECHO,
    TIMEOUT,
    WORDS,
    Serving,
    Stream,
    eventually,
    figure,
    repository,
)

pytestmark = pytest.mark.long

TOKEN = "hf_planted0123456789"
MOUNT_NAMESPACE = ["unshare", "-Urm", "sh", "-c"]
"""Runs a command where it may mount file systems that other processes do not see."""
# Has a field that is newer than the embedded Triton.
NEWER = 'platform: "ensemble" ensemble_scheduling { max_inflight_requests: 4 }'
# Has what it sends from another model, a word at a time.
CALLS = WORDS.replace(
    """            word = pb.Tensor("text_output", np.array([b"word "], dtype=object))
""",
    """            word = pb.Tensor("IN", np.array([b"word "], dtype=object))
            call = pb.InferenceRequest(
                model_name="part", requested_output_names=["OUT"], inputs=[word]
            )
            said = pb.get_output_tensor_by_name(call.exec(), "OUT")
            word = pb.Tensor("text_output", said.as_numpy())
""",
)
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("served"), words=WORDS, other=WORDS)


@pytest.fixture(scope="module")
def serve(folder: Path) -> Iterator[Serving]:
    log = str(folder / "triton.log")
    running = Serving(str(folder), "--log", log, env={**os.environ, "HF_TOKEN": TOKEN})
    yield running
    running.close()


def read_stream(openai: str, model: str, prompt: str, lines: list[str]) -> None:
    """Read a stream through the gateway to its end."""
    body = json.dumps({"model": model, "prompt": prompt, "stream": True}).encode()
    with urllib.request.urlopen(f"{openai}/completions", body, timeout=TIMEOUT) as page:
        for line in page:
            lines += filter(None, [line.decode().strip()])


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_frontend_is_started_and_its_address_comes_first(serve: Serving) -> None:
    addresses = [line.split() for _, line in serve.lines if "http://" in line]
    assert [name for name, _ in addresses] == ["openai", "page", "http", "metrics"]
    root = addresses[0][1].removesuffix("/v1")
    with urllib.request.urlopen(f"{root}/readyz", timeout=TIMEOUT) as response:
        assert {"words", "other"} <= set(json.loads(response.read())["models"])


def test_nothing_listens_beyond_this_machine(serve: Serving) -> None:
    inodes = set()
    for process in [serve.process.pid, *serve.processes("")]:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                inodes.add(link.readlink().name)
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].partition(":")[0])
    assert all(address.endswith(("0100007F", "000001000000")) for address in listening)
    assert len(listening) >= 4
    figure("listeners on loopback, and none elsewhere", len(listening), "")


@pytest.mark.parametrize("action", ["load", "unload"])
def test_no_other_user_can_load_code_over_its_ports(serve: Serving, action: str) -> None:
    """Any user of this machine can reach the ports and read Triton's command line."""
    code = base64.b64encode(b"raise SystemExit").decode()
    body = {"parameters": {"config": '{"backend": "python"}', "file:1/model.py": code}}
    (args,) = serve.processes("bin/tritonserver").values()
    http = next(arg.partition("=")[2] for arg in args if arg.startswith("--http-port"))
    url = f"http://127.0.0.1:{http}/v2/repository/models/other/{action}"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, json.dumps(body).encode(), timeout=TIMEOUT)
    assert refused.value.code in range(400, 504)
    assert b"polling is enabled" in refused.value.read()
    assert serve.try_generate("other") == "word "
    (option,) = [arg for arg in args if arg.startswith("--model-repository")]
    assert Path(option.partition("=")[2]).parent.stat().st_mode & 0o077 == 0


def test_a_killed_model_comes_back_without_affecting_the_others(serve: Serving) -> None:
    stream = Stream(serve, "other", 150, 0.05)
    openai = next(line.split()[-1] for _, line in serve.lines if "openai" in line)
    ready = f"{openai.removesuffix('v1')}readyz/words"
    for _ in range(2):
        lines: list[str] = []
        reading = Thread(target=read_stream, args=(openai, "words", "600 0.1", lines))
        reading.start()
        eventually(lines.copy, TIMEOUT)
        killed = serve.kill_stub("words")
        eventually(lambda: status_of(ready) == 503, TIMEOUT)
        figure("a model's process killed: the gateway reports it after", time.monotonic() - killed)
        # Triton never ends what is in flight.
        reading.join(TIMEOUT)
        assert "the process of 'words' died while it answered" in lines[-1]
        figure("a model's process killed: its stream ends after", time.monotonic() - killed)
        noticed = (
            serve.wait_for(r"words: restarting \(its process has died: killed by SIGKILL\)", killed)
            - killed
        )
        eventually(lambda: serve.try_generate("words") == "word ", TIMEOUT)
        recovered = time.monotonic() - killed
        serve.wait_for("words: ready", killed)
        figure("a model's process killed: noticed after", noticed)
        figure("a model's process killed: serving after", recovered)
        assert noticed < 15
        assert recovered < 30
        eventually(lambda: status_of(ready) == 200, TIMEOUT)
    assert stream.whole() == 150
    assert "other: " not in serve.output


def test_status_reports_the_models(serve: Serving) -> None:
    done = run("status", "--url", serve.url, "--json")
    assert done.returncode == 0, done.stderr
    (server,) = json.loads(done.stdout)["servers"]
    states = {model["name"]: (model["state"], model["restarts"]) for model in server["models"]}
    assert states == {"words": ("ready", 2), "other": ("ready", 0)}
    output = run("status", "--url", serve.url).stdout
    assert "words" in output
    assert "openai" in output
    assert run("status", "--url", "127.0.0.1:1").returncode == 4


def test_an_idle_model_gets_one_canary_per_interval(serve: Serving) -> None:
    """The supervisor sends it, and the frontend asks the supervisor."""

    def answered() -> int:
        with urllib.request.urlopen(f"http://{serve.http}/v2/models/words/stats") as page:
            return int(json.load(page)["model_stats"][0]["inference_stats"]["success"]["count"])

    before, began = eventually(answered), time.monotonic()
    intervals = 3
    eventually(lambda: answered() >= before + intervals, TIMEOUT)
    assert time.monotonic() - began > (intervals - 1) * health.INTERVAL
    time.sleep(health.INTERVAL)
    most = (time.monotonic() - began) / health.INTERVAL + 1
    assert answered() <= before + most


def test_a_frontend_that_is_killed_comes_back(serve: Serving) -> None:
    (process,) = serve.processes("llmserve_gateway --url")
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    serve.wait_for("openai: restarting", killed)
    figure("the frontend killed: serving after", serve.wait_for("openai: ready", killed) - killed)


def test_a_changed_model_is_loaded_only_on_request(serve: Serving, folder: Path) -> None:
    source = folder / "other" / "1" / "model.py"
    source.write_text(WORDS.replace('b"word "', 'b"changed "'))
    stream = Stream(serve, "other", 100, 0.1)
    time.sleep(2.5)
    assert serve.try_generate("other") == "word ", "nothing changes before a reload"
    done = run("reload", "other", "--url", serve.url)
    assert done.returncode == 0, done.stderr
    assert serve.try_generate("other") == "changed "
    assert set(stream.words) == {"word "}
    assert stream.whole() == 100, "the old model finishes its streams"

    source.write_text("raise ValueError('half a file')")
    done = run("reload", "other", "--url", serve.url)
    assert done.returncode == 1
    assert "half a file" in done.stderr
    assert serve.try_generate("other") == "changed ", "the old model keeps serving"
    log = Path(re.findall(r"log in (\S+)", serve.output)[0])
    loads = log.read_text(encoding="utf-8", errors="replace").count("loading: other:")
    time.sleep(2.5)
    again = log.read_text(encoding="utf-8", errors="replace").count("loading: other:")
    assert again == loads, "Triton does not try again on its own"
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "config.pbtxt").write_text("{{{")
    for name in ("absent", "", ".", "broken"):
        assert run("reload", name, "--url", serve.url).returncode == 1
    (folder / "newer" / "1").mkdir(parents=True)
    (folder / "newer" / "config.pbtxt").write_text(NEWER)
    done = run("reload", "newer", "--url", serve.url)
    assert "'newer' failed to load: this Triton cannot read its config.pbtxt" in done.stderr
    assert serve.try_generate("other") == "changed ", "only models are loaded"
    assert "triton: restarting" not in serve.output
    for name in ("broken", "newer"):
        shutil.rmtree(folder / name)
    source.write_text(WORDS)
    assert run("reload", "other", "--url", serve.url).returncode == 0


def test_an_unloaded_model_finishes_its_streams_and_can_be_loaded_again(serve: Serving) -> None:
    # What failed to load is taken off the list.
    assert run("unload", "newer", "--url", serve.url).returncode == 0
    stream = Stream(serve, "other", 60, 0.05)
    asked = time.monotonic()
    done = run("unload", "other", "--url", serve.url)
    assert (done.returncode, done.stderr) == (0, "llmserve: other is unloaded\n")
    figure("a model unloaded: takes no requests after", time.monotonic() - asked)
    assert stream.whole() == 60
    assert serve.try_generate("other") is None
    assert serve.try_generate("words") == "word "
    status = run("status", "--url", serve.url)
    assert status.returncode == 0
    assert re.search(r"^ *other +unloaded ", status.stdout, re.M)
    again = run("unload", "other", "--url", serve.url)
    assert (again.returncode, "no model 'other' is served" in again.stderr) == (1, True)
    done = run("reload", "other", "--url", serve.url)
    assert (done.returncode, done.stderr) == (0, "llmserve: other is loaded\n")
    assert serve.try_generate("other") == "word "
    assert "restarting" not in serve.output.rpartition("other: unloaded")[2]


def test_an_unloaded_model_has_the_parts_that_it_calls_until_its_streams_end(
    serve: Serving, folder: Path
) -> None:
    repository(folder, caller=CALLS, part=ECHO)
    # As a part of something it may be without components.
    built = Manifest(
        name="caller", recipe="", plugin="", exchange="stream", source={}, options={},
        components={}, contract={}, packages={}, trust_remote_code=False, llmserve="",
        part_of="something", parts=("part",),
    )  # fmt: skip
    built.write(folder / "caller")
    done = run("reload", "caller", "--url", serve.url)
    assert done.returncode == 0, done.stderr
    stream = Stream(serve, "caller", 60, 0.05)
    assert run("unload", "caller", "--url", serve.url).returncode == 0
    assert stream.whole() == 60
    eventually(lambda: not serve.processes("models/part/1/model.py "))
    for name in ("caller", "part"):
        shutil.rmtree(folder / name)


def test_a_folder_that_is_gone_is_told_and_keeps_no_other_model_from_starting(
    serve: Serving, folder: Path
) -> None:
    moved = time.monotonic()
    (folder / "other").rename(folder.parent / "elsewhere")
    serve.wait_for(r"other: \S+other is gone: llmserve unload other, or build it again", moved)
    status = run("status", "--url", serve.url)
    assert (status.returncode, "other is gone" in status.stdout) == (0, True)
    assert serve.try_generate("other") == "word ", "it is still served"
    (process,) = serve.processes("bin/tritonserver")
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    serve.wait_for(r"other: failed \(\S+other is gone\)", killed)
    serve.wait_for("triton: ready", killed)
    assert serve.try_generate("words") == "word "
    (folder.parent / "elsewhere").rename(folder / "other")
    assert run("reload", "other", "--url", serve.url).returncode == 0
    assert serve.try_generate("other") == "word "
    assert run("status", "--url", serve.url).returncode == 0


def test_a_killed_triton_comes_back_with_all_models_and_leaves_nothing(serve: Serving) -> None:
    (process,) = serve.processes("bin/tritonserver")
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    serve.wait_for("triton: restarting", killed)
    eventually(serve.nothing_is_left, TIMEOUT)
    eventually(lambda: serve.try_generate("words") and serve.try_generate("other"), TIMEOUT)
    figure("Triton killed: serving after", time.monotonic() - killed)
    serve.wait_for("triton: ready", killed)


def test_a_killed_guard_is_one_end_of_triton(serve: Serving) -> None:
    """Triton outlives it, and would keep its ports from the next one."""
    (triton,) = serve.processes("bin/tritonserver")
    guard = int(state_of(triton)[1])
    restarts = serve.output.count("triton: restarting")
    killed = time.monotonic()
    os.kill(guard, signal.SIGKILL)
    serve.wait_for(r"triton: restarting \(Triton ended: its guard was killed by SIGKILL\)", killed)
    figure("Triton's guard killed: serving after", serve.wait_for("words: ready", killed) - killed)
    assert serve.output.count("triton: restarting") == restarts + 1
    assert not state_of(triton)


def test_a_second_serve_of_the_same_models_with_little_shared_memory(
    serve: Serving, folder: Path
) -> None:
    """A request that does not fit into it affects only one model; HOME is not writable either."""
    if subprocess.run([*MOUNT_NAMESPACE, SMALL_SHM, "sh", "true"], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    home = {**os.environ, "HOME": "/proc/absent"}
    args = [str(folder), "--frontend", "none"]
    limited = Serving(*args, env=home, prefix=[*MOUNT_NAMESPACE, SMALL_SHM, "sh"])
    try:
        with pytest.raises(ClientError) as refused:
            limited.client.generate("words", "a" * (100 << 20), timeout=TIMEOUT)
        assert "'words'" in str(refused.value)
        assert "shared memory" in str(refused.value)
        assert limited.name not in str(refused.value)
        assert limited.try_generate("other") == "word "
        eventually(lambda: limited.try_generate("words") == "word ", TIMEOUT)
        assert limited.stop()[0] == 0
        assert limited.nothing_is_left()
    finally:
        limited.close()
    assert serve.try_generate("words") == serve.try_generate("other") == "word "


def test_all_streams_finish_if_it_is_stopped_with_a_dead_model(serve: Serving) -> None:
    log = Path(re.findall(r"log in (\S+)", serve.output)[0]).read_text(
        encoding="utf-8", errors="replace"
    )
    streams = [Stream(serve, "other", 60, 0.05) for _ in range(10)]
    serve.kill_stub("words")
    code, seconds = serve.stop(signal.SIGTERM)
    figure("stopped with ten streams of 3 s and a dead model: ended after", seconds)
    assert code == 0, serve.output
    assert [stream.whole() for stream in streams] == [60] * 10
    assert seconds < 35
    assert serve.nothing_is_left()
    assert run("status", "--url", serve.url).returncode == 4
    assert TOKEN not in log + serve.output
