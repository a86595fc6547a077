"""`llmserve serve` in a process of its own, what it says as it says it, and whom it has started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from llmserve.client import connect
from tests.live.servers import FREE, eventually, left_of
from tests.support import LLMSERVE

PATIENCE = 90.0
"""Seconds. For what takes two or three on a machine that has nothing else to do."""

CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
instance_group { kind: KIND_CPU }
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


def repository(folder: Path, **models: str) -> Path:
    for name, source in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(CONFIG)
        (folder / name / "1" / "model.py").write_text(source)
    return folder


class Watched:
    """A `serve` whose lines are kept, each with the moment at which it came."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [*LLMSERVE, "serve", str(folder), *FREE, *words],
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.said("Ctrl-C stops it")
            self.url = self._found(r"grpc +(\S+)")
            self.client = connect(self.url, timeout=30.0)
            self.name = Path(self._stub_words()[0]).parents[2].name.rsplit("-", 1)[0]
        except BaseException:
            self.process.kill()
            raise

    @property
    def told(self) -> str:
        return "\n".join(line for _, line in list(self.lines))

    def said(self, pattern: str, after: float = 0.0) -> float:
        """Wait for a line, and return when it came."""

        def find() -> float | None:
            for when, line in list(self.lines):
                if when >= after and re.search(pattern, line):
                    return when
            assert self.process.poll() is None or after, self.told
            return None

        return float(eventually(find, PATIENCE))

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

    def _found(self, pattern: str) -> str:
        found = re.search(pattern, self.told)
        assert found, self.told
        return found[1]

    def _stub_words(self) -> list[str]:
        return next(iter(self.processes("triton_python_backend_stub").values()))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))


def figure(what: str, seconds: float) -> None:
    """Print a figure of this run; what is asserted leaves room for a machine that is busy."""
    print(f"\n  {what}: {seconds:.1f} s", file=sys.__stderr__)
