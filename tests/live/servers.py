"""Small repositories for tests of the server, a running `serve`, and a search for leftovers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmserve.client import connect
from llmserve.server import Server, ServerSettings
from llmserve.testing.command import LLMSERVE

TIMEOUT = 90.0
"""Seconds. On an idle machine, two or three are enough."""
FREE_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--port", "0"]
PROMPT = "Programming in C++ is like"

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [1] }
output { name: "OUT" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
"""
STREAMS = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
"""
ECHO = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", value)]) for value in inputs]
"""
# The prompt sets how many times it sends ``word``, and the pause before each: "20 0.1".
WORDS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        sender = request.get_response_sender()
        prompt = pb.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        count, _, pause = prompt.decode().partition(" ")
        for _ in range(int(count) if count.isdigit() else 1):
            time.sleep(float(pause or 0))
            word = pb.Tensor("text_output", np.array([b"word "], dtype=object))
            sender.send(pb.InferenceResponse([word]))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Its process dies shortly after every load.
DIES = WORDS.replace(
    "    def execute",
    """    def initialize(self, args):
        import os
        threading.Timer(0.7, lambda: os.kill(os.getpid(), 9)).start()

    def execute""",
)
IMPORTS = "import acme\n"
RAISES = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("the weights are cut short")
"""
# Its process ends only long after it has raised an error, as one may that has started threads.
LINGERS = """
import threading, time

class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=time.sleep, args=(600,)).start()
        import acme
"""
CRASHES = """
import os, signal
os.kill(os.getpid(), signal.SIGSEGV)
"""
SLOW = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(300)
"""


def repository(folder: Path, **models: str) -> Path:
    for name, source in models.items():
        (folder / name / "1").mkdir(parents=True)
        config = STREAMS if "get_response_sender" in source else CONFIG
        (folder / name / "config.pbtxt").write_text(config)
        (folder / name / "1" / "model.py").write_text(source)
    return folder


def settings(folder: Path, **changes: Any) -> ServerSettings:
    free_ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return ServerSettings(folder, **{"runtime": "embedded", **free_ports, **changes})


def fetch(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=60) as response:
        return json.loads(response.read() or b"null")


def echo(server: Server, text: str, model: str = "echo") -> str:
    tensor = {"name": "IN", "shape": [1], "datatype": "BYTES", "data": [text]}
    response = fetch(f"{server.http_url}/v2/models/{model}/infer", {"inputs": [tensor]})
    return str(response["outputs"][0]["data"][0])


def name_of(http_url: str) -> str:
    return str(fetch(f"{http_url}/v2")["name"])


def leftovers(name: str) -> list[str]:
    """Return everything on this machine that contains a server's name, except its log."""
    items = [str(path) for path in Path("/dev/shm").glob(f"{name}*")]
    temporary = Path(tempfile.gettempdir()).glob(f"{name}*")
    items += [str(path) for path in temporary if path.suffix != ".log"]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if name.encode() in command:
            items.append(f"{process.name}: {command!r}")
    return items


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out after {seconds:g} s"
        time.sleep(0.05)
    return value


class Serving:
    """`llmserve serve` in a separate process; ``lines`` has its messages and when each arrived."""

    def __init__(
        self,
        *args: str,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        prefix: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, *LLMSERVE, "serve", *args, *FREE_PORTS],
            cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.wait_for("Ctrl-C stops it", timeout=240)
            self.url = re.findall(r"grpc +(\S+)", self.output)[0]
            self.http = re.findall(r"http +http://(\S+)", self.output)[0]
            self.frontend = re.findall(r"openai +http://([^/\s]+)", self.output)
            self.name = name_of(f"http://{self.http}")
            self.client = connect(self.url, timeout=30.0)
        except BaseException:
            self.process.kill()
            raise

    @property
    def output(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def wait_for(self, pattern: str, after: float = 0.0, timeout: float = TIMEOUT) -> float:
        """Wait for a line, and return when it arrived."""

        def find() -> float | None:
            for when, line in list(self.lines):
                if when >= after and re.search(pattern, line):
                    return when
            assert self.process.poll() is None or after, self.output
            return None

        return float(eventually(find, timeout))

    def try_generate(self, model: str, prompt: str = "1") -> str | None:
        with suppress(Exception):
            return self.client.generate(model, prompt, timeout=5.0).text
        return None

    def processes(self, program: str) -> dict[int, list[str]]:
        """Return the command lines of the processes below this one that run a program."""
        parents, commands = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
                line = (path / "cmdline").read_bytes().decode(errors="replace")
                commands[int(path.name)] = line.split("\0")
        matches = {}
        for process, command in commands.items():
            ancestor = process
            while ancestor in parents and ancestor != self.process.pid:
                ancestor = parents[ancestor]
            if ancestor == self.process.pid and program in " ".join(command):
                matches[process] = command
        return matches

    def kill_stub(self, model: str) -> float:
        """Kill a model's process, and return when."""
        (victim,) = self.processes(f"models/{model}/1/model.py ")
        os.kill(victim, signal.SIGKILL)
        return time.monotonic()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal, and return the exit code and how many seconds the process took to end."""
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(TIMEOUT)
        return code, time.monotonic() - started

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()

    def nothing_is_left(self) -> bool:
        return not leftovers(self.name)

    def interrupt(self) -> int:
        try:
            return self.stop(signal.SIGINT)[0]
        finally:
            self.process.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))


class Stream:
    """A stream that a thread reads while other things happen."""

    def __init__(self, serve: Serving, model: str, count: int, pause: float) -> None:
        self.words: list[str] = []
        self.error: Exception | None = None
        self._arguments = serve, model, f"{count} {pause}"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        eventually(lambda: self.words or self.error, TIMEOUT)

    def whole(self) -> int:
        self._thread.join(TIMEOUT)
        assert self.error is None, self.error
        return len(self.words)

    def _read(self) -> None:
        serve, model, prompt = self._arguments
        try:
            for piece in serve.client.stream(model, prompt, timeout=TIMEOUT):
                self.words.append(piece.text)
        except Exception as error:
            self.error = error


def figure(what: str, number: float, unit: str = " s") -> None:
    """Print a figure of this run; the assertions about it allow for a busy machine."""
    print(f"\n  {what}: {number:.2g}{unit}", file=sys.__stderr__)
