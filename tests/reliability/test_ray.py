"""What `llmserve deploy ray` writes, on two nodes of Ray, each a replica with its Triton."""

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

from tests.live.servers import PATIENCE, WORDS, eventually, figure, repository
from tests.support import LLMSERVE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="make test-ray installs Ray"),
]
CLIENTS = 6
PLACES, QUEUE = 4, 8
WORDS_ASKED = "10 0.02"


@dataclass
class Sent:
    begun: float
    ended: float
    status: int
    answer: str

    @property
    def well(self) -> bool:
        return self.status == 200 and "[DONE]" in self.answer and '"error"' not in self.answer


class Cluster:
    """Two nodes on this machine, and what `serve run` makes of the files."""

    def __init__(self) -> None:
        # Sockets are in it, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="llmray"))
        self.out = self.folder / "out"
        models = str(repository(self.folder / "models", words=WORDS))
        words = ["--no-auth", "--concurrency", str(PLACES), "--cpus", "1", "--max-replicas", "2"]
        command = [*LLMSERVE, "deploy", "ray", models, "--out", str(self.out), *words]
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
        eventually(lambda: self._listens(address), PATIENCE)
        self._node(f"--address={address}", "--node-ip-address=127.0.0.2")
        self._run("serve", "run", str(self.out / "serve.yaml"), f"--address={address}")
        eventually(lambda: len(self.ready()) == 2, 2 * PATIENCE)
        eventually(lambda: self.ask("1").well, PATIENCE)

    def _node(self, *words: str) -> None:
        small = ("--num-cpus=1", "--object-store-memory=100000000")
        self._run("ray", "start", "--block", *small, *words)

    def _run(self, *words: str) -> None:
        program = str(Path(sys.executable).with_name(words[0]))
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([program, *words[1:]], env=self._env, stdout=log,
                                       stderr=log, start_new_session=True)  # fmt: skip
        self._processes.append(process)

    def _listens(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        return False

    def tritons(self) -> dict[int, str]:
        """Return the processes of Triton here, each with its address."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                program, *words = (path / "cmdline").read_bytes().decode().split("\0")
                ours = str(self.out).encode() in (path / "environ").read_bytes()
                if program.endswith("tritonserver") and ours:
                    (port,) = (word for word in words if word.startswith("--http-port="))
                    found[int(path.name)] = f"http://127.0.0.1:{port.partition('=')[2]}"
        return found

    def ready(self) -> set[int]:
        """Return the Tritons that answer."""
        found = set()
        for process, url in self.tritons().items():
            with suppress(OSError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
                found.add(process)
        return found

    def family(self, triton: int) -> tuple[int, int]:
        """Return the process of Ray that has started a Triton's guard, and its model's process."""
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

    def ask(self, prompt: str) -> Sent:
        begun = time.monotonic()
        try:
            with urllib.request.urlopen(self.post(prompt), timeout=PATIENCE) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        except OSError as error:
            status, text = 0, repr(error)
        return Sent(begun, time.monotonic(), status, text)

    def metrics(self) -> str:
        """Return what one of the gateways tells, whichever Ray asks."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:
            return str(answer.read().decode())

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
    """Clients who ask one after the other, and like OpenAI's wait half a second after a failure."""

    def __init__(self, cluster: Cluster) -> None:
        self.sent: list[Sent] = []
        self._cluster = cluster
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._end.is_set():
            self.sent.append(self._cluster.ask(WORDS_ASKED))
            if not self.sent[-1].well:
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
    # However Ray ends its processes, the guards end theirs.
    eventually(lambda: not running.tritons())


def test_a_triton_that_is_killed_under_load_is_back_in_its_replica(cluster: Cluster) -> None:
    both = cluster.ready()
    victim = min(both)
    with Load(cluster) as load:
        eventually(lambda: len(load.sent) > 200, PATIENCE)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: len(cluster.ready() - {victim}) == 2, PATIENCE)
        whole = time.monotonic() - killed
        before = len(load.sent)
        eventually(lambda: len(load.sent) > before + 200, PATIENCE)
    failed = [one for one in load.sent if not one.well]
    last = max((one.ended for one in failed), default=killed) - killed
    figure("a Triton is killed: whole again after", whole)
    figure("a Triton is killed: last failure after", last)
    figure(f"a Triton is killed: failed of {len(load.sent)}", len(failed), "")
    figure("a Triton is killed: slowest", max(one.ended - one.begun for one in load.sent))
    assert len(failed) < 0.05 * len(load.sent), failed
    assert whole <= 6, "a machine that is busy takes longer"
    assert last <= 6


def test_a_client_that_leaves_frees_its_place(cluster: Cluster) -> None:
    with urllib.request.urlopen(cluster.post("1000 0.05"), timeout=PATIENCE) as answer:
        assert b"word" in answer.readline()
    eventually(lambda: 'outcome="cancelled"' in cluster.metrics(), PATIENCE)


def test_too_much_is_refused_in_the_words_of_the_api(cluster: Cluster) -> None:
    answers: list[Sent] = []
    asking = [
        threading.Thread(target=lambda: answers.append(cluster.ask("20 0.1")))
        for _ in range(2 * (PLACES + QUEUE) + 10)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    refused = [one for one in answers if one.status == 429]
    assert refused
    assert all(json.loads(one.answer)["error"]["code"] == "queue_full" for one in refused)
    assert len(refused) + sum(one.well for one in answers) == len(answers)


@pytest.mark.parametrize("what", ["replica", "model"])
def test_ray_replaces_a_replica_that_has_died_or_whose_model_has(
    cluster: Cluster, what: str
) -> None:
    victim = min(cluster.ready())
    killed = time.monotonic()
    above, below = cluster.family(victim)
    os.kill(above if what == "replica" else below, signal.SIGKILL)
    # The guard or Ray ends it; no client asks, so that a canary has to find the model dead.
    eventually(lambda: victim not in cluster.tritons(), PATIENCE)
    eventually(lambda: len(cluster.ready()) == 2, PATIENCE)
    figure(f"a {what} is killed: whole again after", time.monotonic() - killed)
    assert cluster.ask("1").well
