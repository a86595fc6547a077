"""Small repositories for the tests of the server, and how to see what is left of one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmserve.server import Server, ServerSettings
from tests.support import LLMSERVE

FREE = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--frontend-port", "0"]
PROMPT = "Programming in C++ is like"

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [1] }
output { name: "OUT" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
"""
ECHO = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("OUT", value)]) for value in inputs]
"""
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
        (folder / name / "config.pbtxt").write_text(CONFIG)
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


def name_of(server: Server) -> str:
    return str(ask(f"{server.http_url}/v2")["name"])


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
    """`llmserve serve` in a process of its own, as in a second terminal."""

    def __init__(
        self, *words: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ
    ) -> None:
        self.process = subprocess.Popen(
            [*LLMSERVE, "serve", *words, *FREE],
            cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        )  # fmt: skip
        assert self.process.stderr is not None
        self.told = ""
        for line in self.process.stderr:
            self.told += line
            if "Ctrl-C stops it" in line:
                break
        assert "Ctrl-C stops it" in self.told, self.told
        self.url = re.findall(r"grpc +(\S+)", self.told)[0]
        self.frontend = re.findall(r"openai +http://([^/\s]+)", self.told)
        self.http = re.findall(r"http +http://(\S+)", self.told)[0]

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode
