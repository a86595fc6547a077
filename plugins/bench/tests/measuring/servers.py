"""A scripted Triton in a process of its own, with the times that measurements expect."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc import InferenceServerClient

from llmserve.testing import ScriptedTriton


@dataclass(frozen=True)
class Running:
    url: str
    process: subprocess.Popen[str]

    def answered(self) -> int:
        with InferenceServerClient(self.url) as client:
            stats = client.get_inference_statistics("whole").model_stats[0].inference_stats
        return int(stats.success.count)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def scripted(
    *, first: float = 0.05, gap: float = 0.02, tokens: Sequence[int] = (1, 1, 1, 1), **script: Any
) -> Iterator[Running]:
    pieces = ["x "] * len(tokens)
    triton = ScriptedTriton(pieces, tokens, first=first, gap=gap, **script)
    with triton.in_a_process() as (url, process):
        yield Running(url, process)
