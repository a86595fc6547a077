"""Small repositories for the tests of the server, and how to see what is left of one."""

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
from tests.support import LLMSERVE

PATIENCE = 90.0
"""Seconds. For what takes two or three on a machine that has nothing else to do."""
FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--frontend-port", "0"]
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
# Says ``word`` so often and so slowly as the prompt asks: "20 0.1".
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
# Is gone soon after it was loaded, every time.
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
    free = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return ServerSettings(folder, **{"runtime": "embedded", **free, **changes})


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def echo(server: Server, text: str, model: str = "echo") -> str:
    tensor = {"name": "IN", "shape": [1], "datatype": "BYTES", "data": [text]}
    answer = ask(f"{server.http_url}/v2/models/{model}/infer", {"inputs": [tensor]})
    return str(answer["outputs"][0]["data"][0])


def name_of(http_url: str) -> str:
    return str(ask(f"{http_url}/v2")["name"])


def left_of(name: str) -> list[str]:
    """Everything on this machine that carries a server's name; the log is not counted."""
    found = [str(path) for path in Path("/dev/shm").glob(f"{name}*")]
    temporary = Path(tempfile.gettempdir()).glob(f"{name}*")
    found += [str(path) for path in temporary if path.suffix != ".log"]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if name.encode() in command:
            found.append(f"{process.name}: {command!r}")
    return found


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return value


class Serving:
    """`llmserve serve` in a process of its own, and each line it says with the moment it came."""

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        within: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*within, *LLMSERVE, "serve", *words, *FREE],
            cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.said("Ctrl-C stops it", patience=240)
            self.url = re.findall(r"grpc +(\S+)", self.told)[0]
            self.http = re.findall(r"http +http://(\S+)", self.told)[0]
            self.frontend = re.findall(r"openai +http://([^/\s]+)", self.told)
            self.name = name_of(f"http://{self.http}")
            self.client = connect(self.url, timeout=30.0)
        except BaseException:
            self.process.kill()
            raise

    @property
    def told(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def said(self, pattern: str, after: float = 0.0, patience: float = PATIENCE) -> float:
        """Wait for a line, and return when it came."""

        def find() -> float | None:
            for when, line in list(self.lines):
                if when >= after and re.search(pattern, line):
                    return when
            assert self.process.poll() is None or after, self.told
            return None

        return float(eventually(find, patience))

    def answers(self, model: str, prompt: str = "1") -> str | None:
        with suppress(Exception):
            return self.client.generate(model, prompt, timeout=5.0).text
        return None

    def processes(self, program: str) -> dict[int, list[str]]:
        """Return the processes below this one that run a program, with their words."""
        parents, words = {}, {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
                parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
                line = (path / "cmdline").read_bytes().decode(errors="replace")
                words[int(path.name)] = line.split("\0")
        found = {}
        for process in words:
            above = process
            while above in parents and above != self.process.pid:
                above = parents[above]
            if above == self.process.pid and program in " ".join(words[process]):
                found[process] = words[process]
        return found

    def kill_stub(self, model: str) -> float:
        """Kill the process of a model, and return when."""
        (victim,) = self.processes(f"models/{model}/1/model.py ")
        os.kill(victim, signal.SIGKILL)
        return time.monotonic()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal, and return the exit code and after how many seconds it came."""
        begun = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        return code, time.monotonic() - begun

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()

    def nothing_is_left(self) -> bool:
        return not left_of(self.name)

    def interrupt(self) -> int:
        try:
            return self.end(signal.SIGINT)[0]
        finally:
            self.process.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))


def figure(what: str, number: float, unit: str = " s") -> None:
    """Print a figure of this run; what is asserted leaves room for a machine that is busy."""
    print(f"\n  {what}: {number:.2g}{unit}", file=sys.__stderr__)
