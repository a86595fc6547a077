"""How smoothly streams arrive, of a model whose steps take 10 ms and compute nothing.

    python -m plugins.tools.bench.streams [--rounds 3] [--tokens 100] [--batching continuous]

Directly over gRPC, with and without a shared stream in turns, and through the gateway's HTTP in
front of it, with 32, 128 and 256 streams. The ideal is a token of every stream each 10 ms. The gap
is between two pieces of a stream. Processor time is that of who reads: the client, or the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import pytest
from rich.console import Console
from rich.table import Table

from llmserve.client import AsyncClient, connect_async
from llmserve.client.aio import AsyncChannel
from llmserve.testing import LiveTriton
from tests.support import install

from .gateway import cpu_seconds, gateway
from .paced.paced_model import STEP

STREAMS = 32, 128, 256
PROMPT = "Every word of this is said again and again, word by word, and a number: "
OWN, SHARED, HTTP = "gRPC, own responses", "gRPC, shared stream", "HTTP, gateway"


@dataclass
class Watched:
    """What arrived: how many pieces, when each after the one before, and what it cost."""

    pieces: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0

    def gap(self, share: float) -> float:
        return sorted(self.gaps)[int(share * len(self.gaps))] * 1e3

    def cells(self, streams: int) -> list[str]:
        rate = self.tokens / self.seconds
        return [
            f"{rate:,.0f}", f"{rate * STEP / streams:.2f}", f"{self.tokens / self.pieces:.2f}",
            f"{self.gap(0.5):.1f}", f"{self.gap(0.95):.1f}", f"{self.gap(0.99):.1f}",
            f"{1e3 * self.cpu / self.pieces:.3f}",
        ]  # fmt: skip


Stream = Callable[[int], AsyncIterator[int]]
"""Yields a number of tokens whenever a piece arrives."""


async def watch(streams: int, stream: Stream, cpu: Callable[[], float]) -> Watched:
    watched = Watched()

    async def one(number: int) -> None:
        last = 0.0
        async for tokens in stream(number):
            now = time.perf_counter()
            if last:
                watched.gaps.append(now - last)
            last = now
            watched.pieces += 1
            watched.tokens += tokens

    began, used = time.perf_counter(), cpu()
    await asyncio.gather(*(one(number) for number in range(streams)))
    watched.seconds, watched.cpu = time.perf_counter() - began, cpu() - used
    return watched


async def over_grpc(url: str, model: str, streams: int, tokens: int, *, share: bool) -> Watched:
    async with connect_async(url) as client:
        channel: AsyncChannel = client._channel
        channel.shares = share

        async def stream(number: int) -> AsyncIterator[int]:
            before = 0
            async for piece in client.stream(model, PROMPT + str(number), max_tokens=tokens):
                count = piece.output_tokens or 0
                yield count - before
                before = count

        await _warm(client, model)
        return await watch(streams, stream, time.process_time)


async def _warm(client: AsyncClient, model: str) -> None:
    async for _ in client.stream(model, PROMPT, max_tokens=20):
        pass


async def over_http(address: str, process: int, model: str, streams: int, tokens: int) -> Watched:
    body = {"model": model, "max_tokens": tokens, "stream": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def stream(number: int) -> AsyncIterator[int]:
            sent = {**body, "prompt": PROMPT + str(number)}
            async with session.post(f"{address}/completions", json=sent) as response:
                response.raise_for_status()
                async for chunk in response.content.iter_any():
                    # Tokens are not counted in each chunk; there are as many as asked for.
                    if events := chunk.count(b'"text":'):
                        yield events

        async for _ in stream(0):
            pass
        watched = await watch(streams, stream, lambda: cpu_seconds(process))
        watched.tokens = streams * tokens
        return watched


@contextmanager
def paced(folder: Path) -> Iterator[LiveTriton]:
    """Serve with the plugin of the scripted model."""
    install(folder / "site", "paced-model", "[llmserve.api3]\npaced = paced_model\n")
    with pytest.MonkeyPatch.context() as patch:
        for entry in (folder / "site", Path(__file__).with_name("paced")):
            patch.syspath_prepend(entry)
            path = os.pathsep.join(filter(None, [str(entry), os.environ.get("PYTHONPATH")]))
            patch.setenv("PYTHONPATH", path)
        with LiveTriton.start(folder / "models") as live:
            yield live


def measure(live: LiveTriton, model: str, rounds: int, tokens: int) -> Table:
    url = live.server.grpc_url
    titles = ("tokens/s", "of the ideal", "tokens/piece", "gap p50", "p95", "p99 ms",
               "CPU ms/piece")  # fmt: skip
    table = Table("", "streams", *titles, title=f"{tokens} tokens each, steps of 10 ms")
    rows: dict[tuple[str, int], list[list[str]]] = {}
    with gateway(url) as (address, process):
        for _ in range(rounds):
            for streams in STREAMS:
                for name, call in (
                    (OWN, lambda n: over_grpc(url, model, n, tokens, share=False)),
                    (SHARED, lambda n: over_grpc(url, model, n, tokens, share=True)),
                    (HTTP, lambda n: over_http(address, process, model, n, tokens)),
                ):
                    watched = asyncio.run(_called(call, streams))
                    rows.setdefault((name, streams), []).append(watched.cells(streams))
    for (name, streams), found in sorted(rows.items()):
        numbers = [
            [float(cell.replace(",", "")) for cell in column] for column in zip(*found, strict=True)
        ]
        cells = [f"{median(column):,.3f}".rstrip("0").rstrip(".") for column in numbers]
        table.add_row(name, str(streams), *cells)
    return table


async def _called(call: Callable[[int], Awaitable[Watched]], streams: int) -> Watched:
    return await call(streams)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--batching", default="continuous")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, paced(Path(folder)) as live:
        model = live.build("paced", batching=arguments.batching)
        table = measure(live, model, arguments.rounds, arguments.tokens)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    table.caption = f"{os.cpu_count()} cores; load of the machine at the end {load}"
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
