"""Other engines, each in a process of its own and in a Python that has it."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 240.0
"""No answer is waited for longer than that, in seconds."""


class Worker:
    """A process that answers a line of JSON with a line of JSON."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.name: str = self._read()

    @classmethod
    @contextmanager
    def start(cls, python: Path, script: str, *arguments: str) -> Iterator[Worker]:
        """Start a script of this folder; it is gone when the block is left."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [str(python), str(Path(__file__).with_name(script)), *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            try:
                yield cls(process, log)
            finally:
                process.kill()
                process.wait()

    def rate(self, prompts: Sequence[list[int]], tokens: int) -> float:
        """Return the tokens a second of prompts at a time."""
        asked = {"prompts": prompts, "tokens": tokens}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        made, seconds = self._read()
        if made != len(prompts) * tokens:
            raise RuntimeError(f"{self.name} made {made} tokens, not {len(prompts) * tokens}")
        return float(made / seconds)

    def _read(self) -> Any:
        """Return the next line that is JSON; libraries print their own."""
        assert self._process.stdout
        while select.select([self._process.stdout], [], [], PATIENCE)[0]:
            line = self._process.stdout.readline()
            if not line:
                break
            try:
                return json.loads(line)
            except ValueError:
                continue
        last = self._log.read_text().strip().splitlines()[-1:] or ["no word from it"]
        raise RuntimeError(f"a worker gave no answer: {last[0]}")
