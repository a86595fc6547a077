"""A gateway in a separate process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai

from llmserve.server import ModelReport, ServerReport, State
from llmserve.testing import LiveTriton
from llmserve.testing.command import LLMSERVE
from llmserve.testing.serving import listening


@contextmanager
def supervising(triton: LiveTriton, socket: Path) -> Iterator[None]:
    """Report each model that Triton has as ready, on a socket as that of `serve`."""

    async def report(_: Mapping[str, Any]) -> ServerReport:
        names = await asyncio.to_thread(triton.client.models)
        return ServerReport(
            State.READY, models=tuple(ModelReport(n, State.READY) for n in names),
            repository=str(triton.repository),
        )  # fmt: skip

    ended = threading.Event()

    async def listen() -> None:
        async with listening(socket, report):
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Gateway:
    """`llmserve gateway` on a free port."""

    def __init__(self, triton: LiveTriton, *args: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*LLMSERVE, "gateway", "--port", "0", "--url", triton.server.grpc_url, *args],
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **environment},
        )
        assert self.process.stderr is not None
        first = self.process.stderr.readline()
        assert "://" in first, first + self.process.stderr.read()
        self.url = first.split()[-1]
        self.root = self.url.removesuffix("/v1")
        self.log: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def client(self, key: str = "none", **extra: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, **extra)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.root}{path}", json=body, headers=headers, timeout=60)

    def logged(self, **fields: Any) -> dict[str, Any]:
        """Wait for a log line with these fields, which may follow the response."""
        deadline = time.monotonic() + 20
        while True:
            matches = [line for line in self.log if fields.items() <= line.items()]
            if matches:
                return matches[-1]
            assert time.monotonic() < deadline, (fields, self.log[-5:])
            time.sleep(0.02)

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{"):
                self.log.append(json.loads(line))
            else:
                self.warnings.append(line)
