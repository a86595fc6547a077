"""A gateway in front of a live Triton, in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx2 as httpx
import openai

from llmserve.testing import LiveTriton
from llmserve.testing.command import LLMSERVE


@dataclass(frozen=True)
class Gateway:
    url: str
    """Ends with /v1."""

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{self.root}{path}", json=body, timeout=60)


@contextmanager
def gateway_of(triton: LiveTriton, *args: str) -> Iterator[Gateway]:
    process = subprocess.Popen(
        [*LLMSERVE, "gateway", "--port", "0", "--url", triton.server.grpc_url, *args],
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "://" in line)
        # Its log is longer than a pipe.
        Thread(target=process.stderr.read, daemon=True).start()
        yield Gateway(line.split()[-1])
    finally:
        process.terminate()
        process.wait(20)
