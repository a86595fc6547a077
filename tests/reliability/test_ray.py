"""What `llmserve deploy ray` writes, run on two Ray nodes, each with a replica and its Triton."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from llmserve.testing.command import LLMSERVE
from tests.live.servers import TIMEOUT, WORDS, eventually, figure, repository

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="make test-ray installs Ray"),
]
CLIENTS = 6
SLOTS, QUEUE = 4, 8
PROMPT = "10 0.02"


@dataclass
class Response:
    started: float
    ended: float
    status: int
    text: str

    @property
    def ok(self) -> bool:
        return self.status == 200 and "[DONE]" in self.text and '"error"' not in self.text


class Cluster:
    """Two Ray nodes on this machine, on which `serve run` deploys the written files."""

    def __init__(self) -> None:
        # It contains sockets, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="llmray"))
        self.out = self.folder / "out"
        models = str(repository(self.folder / "models", words=WORDS))
        args = ["--no-auth", "--concurrency", str(SLOTS), "--cpus", "1", "--max-replicas", "2"]
        command = [*LLMSERVE, "deploy", "ray", models, "--out", str(self.out), *args]
        subprocess.run(command, check=True, capture_output=True)
        config = yaml.safe_load((self.out / "serve.yaml").read_text(encoding="utf-8"))
        config["http_options"]["port"] = port = free_port()
        (self.out / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self.url = f"http://127.0.0.1:{port}"
        self._env = {
            **os.environ,
            "PYTHONPATH": str(self.out),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(16).hex(),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        address = f"127.0.0.1:{free_port()}"
        self._node("--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false",
                   f"--ray-client-server-port={free_port()}", "--node-ip-address=127.0.0.1",
                   f"--temp-dir={self.folder}/ray")  # fmt: skip
        eventually(lambda: self._listens(address), TIMEOUT)
        self._node(f"--address={address}", "--node-ip-address=127.0.0.2")
        self._run("serve", "run", str(self.out / "serve.yaml"), f"--address={address}")
        eventually(lambda: len(self.ready()) == 2, 2 * TIMEOUT)
        eventually(lambda: self.ask("1").ok, TIMEOUT)

    def _node(self, *args: str) -> None:
        small = ("--num-cpus=1", "--object-store-memory=100000000")
        self._run("ray", "start", "--block", *small, *args)

    def _run(self, *args: str) -> None:
        program = str(Path(sys.executable).with_name(args[0]))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([program, *args[1:]], env=self._env, stdout=log,
                                       stderr=log, start_new_session=True)  # fmt: skip
        self._processes.append(process)

    def _listens(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        return False

    def tritons(self) -> dict[int, str]:
        """Return the Triton processes of this cluster with their addresses."""
        addresses = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                program, *args = (path / "cmdline").read_bytes().decode().split("\0")
                ours = str(self.out).encode() in (path / "environ").read_bytes()
                if program.endswith("tritonserver") and ours:
                    (port,) = (arg for arg in args if arg.startswith("--http-port="))
                    addresses[int(path.name)] = f"http://127.0.0.1:{port.partition('=')[2]}"
        return addresses

    def ready(self) -> set[int]:
        """Return the processes of the Tritons that are ready."""
        processes = set()
        for process, url in self.tritons().items():
            with suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
                processes.add(process)
        return processes

    def family(self, triton: int) -> tuple[int, int]:
        """Return the Ray process that started a Triton's guard, and the process of its model."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
        (model,) = (child for child, parent in parents.items() if parent == triton)
        return parents[parents[triton]], model

    def post(self, prompt: str) -> urllib.request.Request:
        body = {"model": "words", "prompt": prompt, "stream": True}
        return urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode())

    def ask(self, prompt: str) -> Response:
        started = time.monotonic()
        try:
            with urllib.request.urlopen(self.post(prompt), timeout=TIMEOUT) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        except OSError as error:
            status, text = 0, repr(error)
        return Response(started, time.monotonic(), status, text)

    def metrics(self) -> str:
        """Return the metrics of one of the gateways, whichever Ray chooses."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT) as response:
            return str(response.read().decode())

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Load:
    """Clients that send one request at a time and, like OpenAI's, wait 0.5 s after a failure."""

    def __init__(self, cluster: Cluster) -> None:
        self.responses: list[Response] = []
        self._cluster = cluster
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._end.is_set():
            self.responses.append(self._cluster.ask(PROMPT))
            if not self.responses[-1].ok:
                self._end.wait(0.5)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    running = Cluster()
    try:
        yield running
    finally:
        running.close()
    # However Ray ends its processes, the guards end the Tritons.
    eventually(lambda: not running.tritons())


def test_a_triton_that_is_killed_under_load_is_back_in_its_replica(cluster: Cluster) -> None:
    both = cluster.ready()
    victim = min(both)
    with Load(cluster) as load:
        eventually(lambda: len(load.responses) > 200, TIMEOUT)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(cluster.ready() - {victim}) == 2, TIMEOUT)
        recovered = time.monotonic() - killed
        before = len(load.responses)
        eventually(lambda: len(load.responses) > before + 200, TIMEOUT)
    failed = [response for response in load.responses if not response.ok]
    last = max((response.ended for response in failed), default=killed) - killed
    slowest = max(response.ended - response.started for response in load.responses)
    figure("a Triton is killed: recovered after", recovered)
    figure("a Triton is killed: last failure after", last)
    figure(f"a Triton is killed: failed of {len(load.responses)}", len(failed), "")
    figure("a Triton is killed: slowest", slowest)
    assert len(failed) < 0.05 * len(load.responses), failed
    assert recovered <= 6, "a busy machine takes longer"
    assert last <= 6


def test_a_client_that_disconnects_frees_its_slot(cluster: Cluster) -> None:
    with urllib.request.urlopen(cluster.post("1000 0.05"), timeout=TIMEOUT) as response:
        assert b"word" in response.readline()
    eventually(lambda: 'outcome="cancelled"' in cluster.metrics(), TIMEOUT)


def test_excess_requests_are_refused_with_an_error_of_the_api(cluster: Cluster) -> None:
    responses: list[Response] = []
    threads = [
        threading.Thread(target=lambda: responses.append(cluster.ask("20 0.1")))
        for _ in range(2 * (SLOTS + QUEUE) + 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [response for response in responses if response.status == 429]
    assert refused
    assert {json.loads(response.text)["error"]["code"] for response in refused} == {"queue_full"}
    assert len(refused) + sum(response.ok for response in responses) == len(responses)


@pytest.mark.parametrize("what", ["replica", "model"])
def test_a_replica_that_dies_is_replaced_and_one_whose_model_dies_recovers(
    cluster: Cluster, what: str
) -> None:
    victim = min(cluster.ready())
    killed = time.monotonic()
    replica, model = cluster.family(victim)
    os.kill(replica if what == "replica" else model, signal.SIGKILL)
    # The guard ends it with its replica, and the replica itself restarts it for a dead model.
    eventually(lambda: victim not in cluster.tritons(), TIMEOUT)
    eventually(lambda: len(cluster.ready()) == 2, TIMEOUT)
    figure(f"a {what} is killed: recovered after", time.monotonic() - killed)
    assert cluster.ask("1").ok
