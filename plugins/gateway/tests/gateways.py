"""Gateways: in this process in front of a Triton that answers at once, and in their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx2 as httpx
import openai
from starlette.applications import Starlette

from llmserve.client import CALL_HEADERS, Completion, ModelInfo, Piece
from llmserve.plugin import Address
from llmserve_gateway.app import make_app
from llmserve_gateway.gateway import Settings

URL = "127.0.0.1:9"
NO_TRITON = (Address(URL),)
_RUN = """
import sys
{before}
from llmserve.plugin import Address
from llmserve_gateway.admission import Limits
from llmserve_gateway.gateway import Settings
from llmserve_gateway.serving import Listening, run
run(Settings((Address({url!r}),), Limits({limits})), Listening(port=0, {fields}),
    lambda address: print(address, file=sys.stderr, flush=True))
"""


TEXT = {"model": "m", "prompt": "Hi"}


def ask(
    settings: Settings,
    method: str,
    path: str,
    drain: bool = False,
    before: Callable[[], None] = lambda: None,
    **request: Any,
) -> Any:
    async def go() -> Any:
        app = make_app(settings)
        before()
        app.state.gateway.admission.draining = drain
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **request)

    return asyncio.run(go())


class Triton:
    """Answers at once, and records the options and headers of requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}

    async def models(self) -> list[str]:
        return ["m"]

    async def model_ready(self, name: str) -> bool:
        return name in await self.models()

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        tensors: Any = {"text_input": None, "text_output": None}
        return ModelInfo(name, "unary", False, None, tensors, tensors, "0.1")

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        self.requests.append(options)
        self.headers = dict(CALL_HEADERS.get())
        return Completion("x", "stop", 2, 1)

    async def stream(self, name: str, prompt: str, **options: Any) -> AsyncIterator[Piece]:
        await self.generate(name, prompt)
        yield Piece("x", input_tokens=2, output_tokens=1)
        yield Piece("", finish_reason="length")


class SeeingTriton(Triton):
    """A model that declares an input for images."""

    async def model(self, name: str, *, refresh: bool = False) -> ModelInfo:
        info = await super().model(name, refresh=refresh)
        return replace(info, inputs={**info.inputs, "messages": ANY, "image_url": ANY})

    async def generate(self, name: str, prompt: str, **options: Any) -> Completion:
        if options.get("prompt_only") and not (prompt or "messages" in options):
            # It says nothing of itself.
            return Completion("x", "stop", 0, 0)
        return await super().generate(name, prompt, **options)


def app_before(triton: Any, settings: Settings | None = None) -> Starlette:
    """Return the application of a gateway in front of something that answers as Triton's client."""
    return make_app(settings or Settings(NO_TRITON), connect=lambda _: triton)


def client_of(app: Any, key: str) -> openai.AsyncOpenAI:
    """Return OpenAI's own client of a gateway in this process."""
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    client = openai.AsyncOpenAI(
        base_url="http://gateway/v1", api_key=key, http_client=http, max_retries=0
    )
    client.app = app  # type: ignore[attr-defined]
    return client


def request_via(
    triton: Any,
    path: str,
    tracer: Any = None,
    settings: Settings | None = None,
    times: int = 1,
    **request: Any,
) -> Any:
    async def go() -> Any:
        app = app_before(triton, settings)
        app.state.gateway.outcomes.tracer = tracer
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            responses = [await client.post(path, **request) for _ in range(times)]
            return responses if times > 1 else responses[0]

    return asyncio.run(go())


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for localhost, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", key,
         "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@contextmanager
def gateway_command(*args: str) -> Iterator[int]:
    """Run `llmserve gateway` without a Triton, and yield its port."""
    command = ["-m", "llmserve_cli", "gateway", "--port", "0", "--url", URL, *args]
    with _port_of(command) as (_, port):
        yield port


@contextmanager
def gateway_process(
    fields: str = "", limits: str = "1, 1", url: str = URL, before: str = ""
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a gateway with fields of `Listening`, and yield its process and its port."""
    command = ["-c", _RUN.format(url=url, limits=limits, fields=fields, before=before)]
    with _port_of(command) as running:
        yield running


@contextmanager
def _port_of(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        assert process.stderr is not None
        # Batches that are continued may be in its log before.
        lines = iter(process.stderr.readline, "")
        address = next((line for line in lines if "://" in line), "")
        yield process, int(address.rpartition(":")[2].removesuffix("/v1\n"))
    finally:
        process.kill()
        process.wait()
